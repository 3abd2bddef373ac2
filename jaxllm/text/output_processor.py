"""The engine's deltas of one request become RequestOutputs: text, log-probabilities, reasons, times."""

import codecs
import time
from collections.abc import Sequence

from jaxllm.engine.protocol import FinishReason, RequestDelta, TokenLogprobs
from jaxllm.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestMetrics, RequestOutput
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.text.detokenizer import StopStrings, make_detokenizer
from jaxllm.text.input_processor import PreparedRequest
from jaxllm.text.tokenizer import Tokenizer


class OutputProcessor:
    """Collects the deltas of one request.

    Give every delta to `add`, then abort the sequences `take_aborts` names (a stop string ended them, the
    engine does not know). Deltas of a sequence that has ended are ignored, so late ones do no harm.
    For one thread.

    Args:
        prepared: the request as it passed the door.
        tokenizer: None makes no text.
        output_kind: None takes the request's own. With best_of > n there is always one output, at the end.
        with_metrics: fill RequestOutput.metrics.
    """

    def __init__(
        self,
        prepared: PreparedRequest,
        tokenizer: Tokenizer | None,
        *,
        output_kind: RequestOutputKind | None = None,
        with_metrics: bool = True,
    ):
        request = prepared.engine_request
        self._prepared = prepared
        self._tokenizer = tokenizer
        self._num_returned = prepared.sampling.n
        count = request.sampling.n
        self._kind = prepared.sampling.output_kind if output_kind is None else output_kind
        if count > self._num_returned:
            self._kind = RequestOutputKind.FINAL_ONLY
        self._sequences = [_Sequence(prepared, tokenizer, i) for i in range(count)]
        self._num_unfinished = count
        self._aborts: list[int] = []
        self._prompt_logprobs: list[PositionLogprobs | None] | None = None
        self._num_cached_tokens = 0
        self._metrics = RequestMetrics(arrival_time=request.arrival_time)
        self._with_metrics = with_metrics

    @property
    def is_finished(self) -> bool:
        """True once every sequence has ended."""
        return not self._num_unfinished

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, over all sequences, those best_of drops included."""
        return sum(len(sequence.tokens) for sequence in self._sequences)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache."""
        return self._num_cached_tokens

    def add(self, delta: RequestDelta) -> RequestOutput | None:
        """Take a delta; the output it leads to, None when there is nothing to tell yet."""
        sequence = self._sequences[delta.index]
        if sequence.finish_reason is not None:
            return None
        self._note(delta)
        num_before = len(sequence.tokens)
        has_ended = sequence.add(delta)
        self._metrics.num_generation_tokens += len(sequence.tokens) - num_before
        if has_ended:
            self._num_unfinished -= 1
            if delta.finish_reason is None:
                self._aborts.append(delta.index)
        return self._output(sequence)

    def take_aborts(self) -> list[int]:
        """Indices of sequences that ended here while the engine still runs them; each is told once."""
        if not self._aborts:
            return []
        aborts, self._aborts = self._aborts, []
        return aborts

    def end(self, reason: FinishReason = "abort", error: str | None = None) -> RequestOutput | None:
        """End every unfinished sequence from outside (aborted, engine gone); None if there was none."""
        ended = [s for s in self._sequences if s.finish_reason is None]
        for sequence in ended:
            sequence.end(reason, None, error)
        self._num_unfinished = 0
        if not ended:
            return None
        delta_kind = self._kind is RequestOutputKind.DELTA
        return self._make([s.output(True) for s in ended] if delta_kind else self._outputs())

    def _note(self, delta: RequestDelta) -> None:
        """Keep what belongs to the request, not to one sequence."""
        metrics = self._metrics
        if delta.tokens:
            if not metrics.num_generation_tokens:
                metrics.first_token_latency = time.time() - metrics.arrival_time
                metrics.queued_ts = delta.queued_time
                metrics.scheduled_ts = delta.scheduled_time
                metrics.first_token_ts = delta.first_token_time
            metrics.last_token_ts = delta.last_token_time
        if delta.num_cached_tokens > self._num_cached_tokens:
            self._num_cached_tokens = delta.num_cached_tokens
        if delta.prompt_logprobs is not None and self._prompt_logprobs is None:
            tokens = self._prepared.engine_request.prompt_tokens
            self._prompt_logprobs = prompt_logprobs(tokens, delta.prompt_logprobs, self._tokenizer)

    def _output(self, sequence: "_Sequence") -> RequestOutput | None:
        if self._kind is RequestOutputKind.DELTA:
            output = self._make([sequence.output(True)])
            if output.prompt_logprobs is not None:
                self._prompt_logprobs = []  # told, and not to be told again
            return output
        if self._kind is RequestOutputKind.FINAL_ONLY and self._num_unfinished:
            return None
        return self._make(self._outputs())

    def _outputs(self) -> list[CompletionOutput]:
        outputs = [s.output(False) for s in self._sequences]
        if len(outputs) > self._num_returned:
            outputs.sort(key=lambda output: -(output.cumulative_logprob or 0.0))
            outputs = outputs[: self._num_returned]
            for index, output in enumerate(outputs):
                output.index = index
        if self._prepared.sampling.logprobs is None:
            for output in outputs:
                output.cumulative_logprob = output.logprobs = None
        return outputs

    def _make(self, outputs: list[CompletionOutput]) -> RequestOutput:
        request = self._prepared.engine_request
        return RequestOutput(
            request_id=request.request_id,
            prompt=self._prepared.prompt,
            prompt_token_ids=request.prompt_tokens,
            prompt_logprobs=self._prompt_logprobs or None,
            outputs=outputs,
            finished=not self._num_unfinished,
            metrics=self._metrics if self._with_metrics else None,
            num_cached_tokens=self._num_cached_tokens,
        )


