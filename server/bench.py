"""`jaxllm bench latency|throughput`: the engine offline, on random token ids, without a tokenizer.

The flags are those of `vllm bench` where it has them. Each run is preceded by one of the same shape, so that
nothing is compiled or loaded inside a measurement; the counts of launches and compilations show it.
"""

import argparse
import json
import logging
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxllm
from converters import ModelSource, max_positions
from converters.default_model import fetch_default_model
from jaxllm.build import build_core
from jaxllm.engine.engine import Engine
from jaxllm.engine.protocol import EngineRequest
from jaxllm.engine_args import EngineArgs
from jaxllm.progress import StartProgress, is_interactive, tqdm
from jaxllm.sampling_params import SamplingParams
from jaxllm.text_side import find_model

logger = logging.getLogger(__name__)

Prompts = Sequence[list[int]]


@dataclass(frozen=True)
class BenchRun:
    """What one run of requests, all sent at once, showed.

    Attributes:
        seconds: from the first request to the last token.
        prompt_tokens, output_tokens: sums over the requests.
        first_token_s: per request, time to its first token.
        token_s: per request, seconds per token after the first; empty for single tokens.
        steps, launches, compiles: by the engine during the run.
    """

    seconds: float
    prompt_tokens: int
    output_tokens: int
    first_token_s: list[float] = field(repr=False)
    token_s: list[float] = field(repr=False)
    steps: int
    launches: int
    compiles: int

    def summary(self) -> dict[str, Any]:
        """The figures worth printing and keeping."""
        return {
            "seconds": round(self.seconds, 4),
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "output_tokens_per_s": round(self.output_tokens / self.seconds, 2),
            "prompt_tokens_per_s": round(self.prompt_tokens / self.seconds, 2),
            "ttft_ms": _percentiles(self.first_token_s),
            "ms_per_token": _percentiles(self.token_s),
            "steps": self.steps,
            "launches": self.launches,
            "launches_per_step": round(self.launches / max(self.steps, 1), 3),
            "compiles": self.compiles,
        }


