"""The sampler behind a small machine that fills slots as the engine does, and the exact probabilities in float64."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.sampling import sampler, state
from jaxllm.sampling.state import SamplingLimits, SamplingState, init_state
from jaxllm.sampling_params import SamplingParams


@dataclass(frozen=True)
class Slot:
    """A sequence as the sampler knows it."""

    params: SamplingParams
    prompt: Sequence[int] = (1,)
    output: Sequence[int] = ()
    seed: int = 0
    bad_words: Sequence[Sequence[int]] = ()
    eos: Sequence[int] = ()

    @property
    def position(self) -> int:
        """Of the next token."""
        return len(self.prompt) + len(self.output)

    @property
    def mode(self) -> int:
        return state.required_mode(self.params, self.bad_words)


_apply = jax.jit(state.apply_params)
_set_rare = jax.jit(state.set_rare)
_init_history = jax.jit(state.init_history)


@partial(jax.jit, static_argnames=("max_logprobs", "static_mode"))
def _sample(logits, sampling, slots, positions, mode, *, max_logprobs, static_mode):
    mode = mode if static_mode is None else static_mode
    return sampler.sample(logits, sampling, slots, positions, mode, max_logprobs=max_logprobs)


@dataclass
class Machine:
    """The device's side of some slots. `history_chunk` tokens go to the device in one call."""

    limits: SamplingLimits
    history_chunk: int = 16
    state: SamplingState = field(init=False)

    def __post_init__(self):
        self.state = init_state(self.limits)

    @property
    def trash(self) -> int:
        return self.limits.max_num_seqs

    def put(self, slot: int, given: Slot) -> None:
        """Give a slot to a sequence, with the launches that the engine makes for it and no other."""
        params = given.params
        state.check_limits(params, self.limits, given.bad_words, given.eos)
        words = state.pack_params(
            params,
            prompt_length=len(given.prompt),
            eos_token_ids=given.eos,
            seed=given.seed,
            bad_word_tokens=given.bad_words,
        )
        if state.needs_rare(params, given.bad_words):
            rare = state.rare_arguments(params, self.limits, given.bad_words)
            self.state = _set_rare(self.state, np.int32(slot), *rare)
        if state.needs_history(params, given.bad_words):
            tokens = [*given.prompt, *given.output]
            for start in range(0, len(tokens), self.history_chunk):
                chunk = np.full(self.history_chunk, -1, np.int32)
                part = tokens[start : start + self.history_chunk]
                chunk[: len(part)] = part
                length = np.int32(len(given.prompt))
                self.state = _init_history(self.state, np.int32(slot), chunk, np.int32(start), length)
        self.state = _apply(self.state, np.asarray([slot], np.int32), words[None])

    def put_seeds(self, given: Slot, seeds: Sequence[int]) -> None:
        """Slot i gets `given` with the i-th seed; no history, no masks."""
        words = [
            state.pack_params(given.params, prompt_length=len(given.prompt), eos_token_ids=given.eos, seed=seed)
            for seed in seeds
        ]
        self.state = _apply(self.state, np.arange(len(seeds), dtype=np.int32), np.stack(words))

    def sample(
        self,
        logits: np.ndarray | jax.Array,
        slots: Sequence[int],
        positions: Sequence[int],
        mode: int = sampler.FULL,
        *,
        static: bool = False,
        keep: bool = False,
    ) -> sampler.SampleOutput:
        """One step; `static` compiles the mode in, `keep` goes on from the new state."""
        out, after = _sample(
            jnp.asarray(logits),
            self.state,
            np.asarray(slots, np.int32),
            np.asarray(positions, np.int32),
            np.int32(mode),
            max_logprobs=self.limits.max_logprobs,
            static_mode=mode if static else None,
        )
        if keep:
            self.state = after
        return sampler.SampleOutput(*map(jax.device_get, out))


def shaped_logits(logits: np.ndarray, given: Slot) -> np.ndarray:
    """Logits [V] after masks, bias, bad words, min_tokens and penalties, in float64."""
    params, x = given.params, np.asarray(logits, np.float64).copy()
    if params.logit_bias:
        for token, bias in params.logit_bias.items():
            x[token] += bias
    blocked = set()
    if params.allowed_token_ids is not None:
        blocked |= set(range(len(x))) - set(params.allowed_token_ids)
    if len(given.output) < params.min_tokens:
        blocked |= {t for t in (*params.stop_token_ids, *given.eos) if 0 <= t < len(x)}
    for *before, last in given.bad_words:
        if not before or list(given.output[-len(before) :]) == before:
            blocked.add(last)
    x[list(blocked)] = -np.inf
    for token in {*given.prompt, *given.output}:
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(given.output):
        x[token] -= params.frequency_penalty * given.output.count(token) + params.presence_penalty
    return x


def exact_probabilities(logits: np.ndarray, given: Slot, slack: float = 0.0) -> np.ndarray:
    """Probabilities [V] of the next token in float64, by sorting. `slack` widens the borders of top_p and min_p."""
    params, x = given.params, shaped_logits(logits, given)
    if params.temperature == 0.0:
        return (np.arange(len(x)) == np.argmax(x)).astype(np.float64)
    weights = np.exp((x - x.max()) / params.temperature)
    probabilities = weights / weights.sum()
    kept = probabilities >= params.min_p * probabilities.max() * (1 - slack)
    kept &= probabilities > 0
    if 0 < params.top_k < kept.sum():
        kept &= x >= np.sort(x[kept])[-params.top_k]
    if params.top_p < 1.0:
        left = np.where(kept, probabilities, 0.0) / probabilities[kept].sum()
        descending = np.sort(left)[::-1]
        count = int(np.searchsorted(np.cumsum(descending), min(params.top_p * (1 + slack), 1 - 1e-12))) + 1
        kept &= left >= descending[min(count, len(descending)) - 1]
    probabilities = np.where(kept, probabilities, 0.0)
    return probabilities / probabilities.sum()


@pytest.fixture(scope="session")
def make_slot() -> type[Slot]:
    return Slot


@pytest.fixture(scope="session")
def make_machine() -> Callable[..., Machine]:
    """(num_slots, vocab_size) -> a machine; small limits, so that the state of many rows stays small."""

    def make(num_slots: int, vocab_size: int, max_logprobs: int = 5) -> Machine:
        return Machine(state.SamplingLimits(num_slots, vocab_size, max_logprobs, 8, 4, 4))

    return make


@pytest.fixture(scope="session")
def exact() -> Callable[..., np.ndarray]:
    return exact_probabilities


@pytest.fixture(scope="session")
def shaped() -> Callable[..., np.ndarray]:
    return shaped_logits