class _Sequence:
    """Text and tokens of one sequence: everything, and what is new since the last output."""

    def __init__(self, prepared: PreparedRequest, tokenizer: Tokenizer | None, index: int):
        sampling = prepared.engine_request.sampling
        self.index = index
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None
        self._error: str | None = None
        self._tokenizer = tokenizer
        self._sampling: SamplingParams = sampling
        self._detokenizer = None
        self._stops = None
        if tokenizer is not None and sampling.detokenize:
            self._detokenizer = make_detokenizer(
                tokenizer,
                prepared.engine_request.prompt_tokens,
                skip_special_tokens=sampling.skip_special_tokens,
                spaces_between_special_tokens=sampling.spaces_between_special_tokens,
            )
            if sampling.stop_strings:
                self._stops = StopStrings(sampling.stop_strings, sampling.include_stop_str_in_output)
        self._text: list[str] = []
        self._logprobs: list[PositionLogprobs] | None = None if sampling.logprobs is None else []
        self._cumulative_logprob = 0.0
        # How much of the above the last delta output already told.
        self._num_told_tokens = 0
        self._num_told_texts = 0

    def add(self, delta: RequestDelta) -> bool:
        """Take the tokens of a delta; True when the sequence ended with it."""
        last = len(delta.tokens) - 1
        # The token that stopped it is counted, but shows only when asked for.
        is_hidden = delta.finish_reason == "stop" and not self._sampling.include_stop_str_in_output
        for i, token in enumerate(delta.tokens):
            self.tokens.append(token)
            if self._logprobs is not None and delta.logprobs is not None:
                self._add_logprobs(delta.logprobs[i])
            if self._detokenizer is None or (is_hidden and i == last):
                continue
            text = self._detokenizer.add(token)
            if self._stops is not None:
                text = self._stops.add(text, len(self.tokens) <= self._sampling.min_tokens)
                if self._stops.matched is not None:
                    self._text.append(text)
                    self.finish_reason, self._stop_reason = "stop", self._stops.matched
                    return True
            if text:
                self._text.append(text)
        if delta.finish_reason is None:
            return False
        self.end(delta.finish_reason, delta.stop_reason, delta.error)
        return True

    def end(self, reason: FinishReason, stop_reason: int | None, error: str | None) -> None:
        """The sequence is over: give up what was held back."""
        self.finish_reason, self._stop_reason, self._error = reason, stop_reason, error
        if self._detokenizer is None:
            return
        rest = self._detokenizer.finish()
        if self._stops is not None:
            rest = self._stops.finish() + rest
        if rest:
            self._text.append(rest)

    def output(self, is_delta: bool) -> CompletionOutput:
        """Everything, or what is new since the last call with `is_delta`."""
        start = self._num_told_tokens if is_delta else 0
        first_text = self._num_told_texts if is_delta else 0
        if is_delta:
            self._num_told_tokens, self._num_told_texts = len(self.tokens), len(self._text)
        elif len(self._text) > 1:
            self._text = ["".join(self._text)]
        return CompletionOutput(
            index=self.index,
            text="".join(self._text[first_text:]),
            token_ids=self.tokens[start:],
            cumulative_logprob=None if self._logprobs is None else self._cumulative_logprob,
            logprobs=None if self._logprobs is None else self._logprobs[start:],
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            error=self._error,
        )

    def _add_logprobs(self, at: TokenLogprobs) -> None:
        assert self._logprobs is not None
        pending = b"" if self._detokenizer is None else self._detokenizer.pending
        self._logprobs.append(_position(at, pending, self._tokenizer))
        self._cumulative_logprob += at.logprobs[0]


def prompt_logprobs(
    tokens: Sequence[int], positions: Sequence[TokenLogprobs | None], tokenizer: Tokenizer | None
) -> list[PositionLogprobs | None]:
    """Log-probabilities of a prompt's tokens with their texts; None where there are none."""
    result: list[PositionLogprobs | None] = []
    pending = b""
    for token, at in zip(tokens, positions, strict=True):
        result.append(None if at is None else _position(at, pending, tokenizer))
        if tokenizer is not None and tokenizer.pieces is not None:
            data = pending + tokenizer.pieces.get(token)
            pending = data[codecs.utf_8_decode(data, "replace", False)[1] :]
    return result


def _position(at: TokenLogprobs, pending: bytes, tokenizer: Tokenizer | None) -> PositionLogprobs:
    entries: PositionLogprobs = {}
    for token, logprob, rank in zip(at.token_ids, at.logprobs, at.ranks, strict=True):
        if token not in entries:
            entries[token] = Logprob(logprob, rank, _text_after(pending, token, tokenizer))
    return entries


def _text_after(pending: bytes, token: int, tokenizer: Tokenizer | None) -> str | None:
    """Text of `token` when `pending` bytes of a character stand open before it; "" if it stays open."""
    if tokenizer is None:
        return None
    if not pending:
        text = tokenizer.token_text(token)
        if text is not None:
            return text
    if tokenizer.pieces is None:
        return ""
    return codecs.utf_8_decode(pending + tokenizer.pieces.get(token), "replace", False)[0]
