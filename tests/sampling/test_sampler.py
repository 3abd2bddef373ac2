"""Rules of the sampler one by one: greedy, truncation borders, restrictions, odd logits, modes, log-probabilities."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.sampling import sampler
from jaxllm.sampling.sampler import FULL, GREEDY, SAMPLED
from jaxllm.sampling_params import SamplingParams

VOCAB, ROWS = 50, 6
GREEDILY = SamplingParams(temperature=0.0)
INF, NAN = np.inf, np.nan


@pytest.fixture
def machine(make_machine: Any) -> Any:
    return make_machine(ROWS, VOCAB)


def row(**tokens: float) -> np.ndarray:
    """Logits [V] of -5, but for t3=1.0 and the like."""
    logits = np.full(VOCAB, -5.0, np.float32)
    for name, value in tokens.items():
        logits[int(name[1:])] = value
    return logits


def draw(machine: Any, slots: list[Any], logits: list[np.ndarray], mode: int = FULL, **options: Any) -> Any:
    """Slots 0, 1 ... sample once; the rest of the rows is padding."""
    padding = ROWS - len(slots)
    for i, slot in enumerate(slots):
        machine.put(i, slot)
    rows = np.stack([*logits, *[row()] * padding])
    positions = [slot.position for slot in slots] + [0] * padding
    names = [*range(len(slots)), *[machine.trash] * padding]
    out = machine.sample(rows, names, positions, mode, **options)
    return type(out)(*(x[: len(slots)] for x in out))


def support(machine: Any, slot: Any, logits: np.ndarray, draws: int = 300) -> set[int]:
    """Tokens that come up at 300 positions."""
    machine.put(0, slot)
    found: set[int] = set()
    for start in range(0, draws, ROWS):
        found |= set(machine.sample(np.stack([logits] * ROWS), [0] * ROWS, np.arange(ROWS) + start).tokens.tolist())
    return found


# Greedy.

GREEDY_ROWS = {
    "highest": (row(t7=1.0, t9=2.0), 9),
    "ties take the lowest id": (row(t20=2.0, t7=2.0, t49=2.0), 7),
    "all equal": (np.zeros(VOCAB, np.float32), 0),
    "minus zero equals zero": (row(t5=-0.0, t6=0.0), 5),
    "zero equals minus zero": (row(t5=0.0, t6=-0.0), 5),
    "infinity": (row(t8=INF), 8),
    "one above minus infinity": (np.where(np.arange(VOCAB) == 31, -3e38, -INF).astype(np.float32), 31),
    "last of the vocabulary": (row(t49=0.0), 49),
    "least float apart": (row(t3=1.0, t4=np.nextafter(np.float32(1), np.float32(2))), 4),
    "huge": (row(t3=3.0e38, t4=3.3e38), 4),
}


@pytest.mark.parametrize("mode", [GREEDY, SAMPLED, FULL])
def test_greedy(mode: int, machine: Any, make_slot: Any):
    machine.put(0, make_slot(GREEDILY))
    names = list(GREEDY_ROWS)
    for start in range(0, len(names), ROWS - 1):
        part = names[start : start + ROWS - 1]
        logits = np.stack([GREEDY_ROWS[name][0] for name in part] + [row()] * (ROWS - len(part)))
        tokens = machine.sample(logits, [0] * ROWS, range(ROWS), mode).tokens
        assert dict(zip(part, tokens.tolist(), strict=False)) == {name: GREEDY_ROWS[name][1] for name in part}


def test_greedy_is_of_the_shaped_logits(machine: Any, make_slot: Any):
    def greedy(**values: Any) -> SamplingParams:
        return SamplingParams(temperature=0.0, **values)

    logits = row(t2=3.0, t3=2.9, t4=-1.0)
    cases = [
        (make_slot(greedy(logit_bias={4: 4.5})), 4),
        (make_slot(greedy(repetition_penalty=1.1), prompt=[2]), 3),
        (make_slot(greedy(frequency_penalty=0.06), output=[2, 2]), 3),
        (make_slot(greedy(presence_penalty=0.11), output=[2]), 3),
        (make_slot(greedy(presence_penalty=0.09), output=[2, 2]), 2),
        (make_slot(greedy(frequency_penalty=2.0, presence_penalty=2.0), prompt=[2]), 2),
    ]
    out = draw(machine, [slot for slot, _ in cases], [logits] * len(cases))
    assert out.tokens.tolist() == [token for _, token in cases]
    # Negative logits are multiplied.
    negative = np.where(np.arange(VOCAB) == 2, -1.0, -1.4).astype(np.float32)
    out = draw(machine, [make_slot(greedy(repetition_penalty=1.5), prompt=[2])], [negative])
    assert out.tokens.tolist() == [0]


# Truncation.


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**values)


SUPPORTS: dict[str, tuple[dict[str, Any], np.ndarray, set[int]]] = {
    "top_k 1": ({"top_k": 1}, row(t3=1.0, t4=0.9), {3}),
    "top_k ties at the border stay": ({"top_k": 2}, row(t3=1.0, t9=0.5, t4=0.5, t5=0.49), {3, 4, 9}),
    "top_k zeros of either sign tie": ({"top_k": 1}, row(t3=0.0, t4=-0.0), {3, 4}),
    "top_k of zeros below the top": ({"top_k": 2}, row(t2=0.5, t3=0.0, t4=-0.0), {2, 3, 4}),
    "top_k above the vocabulary": ({"top_k": VOCAB + 1}, np.zeros(VOCAB, np.float32), set(range(VOCAB))),
    "top_k huge": ({"top_k": 2**62}, np.zeros(VOCAB, np.float32), set(range(VOCAB))),
    "top_k is the vocabulary": ({"top_k": VOCAB}, np.zeros(VOCAB, np.float32), set(range(VOCAB))),
    "top_k more than is left": ({"top_k": 5, "allowed_token_ids": [3, 4]}, row(t9=9.0), {3, 4}),
    "top_k below zero": ({"top_k": 2}, row(t3=-1.0, t4=-1.1, t5=-1.2), {3, 4}),
    "top_p tiny": ({"top_p": 1e-9}, row(t3=0.1, t4=0.05), {3}),
    "top_p below the least float": ({"top_p": 1e-300}, row(t3=0.1, t4=0.05), {3}),
    "top_p ties at the border stay": ({"top_p": 0.5}, row(t3=9.0, t4=9.0, t5=9.0, t6=1.0), {3, 4, 5}),
    "top_p tiny, all equal": ({"top_p": 1e-9}, np.zeros(VOCAB, np.float32), set(range(VOCAB))),
    "top_p almost 1": ({"top_p": 1 - 1e-7}, np.zeros(VOCAB, np.float32), set(range(VOCAB))),
    "top_p of one token": ({"top_p": 0.99, "allowed_token_ids": [17]}, row(), {17}),
    "min_p 1": ({"min_p": 1.0}, row(t3=2.0, t8=2.0, t9=1.999), {3, 8}),
    "min_p 1, negative": ({"min_p": 1.0}, np.where(np.arange(VOCAB) < 2, -7, -8).astype(np.float32), {0, 1}),
    "min_p half": ({"min_p": 0.5}, row(t3=0.0, t8=np.log(0.51), t9=np.log(0.49)), {3, 8}),
    "min_p least float": ({"min_p": 1e-300}, np.zeros(VOCAB, np.float32), set(range(VOCAB))),
    "all mass on one token": ({}, row(t30=1000.0), {30}),
    "all mass on one token, hot": ({"temperature": 100.0}, row(t30=1e5), {30}),
    "cold": ({"temperature": 1e-5}, row(t3=1.0, t4=0.8), {3}),
    "cold, equal": ({"temperature": 1e-5}, row(t3=1.0, t4=1.0), {3, 4}),
    "hot": ({"temperature": 100.0}, np.linspace(-1, 1, VOCAB, dtype=np.float32), set(range(VOCAB))),
    "hottest": ({"temperature": 1e300, "allowed_token_ids": [4, 7, 9]}, row(t30=1e9, t7=1e9), {4, 7, 9}),
    "infinity": ({}, row(t8=INF), {8}),
    "infinity, truncated": ({"top_p": 0.9, "top_k": 3, "min_p": 0.1}, row(t8=INF), {8}),
    "overflow when divided": ({"temperature": 0.01, "top_p": 0.9}, row(t8=3e38, t9=2e38), {8}),
    "far from zero": ({"temperature": 0.02}, row(t8=30000.0, t9=30000.0 + 2**-9), {8, 9}),
    "bias cannot lift what is not allowed": ({"allowed_token_ids": [2], "logit_bias": {5: 100.0}}, row(), {2}),
    "bias is limited to 100": ({"logit_bias": {5: 1e9}}, row(t6=95.0), {5, 6}),
    "tiny repetition": ({"repetition_penalty": 1e-50, "allowed_token_ids": [1, 5]}, row(t1=1.0, t5=1.0), {1}),
    "tiny repetition, greedy": (
        {"repetition_penalty": 1e-50, "allowed_token_ids": [1, 5], "temperature": 0},
        row(t0=9.0, t1=-1.0, t5=-1.0),
        {1},
    ),
    "huge repetition": ({"repetition_penalty": 1e300, "allowed_token_ids": [1, 5, 6]}, row(t1=0.0, t5=0.0), {1, 5, 6}),
    "allowed, all words of the mask": ({"allowed_token_ids": [0, 31, 32, 49]}, row(t5=3.0), {0, 31, 32, 49}),
    "top_k of two zero-weight tokens": ({"top_k": 3, "top_p": 0.999}, row(t3=500.0, t4=0.0), {3}),
}


@pytest.mark.parametrize("name", SUPPORTS)
def test_tokens_that_come_up(name: str, machine: Any, make_slot: Any):
    values, logits, expected = SUPPORTS[name]
    # Token 1 is in the prompt, nothing in the output.
    draws = 300 if len(expected) < 10 else 900
    assert support(machine, make_slot(SamplingParams(**values), seed=5), logits, draws) == expected


def test_noise_is_finite_at_the_ends_of_the_hash():
    """A noise of minus infinity would make the only allowed token equal to the blocked ones."""
    ends = jnp.asarray([0, 1, 2**31, 2**32 - 129, 2**32 - 128, 2**32 - 1], jnp.uint32)
    noise = np.asarray(sampler.gumbel_of_bits(ends))
    assert np.isfinite(noise).all()
    assert (np.diff(noise) <= 0).all()
    exact = -np.log(-np.log1p(-(np.asarray([0, 1, 2**31], np.float64) + 0.5) / 2**32))
    np.testing.assert_allclose(noise[:3], exact, rtol=1e-6)


# Restrictions that go with the sequence.


def test_bad_words(machine: Any, make_slot: Any):
    """A word's last token is held back exactly when the tokens before it were just generated."""
    logits = row(t4=5.0, t3=4.0)
    words = [[1, 2, 4]]

    def greedy(output: list[int], bad_words: list[list[int]] = words, prompt: tuple[int, ...] = (1,)) -> Any:
        return make_slot(GREEDILY, prompt=prompt, output=output, bad_words=bad_words)

    cases = [
        (greedy([1, 2]), 3),
        (greedy([9, 1, 2]), 3),
        (greedy([2, 1]), 4),
        (greedy([2]), 4),
        # Tokens of the prompt do not count.
        (greedy([], prompt=(1, 2)), 4),
        (greedy([2], prompt=(1,)), 4),
        (greedy([1, 2, 9]), 4),
        (greedy([], [[4]]), 3),
        (greedy([4, 4, 4], [[4, 4, 4, 4]]), 3),
        (greedy([4, 4], [[4, 4, 4, 4]]), 4),
        (greedy([8, 2], [[7, 4], [2, 4], [9, 9, 9, 4], [3, 3]]), 3),
        (greedy([5, 8, 3], [[7, 4], [2, 4], [3, 4], [3, 3]]), 1),
    ]
    logits[1] = 3.0
    for start in range(0, len(cases), ROWS):
        part = cases[start : start + ROWS]
        out = draw(machine, [slot for slot, _ in part], [logits] * len(part))
        assert out.tokens.tolist() == [token for _, token in part]


