"""SamplingState: what the device knows of each slot's sampling, and how the host fills it.

Scalars of every sequence travel inside the step's own vector (`pack_params`, `apply_params`). Masks,
biases, bad words and token histories are rare and large: they go in launches of their own, and a flag
of the slot says that they count, so that what an earlier owner left behind never matters.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt

from jaxllm.errors import RequestError
from jaxllm.sampling_params import SamplingParams

GREEDY, SAMPLED, FULL = 0, 1, 2
"""The sampler's branches: argmax; temperature and truncation; everything."""

HISTORY_CHUNK = 1024
"""Tokens of one `init_history` call."""
MAX_STOP_IDS = 32
IN_PROMPT = 1 << 30
"""Bit of `counts` that marks a token of the prompt; the bits below count the output."""

USES_COUNTS, USES_MASK, USES_BIAS, USES_BAD_WORDS = 1, 2, 4, 8

_WORDS = (
    "temperature", "top_p", "min_p", "presence", "frequency", "repetition",
    "top_k", "seed_low", "seed_high", "stop_from", "flags",
)  # fmt: skip
_NUM_FLOATS = 6
PARAM_WORDS = len(_WORDS) + MAX_STOP_IDS


@dataclass(frozen=True)
class SamplingLimits:
    """Sizes of the state, fixed when the engine starts.

    Attributes:
        max_num_seqs: slots.
        vocab_size: size of the logits.
        max_logprobs: most top log-probabilities of a token.
        max_logit_bias: most entries of `logit_bias`.
        max_bad_words: most token sequences of `bad_words` of more than one token.
        max_bad_word_length: tokens of the longest of them.
    """

    max_num_seqs: int
    vocab_size: int
    max_logprobs: int = 20
    max_logit_bias: int = 1024
    max_bad_words: int = 128
    max_bad_word_length: int = 16

    @property
    def mask_words(self) -> int:
        return -(-self.vocab_size // 32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingState:
    """Per slot; the last row is the trash slot.

    Attributes:
        floats: temperature, top_p, min_p, presence, frequency and repetition penalty.
        top_k: 0 keeps all tokens.
        seed: 64 bits as two words.
        stop_from: position from which on the stop ids may be sampled (prompt length + min_tokens).
        flags: which of the rare features the slot uses.
        stop_ids: ids blocked before `stop_from`; -1 fills up.
        counts: IN_PROMPT bit and number of occurrences in the output, per token.
        recent: the last output tokens, newest last; -1 before the first.
        mask: bit i % 32 of word i // 32 is set where token i may be sampled.
        bias_ids, bias_values: logit bias; id V fills up.
        bad_words: token sequences, aligned to the right; -1 fills up.
    """

    floats: Float[Array, "S1 6"]
    top_k: Int[Array, " S1"]
    seed: UInt[Array, "S1 2"]
    stop_from: Int[Array, " S1"]
    flags: Int[Array, " S1"]
    stop_ids: Int[Array, "S1 stops"]
    counts: Int[Array, "S1 V"]
    recent: Int[Array, "S1 L"]
    mask: UInt[Array, "S1 words"]
    bias_ids: Int[Array, "S1 biases"]
    bias_values: Float[Array, "S1 biases"]
    bad_words: Int[Array, "S1 bad L1"]


def init_state(limits: SamplingLimits) -> SamplingState:
    """The state of an idle engine."""
    slots, length = limits.max_num_seqs + 1, limits.max_bad_word_length

    def full(shape: tuple[int, ...], value: int, dtype: jnp.dtype) -> Array:
        return jnp.full((slots, *shape), value, dtype)

    return SamplingState(
        floats=full((_NUM_FLOATS,), 0, jnp.dtype("float32")),
        top_k=full((), 0, jnp.dtype("int32")),
        seed=full((2,), 0, jnp.dtype("uint32")),
        stop_from=full((), 0, jnp.dtype("int32")),
        flags=full((), 0, jnp.dtype("int32")),
        stop_ids=full((MAX_STOP_IDS,), -1, jnp.dtype("int32")),
        counts=full((limits.vocab_size,), 0, jnp.dtype("int32")),
        recent=full((length - 1,), -1, jnp.dtype("int32")),
        mask=full((limits.mask_words,), 0, jnp.dtype("uint32")),
        bias_ids=full((limits.max_logit_bias,), limits.vocab_size, jnp.dtype("int32")),
        bias_values=full((limits.max_logit_bias,), 0, jnp.dtype("float32")),
        bad_words=full((limits.max_bad_words, length), -1, jnp.dtype("int32")),
    )


# Host side.


def _uses_penalties(sampling: SamplingParams) -> bool:
    return (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) != (0.0, 0.0, 1.0)


def _flags(sampling: SamplingParams, bad_word_tokens: Sequence[Sequence[int]]) -> int:
    flags = USES_COUNTS if _uses_penalties(sampling) else 0
    if sampling.allowed_token_ids is not None or any(len(word) == 1 for word in bad_word_tokens):
        flags |= USES_MASK
    if sampling.logit_bias:
        flags |= USES_BIAS
    if any(len(word) > 1 for word in bad_word_tokens):
        flags |= USES_BAD_WORDS
    return flags


def required_mode(sampling: SamplingParams, bad_word_tokens: Sequence[Sequence[int]] = ()) -> int:
    """The sampler branch that serves these parameters."""
    if sampling.logprobs is not None or sampling.min_tokens > 0 or _flags(sampling, bad_word_tokens):
        return FULL
    return GREEDY if sampling.is_greedy else SAMPLED


def needs_rare(sampling: SamplingParams, bad_word_tokens: Sequence[Sequence[int]] = ()) -> bool:
    """Whether `set_rare` must be called for the slot."""
    return bool(_flags(sampling, bad_word_tokens) & ~USES_COUNTS)


def needs_history(sampling: SamplingParams, bad_word_tokens: Sequence[Sequence[int]] = ()) -> bool:
    """Whether `init_history` must be called for the slot."""
    return bool(_flags(sampling, bad_word_tokens) & (USES_COUNTS | USES_BAD_WORDS))


def check_limits(
    sampling: SamplingParams,
    limits: SamplingLimits,
    bad_word_tokens: Sequence[Sequence[int]] = (),
    eos_token_ids: Sequence[int] = (),
) -> None:
    """Refuse what the state has no room for, and ids out of the vocabulary.

    Raises:
        RequestError: naming the parameter.
    """
    vocab = limits.vocab_size
    for name, ids in (
        ("logit_bias", sampling.logit_bias or ()),
        ("allowed_token_ids", sampling.allowed_token_ids or ()),
        ("bad_words", [token for word in bad_word_tokens for token in word]),
    ):
        bad = [token for token in ids if not 0 <= token < vocab]
        if bad:
            raise RequestError(f"{name} contains token id {bad[0]}, out of the vocabulary 0..{vocab - 1}", name)
    if sampling.logit_bias and len(sampling.logit_bias) > limits.max_logit_bias:
        raise RequestError(
            f"logit_bias has {len(sampling.logit_bias)} entries; at most {limits.max_logit_bias} are supported",
            "logit_bias",
        )
    long_words = [word for word in bad_word_tokens if len(word) > 1]
    if len(long_words) > limits.max_bad_words:
        raise RequestError(
            f"bad_words make {len(long_words)} token sequences; at most {limits.max_bad_words} of more than one "
            "token are supported",
            "bad_words",
        )
    longest = max((len(word) for word in long_words), default=0)
    if longest > limits.max_bad_word_length:
        raise RequestError(
            f"a word of bad_words has {longest} tokens; at most {limits.max_bad_word_length} are supported",
            "bad_words",
        )
    num_stops = len({*sampling.stop_token_ids, *eos_token_ids})
    if sampling.min_tokens > 0 and num_stops > MAX_STOP_IDS:
        raise RequestError(
            f"min_tokens holds back stop_token_ids and EOS: {num_stops} ids, at most {MAX_STOP_IDS} are supported",
            "stop_token_ids",
        )


_FLOAT32_MAX = float(np.finfo(np.float32).max)
_INT32_MAX = np.iinfo(np.int32).max


def pack_params(
    sampling: SamplingParams,
    *,
    prompt_length: int,
    eos_token_ids: Sequence[int],
    seed: int,
    bad_word_tokens: Sequence[Sequence[int]] = (),
) -> np.ndarray:
    """The slot's scalars as int32 words, floats by their bits."""
    words = np.full(PARAM_WORDS, -1, np.int32)
    floats = [
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.repetition_penalty,
    ]
    # A temperature of 1e300 is as flat as the largest float32 can make it.
    words[:_NUM_FLOATS] = np.clip(floats, -_FLOAT32_MAX, _FLOAT32_MAX).astype(np.float32).view(np.int32)
    halves = np.asarray([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF], np.uint32).view(np.int32)
    words[_NUM_FLOATS : len(_WORDS)] = (
        min(sampling.top_k, _INT32_MAX),
        *halves.tolist(),
        prompt_length + sampling.min_tokens,
        _flags(sampling, bad_word_tokens),
    )
    if sampling.min_tokens > 0:
        # Larger ids are of no vocabulary: they never come up.
        stops = sorted(i for i in {*sampling.stop_token_ids, *eos_token_ids} if 0 <= i <= _INT32_MAX)
        words[len(_WORDS) : len(_WORDS) + len(stops)] = stops
    return words


def empty_rare_arguments(limits: SamplingLimits) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Mask, bias ids, bias values and bad words of a slot that restricts nothing."""
    return (
        np.full(limits.mask_words, 0xFFFFFFFF, np.uint32),
        np.full(limits.max_logit_bias, limits.vocab_size, np.int32),
        np.zeros(limits.max_logit_bias, np.float32),
        np.full((limits.max_bad_words, limits.max_bad_word_length), -1, np.int32),
    )


def rare_arguments(
    sampling: SamplingParams, limits: SamplingLimits, bad_word_tokens: Sequence[Sequence[int]] = ()
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Arguments of `set_rare`, made from checked parameters."""
    mask, bias_ids, bias_values, bad_words = empty_rare_arguments(limits)
    allowed = np.ones(limits.mask_words * 32, bool)
    if sampling.allowed_token_ids is not None:
        allowed[:] = False
        allowed[sampling.allowed_token_ids] = True
    allowed[[word[0] for word in bad_word_tokens if len(word) == 1]] = False
    mask[:] = np.packbits(allowed, bitorder="little").view(np.uint32)
    if sampling.logit_bias:
        bias_ids[: len(sampling.logit_bias)] = list(sampling.logit_bias.keys())
        bias_values[: len(sampling.logit_bias)] = list(sampling.logit_bias.values())
    for i, word in enumerate([word for word in bad_word_tokens if len(word) > 1]):
        bad_words[i, -len(word) :] = word
    return mask, bias_ids, bias_values, bad_words


# Device side, traced.


def apply_params(state: SamplingState, slots: Int[Array, " N"], words: Int[Array, "N words"]) -> SamplingState:
    """Set the scalars of slots; padding names the trash slot."""
    floats = jax.lax.bitcast_convert_type(words[:, :_NUM_FLOATS], jnp.float32)
    top_k, low, high, stop_from, flags = (words[:, _NUM_FLOATS + i] for i in range(5))
    seed = jax.lax.bitcast_convert_type(jnp.stack([low, high], axis=1), jnp.uint32)

    def put(array: Array, values: Array) -> Array:
        return array.at[slots].set(values, mode="promise_in_bounds")

    return replace(
        state,
        floats=put(state.floats, floats),
        top_k=put(state.top_k, top_k),
        seed=put(state.seed, seed),
        stop_from=put(state.stop_from, stop_from),
        flags=put(state.flags, flags),
        stop_ids=put(state.stop_ids, words[:, len(_WORDS) :]),
    )


def set_rare(
    state: SamplingState,
    slot: Int[Array, ""],
    mask: UInt[Array, " words"],
    bias_ids: Int[Array, " biases"],
    bias_values: Float[Array, " biases"],
    bad_words: Int[Array, "bad L1"],
) -> SamplingState:
    """Set the mask, biases and bad words of one slot."""
    return replace(
        state,
        mask=state.mask.at[slot].set(mask),
        bias_ids=state.bias_ids.at[slot].set(bias_ids),
        bias_values=state.bias_values.at[slot].set(bias_values),
        bad_words=state.bad_words.at[slot].set(bad_words),
    )


def init_history(
    state: SamplingState,
    slot: Int[Array, ""],
    tokens: Int[Array, " chunk"],
    start: Int[Array, ""],
    prompt_length: Int[Array, ""],
) -> SamplingState:
    """Count a chunk of a sequence's tokens; the chunk at position 0 forgets the slot's last owner.

    Args:
        state: the state.
        slot: of the sequence.
        tokens: token ids at positions start, start + 1 ...; -1 fills up.
        start: position of the first of them.
        prompt_length: tokens before it are the prompt's.
    """
    vocab = state.counts.shape[1]
    positions = start + jnp.arange(tokens.shape[0], dtype=jnp.int32)
    row = jnp.where(start == 0, 0, state.counts[slot])
    ids = jnp.where(tokens >= 0, tokens, vocab)
    in_output = positions >= prompt_length
    row = row.at[jnp.where(in_output, ids, vocab)].add(1, mode="drop")
    prompt = jnp.zeros((vocab,), bool).at[jnp.where(in_output, vocab, ids)].set(True, mode="drop")
    row = jnp.where(prompt, row | IN_PROMPT, row)

    recent = jnp.where(start == 0, -1, state.recent[slot])
    outputs = jnp.where(in_output & (tokens >= 0), tokens, -1)
    count = jnp.sum((tokens >= 0) & in_output, dtype=jnp.int32)
    last = jnp.sum(tokens >= 0, dtype=jnp.int32)
    # The newest `length` of the old recent tokens followed by this chunk's outputs.
    joined = jnp.concatenate([recent, outputs])
    length = recent.shape[0]
    index = jnp.arange(length, dtype=jnp.int32)
    from_old = index + count
    from_chunk = length + last - length + index
    taken = jnp.where(index < length - count, from_old, from_chunk)
    recent = joined.at[taken].get(mode="clip")
    return replace(
        state,
        counts=state.counts.at[slot].set(row),
        recent=state.recent.at[slot].set(recent),
    )
