"""Engine: plan, dispatch, read one step late, commit. Token ids in, token ids out."""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxllm.config import EngineConfig
from jaxllm.engine.protocol import EngineRequest, EngineStats, ModelInfo, RequestDelta, TokenLogprobs
from jaxllm.engine.request import Request, Sequence
from jaxllm.engine.runner import Launch, Runner
from jaxllm.engine.scheduler import Scheduler
from jaxllm.engine.step_plan import ScheduledRow, StepPlan
from jaxllm.errors import RequestError
from jaxllm.sampling.state import (
    check_limits,
    needs_history,
    needs_rare,
    pack_params,
    rare_arguments,
    required_mode,
)

logger = logging.getLogger(__name__)


@dataclass
class _DeviceParams:
    """What the device must know of a sequence when it gets a slot, and what it owes the caller."""

    sampler_mode: int
    seed: int
    request: EngineRequest
    num_logprobs: int | None
    prompt_logprobs: list[TokenLogprobs | None] | None


class Engine:
    """The core below every front end; one thread calls it.

    `step()` dispatches the next step and returns the news of the one before: with
    `async_scheduling` the device computes while the host reads, commits and plans.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, config: EngineConfig, model_info: ModelInfo):
        self.config = config
        self.model_info = model_info
        self.runner = runner
        self.scheduler = scheduler
        self._device_params: dict[Sequence, _DeviceParams] = {}
        self._in_flight: deque[Launch] = deque()
        self._random = np.random.default_rng(config.seed)
        self._num_steps = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0

    # Requests.

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: it can never be served: too long, out of the vocabulary, over a limit.
        """
        sampling = request.sampling
        self._check(request)
        made = Request.from_engine_request(request)
        for sequence in made.sequences:
            if sampling.seed is not None:
                seed = (sampling.seed + sequence.index) % 2**63
            else:
                seed = int(self._random.integers(2**63))
            scores: list[TokenLogprobs | None] | None = None
            if sampling.prompt_logprobs is not None and sequence.index == 0:
                scores = [None for _ in request.prompt_tokens]
            self._device_params[sequence] = _DeviceParams(
                sampler_mode=required_mode(sampling, request.bad_word_tokens),
                seed=seed,
                request=request,
                num_logprobs=sampling.logprobs,
                prompt_logprobs=scores,
            )
        self.scheduler.add(made.sequences)
        self._prompt_tokens += len(request.prompt_tokens)

    def _check(self, request: EngineRequest) -> None:
        info, tokens = self.model_info, request.prompt_tokens
        if not tokens:
            raise RequestError("the prompt has no tokens; at least one is needed", "prompt")
        if len(tokens) >= info.max_model_len:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens; the model's context of {info.max_model_len} tokens "
                "must also hold the output",
                "prompt",
            )
        lowest, highest = min(tokens), max(tokens)
        if lowest < 0 or highest >= info.vocab_size:
            bad = lowest if lowest < 0 else highest
            raise RequestError(f"token id {bad} is out of the vocabulary 0..{info.vocab_size - 1}", "prompt")
        capacity = self.scheduler.capacity_tokens()
        if len(tokens) >= capacity:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens; the KV cache holds {capacity}, prompt and output together",
                "prompt",
            )
        sampling = request.sampling
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(sampling, name)
            if value is not None and not 0 <= value <= info.max_logprobs:
                raise RequestError(f"{name} must be 0..{info.max_logprobs}, got {value}", name)
        check_limits(sampling, self.runner.limits, request.bad_word_tokens, request.eos_token_ids)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Stop a request, or one of its sequences; unknown ids are ignored (it may just have ended)."""
        for sequence in self.scheduler.abort(request_id, index):
            self._device_params.pop(sequence, None)

    def has_work(self) -> bool:
        """Whether `step()` has something to do or to read."""
        return bool(self._in_flight) or self.scheduler.has_work()

    # Steps.

    def step(self) -> list[RequestDelta]:
        """Dispatch a step, if there is one to run, and return the news of the oldest one in flight."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self._in_flight.append(self._dispatch(plan))
        depth = 1 if self.config.async_scheduling and plan is not None else 0
        if len(self._in_flight) > depth:
            return self._collect(self._in_flight.popleft())
        return []

    def _dispatch(self, plan: StepPlan) -> Launch:
        params: list[tuple[int, np.ndarray]] = []
        for sequence in plan.new_sequences:
            device = self._device_params[sequence]
            request, slot = device.request, sequence.slot
            assert slot is not None, f"{sequence} is new on the device without a slot"
            words = pack_params(
                request.sampling,
                prompt_length=len(sequence.prompt_tokens),
                eos_token_ids=request.eos_token_ids,
                seed=device.seed,
                bad_word_tokens=request.bad_word_tokens,
            )
            params.append((slot, words))
            if needs_rare(request.sampling, request.bad_word_tokens):
                self.runner.set_rare(
                    slot, rare_arguments(request.sampling, self.runner.limits, request.bad_word_tokens)
                )
            if needs_history(request.sampling, request.bad_word_tokens):
                tokens = sequence.read_tokens(0, sequence.num_tokens)
                self.runner.set_history(slot, tokens, len(sequence.prompt_tokens))
        self._num_steps += plan.num_steps
        rows = [*plan.decode_rows, *(row for row in plan.prefill_rows if row.samples)]
        mode = max((self._device_params[row.sequence].sampler_mode for row in rows), default=0)
        return self.runner.dispatch(plan, params, mode)

    def _collect(self, launch: Launch) -> list[RequestDelta]:
        """Wait for a step's tokens, commit them, and tell what changed."""
        tokens = launch.tokens().tolist()
        rows = (*launch.plan.decode_rows, *launch.plan.prefill_rows)
        sampled: list[list[int]] = []
        for position, row in enumerate(rows):
            index = launch.row_index(position)
            sampled.append([tokens[step][index] for step in range(_num_samples(row, launch))])
        self._collect_prompt_logprobs(launch)
        read_logprobs = _logprobs_reader(launch)
        deltas: list[RequestDelta] = []
        for position, commit in enumerate(self.scheduler.commit(launch.plan, sampled)):
            sequence = commit.sequence
            device = self._device_params.get(sequence)
            if device is None or not (commit.new_tokens or commit.finished):
                continue
            deltas.append(self._delta(sequence, device, commit.new_tokens, launch.row_index(position), read_logprobs))
            self._generation_tokens += len(commit.new_tokens)
            if sequence.finish_reason is not None:
                del self._device_params[sequence]
        return deltas

    def _delta(
        self,
        sequence: Sequence,
        device: _DeviceParams,
        tokens: list[int],
        row: int,
        read_logprobs: Callable[[int, int, int], TokenLogprobs],
    ) -> RequestDelta:
        logprobs = None
        if device.num_logprobs is not None:
            logprobs = [read_logprobs(step, row, device.num_logprobs) for step in range(len(tokens))]
        prompt_logprobs, device.prompt_logprobs = device.prompt_logprobs, None
        return RequestDelta(
            request_id=sequence.request_id,
            index=sequence.index,
            tokens=tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            num_cached_tokens=sequence.num_cached_tokens,
            queued_time=sequence.queued_time,
            scheduled_time=sequence.scheduled_time,
            first_token_time=sequence.first_token_time,
            last_token_time=sequence.last_token_time,
        )

    def _collect_prompt_logprobs(self, launch: Launch) -> None:
        """Score the prompt tokens that this step's chunks predict."""
        hidden = None
        for position, row in enumerate(launch.plan.prefill_rows):
            device = self._device_params.get(row.sequence)
            if device is None or device.prompt_logprobs is None:
                continue
            prompt = row.sequence.prompt_tokens
            # The hidden state at position p predicts the token at p + 1.
            targets = prompt[row.start + 1 : row.start + row.num_tokens + 1]
            if not targets:
                continue
            if hidden is None:
                hidden = np.asarray(launch.result.hidden)
            first = launch.first_hidden(position)
            count = min(int(device.request.sampling.prompt_logprobs or 0), self.config.max_logprobs)
            done = row.start + 1
            for chosen, rank, ids, top in self.runner.prompt_logprobs(hidden[first:], targets):
                for i in range(min(len(chosen), len(prompt) - done)):
                    if done >= row.start + row.num_tokens + 1:
                        break
                    device.prompt_logprobs[done] = TokenLogprobs(
                        [prompt[done], *ids[i, :count].tolist()],
                        [float(chosen[i]), *top[i, :count].tolist()],
                        [int(rank[i]), *range(1, count + 1)],
                    )
                    done += 1

    # The rest.

    def stats(self) -> EngineStats:
        """A snapshot for metrics and logs."""
        scheduler, runner = self.scheduler, self.runner
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_swapped=scheduler.num_swapped,
            kv_cache_usage=scheduler.kv_cache_usage,
            swap_usage=scheduler.swap_usage,
            num_preemptions=scheduler.num_preemptions,
            prefix_cache_queries=scheduler.prefix_cache_queries,
            prefix_cache_hits=scheduler.prefix_cache_hits,
            num_steps=self._num_steps,
            num_launches=runner.num_launches,
            num_unexpected_compiles=runner.programs.num_late_compiles,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            pages_in_use=scheduler.pages_in_use,
        )

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False when running sequences hold pages."""
        return self.scheduler.reset_prefix_cache()

    def wait_until_compiled(self) -> None:
        """Block until the programs that are compiled beside serving are ready."""
        self.runner.programs.wait()

    def shutdown(self) -> None:
        """Let go of the device; the engine cannot be used afterwards."""
        self._in_flight.clear()
        self.runner.shutdown()


def _num_samples(row: ScheduledRow, launch: Launch) -> int:
    if not row.samples:
        return 0
    return row.num_tokens if launch.plan.num_steps > 1 else 1


def _logprobs_reader(launch: Launch) -> Callable[[int, int, int], TokenLogprobs]:
    """Reads (step, row, k) from the results, copied from the device on first use."""
    arrays: list[np.ndarray] = []

    def read(step: int, row: int, count: int) -> TokenLogprobs:
        if not arrays:
            result = launch.result
            arrays.extend(np.asarray(a) for a in (result.tokens, result.chosen, result.top_ids, result.top_logprobs))
        tokens, chosen, top_ids, top_logprobs = arrays
        return TokenLogprobs(
            [int(tokens[step, row]), *top_ids[step, row, :count].tolist()],
            [float(chosen[step, row, 0]), *top_logprobs[step, row, :count].tolist()],
            [int(chosen[step, row, 1]), *range(1, count + 1)],
        )

    return read
