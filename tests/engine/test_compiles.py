"""After warm-up nothing is compiled, whatever the requests: XLA's own events are counted."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
import pytest

from jaxllm.engine.engine import Engine
from jaxllm.sampling_params import SamplingParams

COMPILED = "/jax/core/compile/backend_compile_duration"
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
FULL = SamplingParams(
    seed=1, top_k=5, top_p=0.9, min_p=0.01, presence_penalty=0.5, repetition_penalty=1.1, logit_bias={3: 2.0},
    logprobs=2, prompt_logprobs=1, max_tokens=6, ignore_eos=True,
)  # fmt: skip


@contextmanager
def counted() -> Iterator[list[str]]:
    """A list that grows by one for each program that XLA compiles."""
    seen: list[str] = []

    def listener(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == COMPILED:
            seen.append(str(kwargs.get("fun_name", event)))

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)


@pytest.fixture(scope="module")
def warm(make_engine) -> Iterator[Engine]:
    """An engine with its default programs, all of them ready."""
    with counted() as seen:
        engine = make_engine(enforce_eager=False, max_num_seqs=32, max_model_len=1088, swap_bytes=1 << 20)
        engine.wait_until_compiled()
    assert len(seen) >= len(engine.runner.programs.grid.buckets()), "the events that are counted here are not sent"
    yield engine
    engine.shutdown()


@pytest.mark.parametrize("length", [1, 17, 129, 1000])
@pytest.mark.parametrize("sampling", [GREEDY, FULL], ids=["greedy", "full"])
def test_prompt_lengths(warm: Engine, generate: Callable, length: int, sampling: SamplingParams):
    with counted() as seen:
        generate(warm, [[5 + i % 50 for i in range(length)]], sampling)
    assert seen == [] and warm.stats().num_unexpected_compiles == 0


def test_batches_of_1_to_32(warm: Engine, generate: Callable):
    with counted() as seen:
        for size in range(1, 33):
            generate(
                warm, [[5 + (i + j) % 50 for j in range(1 + 7 * i)] for i in range(size)], [GREEDY, FULL][size % 2]
            )
    assert seen == [] and warm.stats().num_unexpected_compiles == 0


def test_launches_per_step(warm: Engine, generate: Callable):
    """A greedy token costs at most one launch: no small program runs beside the step."""
    before = warm.runner.num_launches
    generate(warm, [[7, 8, 9]], SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True))
    assert warm.runner.num_launches - before <= 32
