"""Throughput on a CPU beside transformers (torch), in alternation, on one model in float32.

    python benchmarks/cpu_vs_transformers.py MODEL.gguf [--rounds 3] [--threads 2] [--output FILE]

Needs accelerate besides the test extra, as transformers reads GGUF files with it.

Both get the same random token ids, decode greedily and ignore EOS. Each round runs every workload once with
each engine, ours first in even rounds and last in odd ones, so that a slow minute of the machine hits both.
Medians over the rounds are reported, and the ratio of each round's pair.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from jaxllm import LLM, SamplingParams

Workload = tuple[list[int], list[int]]  # lengths of prompts and outputs


def workloads(seed: int) -> dict[str, Workload]:
    random = np.random.default_rng(seed)
    ragged = (random.integers(16, 257, 32).tolist(), random.integers(16, 257, 32).tolist())
    return {
        "one request, 128 in / 128 out": ([128], [128]),
        "32 requests, 128 in / 128 out": ([128] * 32, [128] * 32),
        "32 requests, 16-256 in / 16-256 out": ragged,
        "32 requests, 128 in / 1 out (prefill)": ([128] * 32, [1] * 32),
    }


def run_ours(llm: LLM, prompts: list[list[int]], outputs: list[int]) -> float:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in outputs]
    start = time.perf_counter()
    results = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - start
    assert [len(r.outputs[0].token_ids) for r in results] == outputs
    return seconds


def run_transformers(model, prompts: list[list[int]], outputs: list[int]) -> float:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    start = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=max(outputs),
            min_new_tokens=max(outputs),
            pad_token_id=0,
        )
    seconds = time.perf_counter() - start
    assert out.shape[1] == width + max(outputs)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file or a folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="of torch; XLA takes all cores it may run on")
    parser.add_argument("--only", help="workloads whose name holds this")
    parser.add_argument("--ours-only", action="store_true", help="leave transformers out")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    llm = LLM(
        model=str(options.model), dtype="float32", max_model_len=1024, max_num_seqs=32, enable_prefix_caching=False
    )
    llm.wait_until_compiled()
    engines: dict[str, Callable[[list[list[int]], list[int]], float]] = {"jaxllm": lambda p, o: run_ours(llm, p, o)}
    if not options.ours_only:
        where = (options.model.parent, options.model.name) if options.model.is_file() else (options.model, None)
        model = AutoModelForCausalLM.from_pretrained(where[0], gguf_file=where[1], dtype=torch.float32).eval()
        engines["transformers"] = lambda p, o: run_transformers(model, p, o)

    work = {name: w for name, w in workloads(0).items() if not options.only or options.only in name}
    random = np.random.default_rng(1)
    seconds: dict[str, dict[str, list[float]]] = {name: {engine: [] for engine in engines} for name in work}
    for run in engines.values():  # warm up
        run([[1] * 32] * 32, [4] * 32)
    for round_ in range(options.rounds):
        for name, (lengths, outputs) in work.items():
            prompts = [random.integers(0, 32000, n).tolist() for n in lengths]
            for engine in sorted(engines, reverse=round_ % 2 == 1):
                seconds[name][engine].append(engines[engine](prompts, outputs))

    report: dict[str, dict[str, Any]] = {}
    for name, (lengths, outputs) in work.items():
        tokens = sum(lengths) if max(outputs) == 1 else sum(outputs)
        medians = {engine: statistics.median(runs) for engine, runs in seconds[name].items()}
        figures: dict[str, Any] = {engine: round(tokens / median, 2) for engine, median in medians.items()}
        if "transformers" in engines:
            pairs = zip(seconds[name]["transformers"], seconds[name]["jaxllm"], strict=True)
            figures["ratios"] = [round(theirs / ours, 2) for theirs, ours in pairs]
        report[name] = figures
        print(f"{name:40}", "  ".join(f"{k} {v}" for k, v in figures.items()), flush=True)
    if options.output:
        versions = {p: version(p) for p in ("jaxllm", "jax", "torch", "transformers")}
        date = datetime.now(UTC).isoformat(timespec="seconds")
        table = {"date": date, "versions": versions, "threads": options.threads, "tokens_per_s": report}
        options.output.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
