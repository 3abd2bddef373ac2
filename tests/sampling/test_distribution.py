"""20,000 draws of every feature against exact probabilities; and draws that should not depend on each other."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2, kstest

from jaxllm.sampling.sampler import FULL, SAMPLED
from jaxllm.sampling_params import SamplingParams

VOCAB = 64
DRAWS = 20_000
PROMPT = [3, 3, 9, 14, 40, 63]
OUTPUT = [5, 9, 5, 5, 20, 31, 9]
USED = {"prompt": PROMPT, "output": OUTPUT}
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "cool": ({"temperature": 0.5}, {}),
    "hot": ({"temperature": 3.0}, {}),
    "top_k": ({"top_k": 7}, {}),
    "top_k above the vocabulary": ({"top_k": 1000}, {}),
    "top_p": ({"top_p": 0.8}, {}),
    "top_p wide": ({"top_p": 0.99}, {}),
    "min_p": ({"min_p": 0.1}, {}),
    "all truncations": ({"temperature": 1.5, "top_k": 30, "top_p": 0.9, "min_p": 0.02}, {}),
    "top_p of what top_k left": ({"top_k": 5, "top_p": 0.6}, {}),
    "top_p of what min_p left": ({"min_p": 0.3, "top_p": 0.7, "temperature": 2.0}, {}),
    "repetition": ({"repetition_penalty": 1.7}, USED),
    "repetition below 1": ({"repetition_penalty": 0.6}, USED),
    "frequency": ({"frequency_penalty": 0.9}, USED),
    "frequency below 0": ({"frequency_penalty": -0.5}, USED),
    "presence": ({"presence_penalty": 1.5}, USED),
    "penalties": (PENALTIES, USED),
    "penalties, prompt only": (PENALTIES, {"prompt": PROMPT}),
    "bias": ({"logit_bias": {0: 2.0, 7: -100.0, 63: 1.5}}, {}),
    "bias upwards": ({"logit_bias": {11: 100.0}, "temperature": 100.0}, {}),
    "allowed": ({"allowed_token_ids": [1, 31, 32, 63, 5]}, {}),
    "bad words": ({}, {"bad_words": [[2], [31, 9, 4], [8, 9, 6], [9, 7]], **USED}),
    "min_tokens": ({"min_tokens": 9, "stop_token_ids": [1, 2], "logprobs": 3}, {"eos": [0, 4], **USED}),
    "everything": (
        {
            **PENALTIES,
            "temperature": 1.4,
            "top_k": 20,
            "top_p": 0.92,
            "min_p": 0.01,
            "logit_bias": {5: 3.0, 12: 1.0, 33: -1.0},
            "allowed_token_ids": list(range(1, 50)),
            "min_tokens": 8,
            "stop_token_ids": [12, 13],
        },
        {"bad_words": [[15], [9, 17], [20, 9, 18], [31, 9, 19]], "eos": [16], **USED},
    ),
}


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """The p-value of counts; cells that expect fewer than five draws are put together."""
    assert not counts[probabilities == 0].any(), "a token of probability 0 was drawn"
    expected = probabilities * counts.sum()
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    used = expected > 0
    statistic = float(((observed[used] - expected[used]) ** 2 / expected[used]).sum())
    return float(chi2.sf(statistic, max(int(used.sum()) - 1, 1)))


@pytest.fixture(scope="module")
def p_values(make_machine: Any, make_slot: Any, exact: Any) -> dict[str, float]:
    """Row r of a call has the state of case r + turn and a seed of its own, one more than the row before it:
    neighbours always sample in other ways, and every case gets DRAWS draws."""
    names = list(CASES)
    logits = np.random.default_rng(5).normal(0, 2, (len(CASES), VOCAB)).astype(np.float32)
    few, slots = make_machine(len(CASES), VOCAB), []
    for i, (params, rest) in enumerate(CASES.values()):
        slots.append(make_slot(SamplingParams(**params), **rest))
        few.put(i, slots[-1])
    case_positions = np.asarray([slot.position for slot in slots])
    many = make_machine(DRAWS, VOCAB)
    counts = np.zeros((len(CASES), VOCAB), int)
    for turn in range(len(CASES)):
        case = (np.arange(DRAWS) + turn) % len(CASES)
        seeds = np.zeros((DRAWS + 1, 2), np.uint32)
        seeds[:, 0] = turn * DRAWS + np.arange(DRAWS + 1)
        rows = jax.tree.map(lambda x, case=case: x[np.append(case, len(CASES))], few.state)
        many.state = replace(rows, seed=jnp.asarray(seeds))
        drawn = many.sample(logits[case], np.arange(DRAWS), case_positions[case], FULL).tokens
        np.add.at(counts, (case, drawn), 1)
    assert (counts.sum(1) >= DRAWS - len(CASES)).all()
    return {name: chi_square(counts[i], exact(logits[i], slots[i])) for i, name in enumerate(names)}


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_exact_probabilities(name: str, p_values: dict[str, float]):
    assert p_values[name] > 0.001


def test_p_values_are_spread(p_values: dict[str, float]):
    """Draws that are too even (all p-values near 1) are as wrong as draws that are off."""
    assert kstest(list(p_values.values()), "uniform").pvalue > 0.001


def test_every_case_tests_something(make_slot: Any, exact: Any):
    """Apart from the two that must not, each case changes the probabilities."""
    logits = np.random.default_rng(5).normal(0, 2, VOCAB)
    plain = exact(logits, make_slot(SamplingParams()))
    for name, (params, rest) in CASES.items():
        changed = np.abs(exact(logits, make_slot(SamplingParams(**params), **rest)) - plain).max() > 1e-3
        assert changed == (name not in ("plain", "top_k above the vocabulary")), name


def _seeds(start: int, step: int) -> list[int]:
    return [start + step * i for i in range(DRAWS)]


# (seeds of the rows, positions of the rows) of pairs of draws that a request could make.
PAIRS: dict[str, tuple[list[int], list[int], list[int], list[int]]] = {
    "a position and the next": ([7] * DRAWS, list(range(DRAWS)), [7] * DRAWS, list(range(1, DRAWS + 1))),
    "a seed and the next": (_seeds(0, 1), [50] * DRAWS, _seeds(1, 1), [50] * DRAWS),
    "seeds that differ in the high word": (_seeds(0, 1), [9] * DRAWS, _seeds(1 << 32, 1), [9] * DRAWS),
    "seeds of the high word": (_seeds(0, 1 << 32), [9] * DRAWS, _seeds(1 << 32, 1 << 32), [9] * DRAWS),
    "seed and position exchanged": (_seeds(0, 1), [30000] * DRAWS, [30000] * DRAWS, list(range(DRAWS))),
    "seed and position added": (_seeds(100, 1), [40] * DRAWS, _seeds(101, 1), [39] * DRAWS),
    "seeds of opposite sign": (_seeds(1, 1), [3] * DRAWS, _seeds(-1, -1), [3] * DRAWS),
}


@pytest.mark.parametrize("name", PAIRS)
def test_two_draws_are_independent(name: str, make_machine: Any, make_slot: Any, exact: Any):
    """Chi-square of the pair over the product of the two exact distributions (five tokens each)."""
    first_seeds, first_positions, second_seeds, second_positions = PAIRS[name]
    given = make_slot(SamplingParams(top_k=5))
    logits = np.random.default_rng(1).normal(0, 1, VOCAB).astype(np.float32)
    rows = np.broadcast_to(logits, (DRAWS, VOCAB))
    machine = make_machine(DRAWS, VOCAB)
    draws = []
    for seeds, positions in ((first_seeds, first_positions), (second_seeds, second_positions)):
        machine.put_seeds(given, seeds)
        draws.append(machine.sample(rows, np.arange(DRAWS), positions, SAMPLED).tokens)
    probabilities = exact(logits, given)
    pairs = np.bincount(draws[0] * VOCAB + draws[1], minlength=VOCAB * VOCAB)
    assert chi_square(pairs, np.outer(probabilities, probabilities).ravel()) > 0.001


def test_all_parts_of_a_large_vocabulary_are_drawn_alike(make_machine: Any, make_slot: Any):
    """Equal logits: blocks of ids, and ids by their low bits, come up equally often."""
    vocab, rows, calls = 20_000, 250, 8
    machine = make_machine(1, vocab)
    machine.put(0, make_slot(SamplingParams(), seed=3))
    logits = np.zeros((rows, vocab), np.float32)
    drawn = np.concatenate(
        [machine.sample(logits, [0] * rows, np.arange(rows) + rows * i, SAMPLED).tokens for i in range(calls)]
    )
    for cells in (drawn // (vocab // 50), drawn % 32):
        size = int(cells.max()) + 1
        assert chi_square(np.bincount(cells), np.full(size, 1 / size)) > 0.001