def test_bad_words_follow_the_sampled_tokens(machine: Any, make_slot: Any):
    """The history grows on the device, step by step, in whatever mode the steps run."""
    machine.put(0, make_slot(GREEDILY, bad_words=[[4, 4, 4], [4, 4, 3, 3]]))
    rows = np.stack([row(t4=5.0, t3=4.0, t2=3.0)] * ROWS)
    slots = [0] + [machine.trash] * (ROWS - 1)
    tokens = [machine.sample(rows, slots, [1 + i] * ROWS, keep=True).tokens[0] for i in range(9)]
    assert tokens == [4, 4, 3, 4, 4, 3, 4, 4, 3]


def test_penalties_follow_the_sampled_tokens(machine: Any, make_slot: Any, shaped: Any):
    penalties = {"frequency_penalty": 0.7, "presence_penalty": 0.2, "repetition_penalty": 1.2}
    values: dict[str, Any] = {"temperature": 0.0, **penalties}
    logits = np.linspace(-1, 3, VOCAB, dtype=np.float32)
    prompt, output = [49, 48], []
    machine.put(0, make_slot(SamplingParams(**values), prompt=prompt))
    slots = [0] + [machine.trash] * (ROWS - 1)
    for i in range(40):
        token = int(machine.sample(np.stack([logits] * ROWS), slots, [2 + i] * ROWS, keep=True).tokens[0])
        expected = shaped(logits, make_slot(SamplingParams(**values), prompt=prompt, output=output))
        assert expected[token] > expected.max() - 1e-5
        output.append(token)
    assert len(set(output)) > 10


