"""What crosses the border between front end and engine: token ids in, token ids out, no text.

The same structs serve in process (passed as objects) and between processes (msgspec over ZeroMQ).
"""

from typing import Literal

import msgspec

from jaxllm.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt with its sampling parameters; the engine makes `sampling.n` sequences of it.

    `arrival_time` is time.time() at the door; `cache_salt` separates prefix-cache users.
    `bad_word_tokens` are the token sequences of `sampling.bad_words` (text is unknown below).
    """

    request_id: str
    prompt_tokens: list[int]
    sampling: SamplingParams
    arrival_time: float
    priority: int = 0
    cache_salt: str | None = None
    eos_token_ids: list[int] = []
    bad_word_tokens: list[list[int]] = []


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities at one position: the chosen token first, then the top k by rank.

    The lists have equal length; ranks start at 1. The chosen token may occur again in the top k.
    """

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


class RequestDelta(msgspec.Struct, kw_only=True):
    """News of one sequence (`index` of its request) since the last delta.

    `logprobs` has one entry per token in `tokens` when asked for. `prompt_logprobs` comes once, with
    the first delta of the sequence: one entry per prompt token, None at the first position.
    `stop_reason` is the stop token id that ended the sequence (None for EOS and length).
    Times are time.monotonic() seconds in the engine's process.
    """

    request_id: str
    index: int
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    queued_time: float = 0.0
    scheduled_time: float = 0.0
    first_token_time: float = 0.0
    last_token_time: float = 0.0
    error: str | None = None


class EngineStats(msgspec.Struct, kw_only=True):
    """A snapshot of the engine. Counters only grow; usage figures are fractions 0..1."""

    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    kv_cache_usage: float = 0.0
    swap_usage: float = 0.0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_steps: int = 0
    num_launches: int = 0
    num_unexpected_compiles: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    pages_in_use: int = 0


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the front end must know of the engine to validate a request at the door."""

    vocab_size: int
    max_model_len: int
    max_logprobs: int
    max_num_seqs: int
    kv_capacity_tokens: int
    page_size: int
