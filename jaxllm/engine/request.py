"""Request and Sequence: what the scheduler knows of the work it was given. Host only, no text.

A sequence's tokens are its prompt and its confirmed output. The device runs ahead of the host:

    position    0 ............ P-1 | P ........ N-1 | N ..... N+I-1
                prompt             | output_tokens  | in flight: sampled, not read yet

`num_computed_tokens` counts the positions whose KV has been dispatched. A running sequence that has
sampled lacks exactly one: the last token's, which is what its next decode row computes.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import Enum

from jaxllm.cache.page_allocator import SequencePages
from jaxllm.cache.prefix_cache import ExtraKey
from jaxllm.engine.protocol import EngineRequest, FinishReason
from jaxllm.errors import RequestError
from jaxllm.sampling_params import SamplingParams


class SequenceStatus(Enum):
    """Where a sequence is. Only RUNNING ones have a slot and device pages."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """One stream of tokens being generated.

    Attributes:
        request_id: of the request it belongs to.
        index: which of the request's sequences it is.
        prompt_tokens: shared by the sequences of a request; never changed.
        sampling: the request's parameters.
        eos_token_ids: tokens that end the sequence unless `sampling.ignore_eos`.
        priority: lower runs first.
        skip_prefix_cache_read: compute the whole prompt, as prompt_logprobs needs it.
        kv: its pages.
        output_tokens: confirmed tokens, the stop token included.
        status: where it is.
        slot: its row of the device's request state while it runs, else None.
        arrival: the order in which the scheduler saw it.
        num_computed_tokens: positions whose KV has been dispatched.
        num_in_flight: tokens sampled on the device and not read yet.
        is_decoding: the device holds its last token (a sampling row was dispatched in this slot).
        max_total_tokens: it ends when prompt and output have this many tokens.
        num_cached_tokens: prompt tokens that its first admission found in the prefix cache.
        finish_reason: None until it is finished.
        stop_reason: the stop token id that ended it; None for EOS and length.
        queued_time, scheduled_time, first_token_time, last_token_time: seconds of the scheduler's
            clock; 0.0 while it has not happened.
    """

    request_id: str
    index: int
    prompt_tokens: SequenceOf[int]
    sampling: SamplingParams
    eos_token_ids: SequenceOf[int] = ()
    priority: int = 0
    skip_prefix_cache_read: bool = False
    kv: SequencePages = field(default_factory=SequencePages)
    output_tokens: list[int] = field(default_factory=list[int])
    status: SequenceStatus = SequenceStatus.WAITING
    slot: int | None = None
    arrival: int = -1
    num_computed_tokens: int = 0
    num_in_flight: int = 0
    is_decoding: bool = False
    max_total_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    queued_time: float = 0.0
    scheduled_time: float = 0.0
    first_token_time: float = 0.0
    last_token_time: float = 0.0
    _eos: frozenset[int] = field(init=False)
    _stops: frozenset[int] = field(init=False)

    def __post_init__(self):
        self._eos = frozenset() if self.sampling.ignore_eos else frozenset(self.eos_token_ids)
        self._stops = self._eos | frozenset(self.sampling.stop_token_ids)

    @property
    def key(self) -> tuple[int, int]:
        """Order of service: priority, then arrival."""
        return self.priority, self.arrival

    @property
    def num_tokens(self) -> int:
        """Tokens known on the host: prompt and confirmed output."""
        return len(self.prompt_tokens) + len(self.output_tokens)

    @property
    def pages(self) -> list[list[int]]:
        """Per page group the page ids in order of position; 0 where a sliding window has moved on."""
        return self.kv.groups

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def read_tokens(self, start: int, stop: int) -> SequenceOf[int]:
        """Token ids of the positions start .. stop - 1, which must be known on the host."""
        length = len(self.prompt_tokens)
        if stop <= length:
            return self.prompt_tokens[start:stop]
        output = self.output_tokens[max(0, start - length) : stop - length]
        return [*self.prompt_tokens[start:length], *output] if start < length else output

    def limit_length(self, max_model_len: int, capacity: int) -> None:
        """Set max_total_tokens.

        Without max_tokens the sequence may go on to the end of the context, or of the KV cache.

        Raises:
            RequestError: a prompt that is empty or too long, or a length that can never fit.
        """
        length, max_tokens = len(self.prompt_tokens), self.sampling.max_tokens
        if length == 0:
            raise RequestError("the prompt must have at least 1 token, got 0", "prompt")
        if length >= max_model_len:
            raise RequestError(
                f"the prompt has {length} tokens; it must be shorter than max_model_len={max_model_len}",
                "prompt",
            )
        total = min(max_model_len, length + (1 if max_tokens is None else max_tokens))
        if total > capacity:
            raise RequestError(
                f"{length} prompt tokens and {total - length} output tokens do not fit into the KV cache, "
                f"which holds {capacity} tokens",
                "prompt" if length >= capacity else "max_tokens",
            )
        self.max_total_tokens = min(capacity, max_model_len) if max_tokens is None else total

    def append(self, tokens: SequenceOf[int]) -> int:
        """Confirm sampled tokens up to the one that finishes the sequence.

        Sets finish_reason and stop_reason; the status is the scheduler's to change.

        Returns:
            How many of `tokens` were kept.
        """
        sampling, output = self.sampling, self.output_tokens
        room = self.max_total_tokens - len(self.prompt_tokens)
        for kept, token in enumerate(tokens, 1):
            output.append(token)
            if token in self._stops and len(output) >= sampling.min_tokens:
                self.finish_reason = "stop"
                # A token may be both; as a stop token it was named by the caller only if it is no EOS.
                self.stop_reason = None if token in self._eos else token
                return kept
            if len(output) >= room:
                self.finish_reason = "length"
                return kept
        return len(tokens)

    def __repr__(self) -> str:
        return (
            f"<{self.request_id}[{self.index}] {self.status.value} slot {self.slot}: "
            f"{len(self.prompt_tokens)}+{len(self.output_tokens)} tokens, {self.num_in_flight} in flight, "
            f"{self.num_computed_tokens} computed>"
        )


@dataclass(eq=False)
class Request:
    """One prompt and its sequences.

    Attributes:
        request_id: the caller's name for it.
        sequences: in order of index; `sampling.num_sequences` of them.
    """

    request_id: str
    sequences: list[Sequence]

    @classmethod
    def from_engine_request(cls, request: EngineRequest) -> "Request":
        """Make the sequences of a request that crossed the engine's border."""
        keys = () if request.cache_salt is None else (ExtraKey("cache_salt", request.cache_salt),)
        sequences = [
            Sequence(
                request_id=request.request_id,
                index=index,
                prompt_tokens=request.prompt_tokens,
                sampling=request.sampling,
                eos_token_ids=request.eos_token_ids,
                priority=request.priority,
                skip_prefix_cache_read=request.sampling.prompt_logprobs is not None,
                kv=SequencePages.with_keys(keys),
            )
            for index in range(request.sampling.num_sequences)
        ]
        return cls(request.request_id, sequences)

    @property
    def is_finished(self) -> bool:
        return all(sequence.is_finished for sequence in self.sequences)