@pytest.mark.parametrize("values", [{"temperature": 0.0}, {"top_k": 1}, {"temperature": 0.3}])
def test_min_tokens_holds_back_stop_ids_and_eos(values: dict[str, Any], machine: Any, make_slot: Any):
    logits = row(t10=40.0, t11=39.0, t12=38.0, t13=20.0)
    given = SamplingParams(min_tokens=3, stop_token_ids=[10, 11, -7, 10_000, 2**40], **values)
    slots = [make_slot(given, output=[0] * i, eos=[12]) for i in range(5)]
    assert draw(machine, slots, [logits] * 5).tokens[:3].tolist() == [13, 13, 13]
    if "top_k" in values or values["temperature"] == 0.0:
        assert draw(machine, slots, [logits] * 5).tokens[3:].tolist() == [10, 10]
    else:
        assert set(draw(machine, slots, [logits] * 5).tokens[3:].tolist()) <= {10, 11}


# Rows do not touch each other.


def _mixed(make_slot: Any) -> list[Any]:
    return [
        make_slot(SamplingParams(), seed=1),
        make_slot(SamplingParams(top_k=5, temperature=0.7), seed=2, prompt=[1, 2, 3]),
        make_slot(SamplingParams(top_p=0.7, min_p=0.05), seed=3, prompt=[4] * 9),
        make_slot(SamplingParams(presence_penalty=1.0, logit_bias={3: 2.0}), seed=4, output=[1, 2, 3]),
        make_slot(SamplingParams(allowed_token_ids=[3, 4, 5]), seed=2**63 - 1, bad_words=[[1, 3], [4]]),
        make_slot(GREEDILY),
    ]