def _percentiles(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    ms = np.asarray(seconds) * 1e3
    return {
        "mean": round(float(ms.mean()), 3),
        **{f"p{p}": round(float(np.percentile(ms, p)), 3) for p in (50, 90, 99)},
    }


def random_prompts(count: int, low: int, high: int, vocab_size: int, seed: int) -> list[list[int]]:
    """`count` prompts of low..high random token ids."""
    random = np.random.default_rng(seed)
    return [random.integers(0, vocab_size, int(random.integers(low, high + 1))).tolist() for _ in range(count)]


def run_requests(engine: Engine, prompts: Prompts, output_lens: Sequence[int], n: int = 1) -> BenchRun:
    """Send all prompts at once, greedy and ignoring EOS, and step until the last one ends."""
    before = engine.stats()
    compiles = engine.runner.programs.num_compiles
    first: dict[tuple[str, int], float] = {}
    last: dict[tuple[str, int], float] = {}
    counts: dict[tuple[str, int], int] = {}
    start = time.perf_counter()
    for i, (prompt, length) in enumerate(zip(prompts, output_lens, strict=True)):
        sampling = SamplingParams(temperature=0.0 if n == 1 else 1.0, max_tokens=length, ignore_eos=True, n=n)
        engine.add_request(
            EngineRequest(request_id=str(i), prompt_tokens=prompt, sampling=sampling, arrival_time=time.time())
        )
    while engine.has_work():
        deltas = engine.step()
        now = time.perf_counter() - start
        for delta in deltas:
            if delta.tokens:
                key = (delta.request_id, delta.index)
                first.setdefault(key, now)
                last[key] = now
                counts[key] = counts.get(key, 0) + len(delta.tokens)
    seconds = time.perf_counter() - start
    after = engine.stats()
    wanted = {(str(i), j): length for i, length in enumerate(output_lens) for j in range(n)}
    if counts != wanted:
        raise RuntimeError("the engine lost tokens: some requests did not get as many as they asked for")
    return BenchRun(
        seconds=seconds,
        prompt_tokens=sum(map(len, prompts)),
        output_tokens=sum(counts.values()),
        first_token_s=list(first.values()),
        token_s=[(last[k] - first[k]) / (counts[k] - 1) for k in first if counts[k] > 1],
        steps=after.num_steps - before.num_steps,
        launches=after.num_launches - before.num_launches,
        compiles=engine.runner.programs.num_compiles - compiles,
    )


def start_engine(args: EngineArgs, source: ModelSource | None = None) -> tuple[Engine, dict[str, Any]]:
    """Build the engine, with every program compiled; and what starting cost."""
    start = time.perf_counter()
    engine = build_core(args, source, StartProgress())
    ready = time.perf_counter() - start
    if not args.enforce_eager:
        engine.wait_until_compiled()
    facts = {
        "ready_s": round(ready, 2),
        "all_compiled_s": round(time.perf_counter() - start, 2),
        "programs_compiled": engine.runner.programs.num_compiles,
        "programs_loaded": engine.runner.programs.num_loaded,
    }
    return engine, facts


def bench_latency(
    engine: Engine, *, batch_size: int, input_len: int, output_len: int, n: int, warmup: int, iterations: int, seed: int
) -> dict[str, Any]:
    """One batch at a time, `iterations` times: medians over the batches."""
    runs: list[BenchRun] = []
    for i in tqdm(range(-warmup, iterations), desc="batches", leave=False, disable=not is_interactive()):
        # Fresh prompts each time: a prefix cached by the run before would shorten this one.
        prompts = random_prompts(batch_size, input_len, input_len, engine.model_info.vocab_size, seed + i + warmup)
        run = run_requests(engine, prompts, [output_len] * batch_size, n)
        if i >= 0:
            runs.append(run)
    seconds = [run.seconds for run in runs]
    return {
        "latency_s": {"mean": round(statistics.fmean(seconds), 4), "median": round(statistics.median(seconds), 4)},
        "ttft_ms_median": round(statistics.median(s for r in runs for s in r.first_token_s) * 1e3, 3),
        "ms_per_token_median": round(statistics.median([s for r in runs for s in r.token_s] or [0.0]) * 1e3, 3),
        "steps": runs[-1].steps,
        "launches": runs[-1].launches,
        "launches_per_step": round(runs[-1].launches / max(runs[-1].steps, 1), 3),
        "compiles": sum(run.compiles for run in runs),
        "iterations": iterations,
    }


def bench_throughput(
    engine: Engine,
    *,
    num_prompts: int,
    input_len: int,
    output_len: int,
    range_ratio: float,
    n: int,
    subtract_prefill: bool,
    seed: int,
) -> dict[str, Any]:
    """All requests at once. With `subtract_prefill`, a run of one output token is taken off: decoding alone."""
    vocab_size = engine.model_info.vocab_size
    low, high = _spread(input_len, range_ratio)
    out_low, out_high = _spread(output_len, range_ratio)
    random = np.random.default_rng(seed)
    lengths = [int(x) for x in random.integers(out_low, out_high + 1, num_prompts)]

    def measure(lens: list[int]) -> BenchRun:
        run: BenchRun | None = None
        for repeat in range(2):  # the first one warms up
            prompts = random_prompts(num_prompts, low, high, vocab_size, seed + 1 + repeat)
            run = run_requests(engine, prompts, lens, n)
        assert run is not None
        return run

    run = measure(lengths)
    result = {"requests": num_prompts, "requests_per_s": round(num_prompts / run.seconds, 3), **run.summary()}
    result["total_tokens_per_s"] = round((run.prompt_tokens + run.output_tokens) / run.seconds, 2)
    if subtract_prefill:
        prefill = measure([1] * num_prompts)
        decode_tokens = run.output_tokens - prefill.output_tokens
        result["prefill_only_s"] = round(prefill.seconds, 4)
        result["prefill_only_prompt_tokens_per_s"] = round(prefill.prompt_tokens / prefill.seconds, 2)
        result["decode_only_tokens_per_s"] = round(decode_tokens / max(run.seconds - prefill.seconds, 1e-9), 2)
    return result


def _spread(length: int, ratio: float) -> tuple[int, int]:
    return max(1, round(length * (1 - ratio))), max(1, round(length * (1 + ratio)))


def add_bench_arguments(
    subparsers: "argparse._SubParsersAction[Any]", add_engine_arguments: Callable[[argparse.ArgumentParser], object]
) -> None:
    """Add `latency` and `throughput` to the parser of `jaxllm bench`."""
    latency = subparsers.add_parser("latency", help="one batch at a time: seconds per batch, time to first token")
    throughput = subparsers.add_parser("throughput", help="many requests at once: tokens per second")
    for parser, input_len, output_len in ((latency, 32, 128), (throughput, 512, 128)):
        group = parser.add_argument_group("workload")
        group.add_argument(
            "--input-len", "--random-input-len", type=int, default=input_len, help="prompt tokens (%(default)s)"
        )
        group.add_argument(
            "--output-len", "--random-output-len", type=int, default=output_len, help="output tokens (%(default)s)"
        )
        group.add_argument(
            "--n", type=int, default=1, help="sequences per prompt; more than one are sampled (%(default)s)"
        )
        group.add_argument("--output-json", type=Path, help="write the figures to this file")
    group = latency.add_argument_group("batches")
    group.add_argument("--batch-size", type=int, default=8, help="requests at once (%(default)s)")
    group.add_argument("--num-iters-warmup", type=int, default=2, help="batches before those that count (%(default)s)")
    group.add_argument("--num-iters", type=int, default=10, help="batches that count (%(default)s)")
    group = throughput.add_argument_group("requests")
    group.add_argument("--num-prompts", type=int, default=256, help="requests (%(default)s)")
    group.add_argument(
        "--random-range-ratio", type=float, default=0.0, help="lengths vary by this share up and down, 0 <= r < 1"
    )
    group.add_argument(
        "--subtract-prefill",
        action="store_true",
        help="run again with one output token each and report decoding alone, too",
    )
    for parser in (latency, throughput):
        add_engine_arguments(parser)


def run_bench(options: argparse.Namespace, args: EngineArgs) -> dict[str, Any]:
    """Run `jaxllm bench latency` or `throughput`, print the figures and write them where asked.

    Raises:
        ValueError: a workload that the engine cannot hold.
    """
    check_options(options)
    if not args.model:
        args = replace(args, model=str(fetch_default_model(logger.info)))
    source = find_model(args)
    _check_length(options, max_positions(source.hf_config))  # at once; what the engine then chooses may be less
    engine, start = start_engine(args, source)
    try:
        _check_length(options, engine.model_info.max_model_len)
        common = {"input_len": options.input_len, "output_len": options.output_len, "n": options.n, "seed": args.seed}
        if options.bench == "latency":
            figures = bench_latency(
                engine,
                **common,
                batch_size=options.batch_size,
                warmup=options.num_iters_warmup,
                iterations=options.num_iters,
            )
        else:
            figures = bench_throughput(
                engine,
                **common,
                num_prompts=options.num_prompts,
                range_ratio=options.random_range_ratio,
                subtract_prefill=options.subtract_prefill,
            )
        report = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "bench": options.bench,
            "workload": common,
            "figures": figures,
            "start": start,
            "device": jax.devices()[0].device_kind,
            "versions": {"jaxllm": jaxllm.__version__, **{name: version(name) for name in ("jax", "jaxlib", "flax")}},
            "commit": _commit(),
            "engine": asdict(engine.config),
        }
    finally:
        engine.shutdown()
    for name, value in figures.items():
        shown = "  ".join(f"{key} {part}" for key, part in value.items()) if isinstance(value, dict) else value
        print(f"{name:36} {shown}")
    if options.output_json is not None:
        options.output_json.write_text(json.dumps(report, indent=2) + "\n")
        print(f"written to {options.output_json}")
    return report


def _check_length(options: argparse.Namespace, max_model_len: int) -> None:
    ratio = getattr(options, "random_range_ratio", 0.0)
    longest = _spread(options.input_len, ratio)[1] + _spread(options.output_len, ratio)[1]
    if longest > max_model_len:
        raise ValueError(
            f"prompt and output of up to {longest} tokens do not fit max_model_len {max_model_len}; "
            "make them shorter or raise it"
        )


def _commit() -> str | None:
    """Of the checkout that this file lies in; None outside of one."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def check_options(options: argparse.Namespace) -> None:
    """Refuse workloads of nothing.

    Raises:
        ValueError: naming the flag.
    """
    for name in ("input_len", "output_len", "n", "batch_size", "num_iters", "num_prompts"):
        value = getattr(options, name, 1)
        if value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if getattr(options, "num_iters_warmup", 0) < 0:
        raise ValueError(f"--num-iters-warmup must not be negative, got {options.num_iters_warmup}")
    if not 0 <= getattr(options, "random_range_ratio", 0.0) < 1:
        raise ValueError(f"--random-range-ratio must be in [0, 1), got {options.random_range_ratio}")
