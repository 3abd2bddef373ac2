"""What LLM and the server hand back: texts, tokens, log-probabilities and times of one request."""

from dataclasses import dataclass, field

from jaxllm.engine.protocol import FinishReason


@dataclass(slots=True)
class Logprob:
    """Log-probability of one token at one position.

    Attributes:
        logprob: natural logarithm of the probability.
        rank: 1 for the most probable token of the position, then 2, ...
        decoded_token: the token's text where it stands. A token that ends within a character has ""
            and the token that completes the character has the whole of it.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]
"""Token id -> Logprob at one position: the chosen token first, then the top k by rank."""


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence of a request.

    Attributes:
        index: which of the request's n sequences.
        text: generated text (only the new text with RequestOutputKind.DELTA).
        token_ids: generated tokens (only the new ones with DELTA), the stop token included.
        cumulative_logprob: sum of the tokens' log-probabilities so far; None unless asked for.
        logprobs: one entry per token of `token_ids`; None unless asked for.
        finish_reason: "stop", "length", "abort" or "error"; None while it runs.
        stop_reason: the stop string or the stop token id that ended it; None for EOS and length.
        error: what went wrong, with finish_reason "error".
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    def finished(self) -> bool:
        """True once the sequence has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request.

    Attributes:
        arrival_time: wall clock (time.time()) at the door, seconds.
        num_generation_tokens: output tokens of all its sequences.
        queued_ts, scheduled_ts, first_token_ts, last_token_ts: time.monotonic() seconds of the engine;
            0.0 until it happened.
        first_token_latency: seconds from arrival to the first token, as the front end saw it.
    """

    arrival_time: float = 0.0
    num_generation_tokens: int = 0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0


@dataclass(slots=True)
class RequestOutput:
    """A request's outputs, complete or so far.

    Attributes:
        request_id: id of the request.
        prompt: the prompt's text; None when token ids were given.
        prompt_token_ids: the prompt's tokens.
        prompt_logprobs: one entry per prompt token, None at the first; None unless asked for.
        outputs: the sequences, by index (with DELTA only those with news).
        finished: every sequence has ended.
        metrics: times; None when statistics are switched off.
        num_cached_tokens: prompt tokens whose KV came from the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
