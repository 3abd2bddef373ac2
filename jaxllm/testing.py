"""For tests: a byte tokenizer and an engine that needs no model.

`FakeEngine` has the interface of jaxllm.engine.engine.Engine and its rules for stopping, counting and
aborting; only the tokens are made up.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jaxllm.engine.protocol import (
    EngineRequest,
    EngineStats,
    FinishReason,
    ModelInfo,
    RequestDelta,
    TokenLogprobs,
)
from jaxllm.errors import RequestError
from jaxllm.text.byte_tokenizer import CHAT_TEMPLATE, ByteTokenizer

__all__ = ["CHAT_TEMPLATE", "ByteTokenizer", "FakeEngine"]


@dataclass
class _Running:
    """One sequence of the fake engine."""

    request: EngineRequest
    index: int
    script: Sequence[int] | None
    output_tokens: list[int] = field(default_factory=list)
    queued_time: float = field(default_factory=time.monotonic)
    scheduled_time: float = 0.0
    first_token_time: float = 0.0


class FakeEngine:
    """An engine whose tokens are a function of prompt, sequence index, seed and position: printable ASCII.

    It honours max_tokens, EOS, stop_token_ids, ignore_eos, min_tokens, allowed_token_ids, a logit_bias of
    100 (that token is taken), n, logprobs, prompt_logprobs and abort. It records what it was asked.

    Args:
        vocab_size, max_model_len, max_num_seqs, max_logprobs, kv_capacity_tokens: as ModelInfo.
        script: (request, index) -> the tokens to generate; after the last one EOS follows. None: made up.
        tokens_per_step: tokens a sequence gets in one step.
        step_seconds: time a step takes.
        fail_at_step: the step (from 1) that raises RuntimeError; None never.

    Attributes:
        requests: every request taken, in order.
        aborted: every abort asked for: (request id, index or None).
        num_steps: steps done.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 320,
        max_model_len: int = 512,
        max_num_seqs: int = 64,
        max_logprobs: int = 20,
        kv_capacity_tokens: int = 8192,
        script: Callable[[EngineRequest, int], Sequence[int]] | None = None,
        tokens_per_step: int = 1,
        step_seconds: float = 0.0,
        fail_at_step: int | None = None,
    ):
        self.model_info = ModelInfo(
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            max_logprobs=max_logprobs,
            max_num_seqs=max_num_seqs,
            kv_capacity_tokens=kv_capacity_tokens,
            page_size=16,
        )
        self.requests: list[EngineRequest] = []
        self.aborted: list[tuple[str, int | None]] = []
        self.num_steps = 0
        self.is_shut_down = False
        self._script = script
        self._tokens_per_step = tokens_per_step
        self._step_seconds = step_seconds
        self._fail_at_step = fail_at_step
        self._sequences: list[_Running] = []
        self._stats = EngineStats()

    def add_request(self, request: EngineRequest) -> None:
        """Take a request; RequestError for one that can never fit or an id in use."""
        if any(s.request.request_id == request.request_id for s in self._sequences):
            raise RequestError(f"request id {request.request_id!r} is in use", "request_id")
        if len(request.prompt_tokens) >= self.model_info.max_model_len:
            raise RequestError("the prompt does not fit", "prompt")
        self.requests.append(request)
        self._stats.prompt_tokens += len(request.prompt_tokens)
        for index in range(request.sampling.n):
            script = None if self._script is None else self._script(request, index)
            self._sequences.append(_Running(request, index, script))

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Drop a request, or one sequence of it; unknown ids are ignored."""
        self.aborted.append((request_id, index))
        self._sequences = [
            s for s in self._sequences if s.request.request_id != request_id or (index is not None and s.index != index)
        ]

    def step(self) -> list[RequestDelta]:
        """One step: every running sequence gets its tokens."""
        self.num_steps += 1
        if self.num_steps == self._fail_at_step:
            raise RuntimeError("the fake engine was told to fail")
        if self._step_seconds:
            time.sleep(self._step_seconds)
        deltas = [self._advance(s) for s in self._sequences[: self.model_info.max_num_seqs]]
        ended = {(d.request_id, d.index) for d in deltas if d.finish_reason}
        self._sequences = [s for s in self._sequences if (s.request.request_id, s.index) not in ended]
        return deltas

    def has_work(self) -> bool:
        """True while a sequence is unfinished."""
        return bool(self._sequences)

    def stats(self) -> EngineStats:
        """Counters, and how many sequences run and wait."""
        self._stats.num_running = min(len(self._sequences), self.model_info.max_num_seqs)
        self._stats.num_waiting = len(self._sequences) - self._stats.num_running
        self._stats.num_steps = self.num_steps
        return self._stats

    def wait_until_compiled(self) -> None:
        """Nothing is compiled."""

    def reset_prefix_cache(self) -> bool:
        """Nothing is cached: always done."""
        return True

    def shutdown(self) -> None:
        """Drop everything."""
        self.is_shut_down = True
        self._sequences = []

    def _advance(self, sequence: _Running) -> RequestDelta:
        sampling, now = sequence.request.sampling, time.monotonic()
        is_first = not sequence.output_tokens
        if is_first:
            sequence.scheduled_time = sequence.first_token_time = now
        delta = RequestDelta(
            request_id=sequence.request.request_id,
            index=sequence.index,
            tokens=[],
            logprobs=None if sampling.logprobs is None else [],
            queued_time=sequence.queued_time,
            scheduled_time=sequence.scheduled_time,
            first_token_time=sequence.first_token_time,
            last_token_time=now,
        )
        if is_first and sampling.prompt_logprobs is not None:
            rest = sequence.request.prompt_tokens[1:]
            delta.prompt_logprobs = [None, *(self._logprobs(t, sampling.prompt_logprobs) for t in rest)]
        for _ in range(self._tokens_per_step):
            token = self._next_token(sequence)
            sequence.output_tokens.append(token)
            delta.tokens.append(token)
            if delta.logprobs is not None:
                delta.logprobs.append(self._logprobs(token, sampling.logprobs or 0))
            delta.finish_reason, delta.stop_reason = self._finish(sequence, token)
            if delta.finish_reason:
                break
        self._stats.generation_tokens += len(delta.tokens)
        return delta

    def _next_token(self, sequence: _Running) -> int:
        request, position = sequence.request, len(sequence.output_tokens)
        sampling = request.sampling
        barred = self._stop_tokens(request) if position < sampling.min_tokens else set()
        forced = [t for t, bias in (sampling.logit_bias or {}).items() if bias >= 100 and t not in barred]
        if forced:
            return forced[0]
        if sequence.script is not None:
            if position < len(sequence.script):
                return sequence.script[position]
            return request.eos_token_ids[0] if request.eos_token_ids else 0
        value = 31 * sum(request.prompt_tokens) + 13 * position + 7 * (sequence.index + (sampling.seed or 0))
        choices = sampling.allowed_token_ids or range(32, 127)
        allowed = [token for token in choices if token not in barred]
        return allowed[value % len(allowed)]

    def _stop_tokens(self, request: EngineRequest) -> set[int]:
        ends = set() if request.sampling.ignore_eos else set(request.eos_token_ids)
        return ends | set(request.sampling.stop_token_ids)

    def _finish(self, sequence: _Running, token: int) -> tuple[FinishReason | None, int | None]:
        request, num_output = sequence.request, len(sequence.output_tokens)
        sampling = request.sampling
        if num_output > sampling.min_tokens or not sampling.min_tokens:
            if token in request.eos_token_ids and not sampling.ignore_eos:
                return "stop", None
            if token in sampling.stop_token_ids:
                return "stop", token
        limit = self.model_info.max_model_len - len(request.prompt_tokens)
        if num_output >= min(limit, sampling.max_tokens or limit):
            return "length", None
        return None, None

    def _logprobs(self, token: int, count: int) -> TokenLogprobs:
        """The chosen token has rank 1; the next ids follow, each half as probable as the one before."""
        top = [(token + i) % self.model_info.vocab_size for i in range(count)]
        best = -0.5 - (token % 7) / 10
        return TokenLogprobs(
            token_ids=[token, *top],
            logprobs=[best, *(best - 0.7 * i for i in range(count))],
            ranks=[1, *range(1, count + 1)],
        )