def _logits(seed: int, rows: int = ROWS) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (rows, VOCAB)).astype(np.float32)


def test_a_token_depends_neither_on_its_row_nor_on_its_neighbours(machine: Any, make_slot: Any):
    slots, logits = _mixed(make_slot), _logits(0)
    for i, slot in enumerate(slots):
        machine.put(i, slot)
    positions = np.asarray([slot.position for slot in slots])
    for step in range(8):
        expected = machine.sample(logits, range(ROWS), positions + step)
        order = np.random.default_rng(step).permutation(ROWS)
        shuffled = machine.sample(logits[order], order, (positions + step)[order])
        for got, want in zip(shuffled, expected, strict=True):
            np.testing.assert_array_equal(got, want[order])
        for i in range(ROWS):
            # Alone among padding, and in a batch of one row.
            names = np.full(ROWS, machine.trash)
            names[ROWS - 1 - i] = i
            others = _logits(100 + i)
            others[ROWS - 1 - i] = logits[i]
            token = machine.sample(others, names, np.where(names == i, positions[i] + step, 0)).tokens[ROWS - 1 - i]
            alone = machine.sample(logits[i : i + 1], [i], [positions[i] + step]).tokens[0]
            assert token == alone == expected.tokens[i]


def test_history_of_a_batch_of_one_row(machine: Any, make_slot: Any, make_machine: Any):
    """A batch of one row notes its token in another way; the state afterwards is the same."""
    other = make_machine(ROWS, VOCAB)
    for each in (machine, other):
        each.put(2, make_slot(SamplingParams(presence_penalty=1.0), bad_words=[[1, 2]], seed=9))
    logits = _logits(3)
    for i in range(3):
        machine.sample(logits[2:3], [2], [i + 1], keep=True)
        other.sample(logits, [other.trash] * 2 + [2] + [other.trash] * 3, [0, 0, i + 1, 0, 0, 0], keep=True)
    np.testing.assert_array_equal(machine.state.counts[: machine.trash], other.state.counts[: machine.trash])
    np.testing.assert_array_equal(machine.state.recent[: machine.trash], other.state.recent[: machine.trash])


@pytest.mark.parametrize("poison", [NAN, INF, -INF, "one nan", "one inf"])
def test_odd_logits_of_a_row_do_not_harm_another(poison: Any, machine: Any, make_slot: Any):
    slots, logits = _mixed(make_slot), _logits(1)
    clean = draw(machine, slots, list(logits))
    for bad in range(ROWS):
        poisoned = logits.copy()
        if isinstance(poison, str):
            poisoned[bad, 7] = NAN if poison == "one nan" else INF
        else:
            poisoned[bad] = poison
        out = draw(machine, slots, list(poisoned))
        others = np.arange(ROWS) != bad
        for got, want in zip(out, clean, strict=True):
            np.testing.assert_array_equal(got[others], want[others])
        assert 0 <= out.tokens[bad] < VOCAB


# Modes.


@pytest.mark.parametrize("static", [False, True])
def test_modes_agree_where_they_apply(static: bool, machine: Any, make_slot: Any):
    slots = [make_slot(GREEDILY)] * 2 + _mixed(make_slot)[:3] + [make_slot(GREEDILY, seed=77)]
    for seed in range(5):
        logits = list(_logits(seed))
        full = draw(machine, slots, logits, FULL)
        sampled = draw(machine, slots, logits, SAMPLED, static=static)
        greedy = draw(machine, slots, logits, GREEDY, static=static)
        assert sampled.tokens.tolist() == full.tokens.tolist()
        assert greedy.tokens[[0, 1, 5]].tolist() == full.tokens[[0, 1, 5]].tolist()
        for lower in (sampled, greedy):
            assert not any(x.any() for x in lower[1:])
        if static:
            compiled_in = draw(machine, slots, logits, FULL, static=True)
            for got, want in zip(compiled_in, full, strict=True):
                np.testing.assert_array_equal(got, want)


def test_required_mode(make_slot: Any):
    def mode(bad_words: Any = (), **values: Any) -> int:
        return make_slot(SamplingParams(**values), bad_words=bad_words).mode

    assert mode(temperature=0.0) == mode(temperature=1e-6, top_p=0.5) == GREEDY
    assert mode() == mode(top_k=3, top_p=0.5, min_p=0.1, seed=3, stop_token_ids=[1]) == SAMPLED
    needs = [
        {"logprobs": 0},
        {"min_tokens": 1},
        {"logit_bias": {1: 1.0}},
        {"allowed_token_ids": [1]},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"repetition_penalty": 0.9},
        {"bad_words": [[1]]},
        {"bad_words": [[1, 2]]},
    ]
    for values in needs:
        assert mode(temperature=0.0, **values) == FULL
    assert mode(logit_bias={}, bad_words=[]) == SAMPLED
