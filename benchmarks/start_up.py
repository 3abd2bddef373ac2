"""Start-up of the server: seconds to health and to the first token, and the memory of its processes.

    python benchmarks/start_up.py MODEL [--runs 3] [--settle 60] [--output FILE]

The compile cache is a fresh folder: the first run is the cold start, the others find its programs. After the first
run the server is left alone for --settle seconds, so that the finer programs are compiled and kept.
Memory is the sum over the server's processes of what belongs to each (Linux: PSS at the end, peak RSS).
"""

import argparse
import json
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--settle", type=float, default=60.0)
    parser.add_argument("--output", type=Path)
    parser.add_argument("rest", nargs="*", help="flags of jaxllm serve, after --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        runs = []
        for number in range(args.runs):
            settle = args.settle if number == 0 else 2.0
            run = measure(args.model, ["--compile-cache-dir", cache, *args.rest], settle)
            print(("cold: " if number == 0 else "warm: ") + json.dumps(run), flush=True)
            runs.append(run)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    report = {
        "model": Path(args.model).name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(),
        "versions": {name: version(name) for name in ("jax", "jaxlib", "transformers")},
        "cpus": psutil.cpu_count(),
        "cold": runs[0],
        "warm_first_token_s": [run["first_token_s"] for run in runs[1:]],
        "warm_median_s": statistics.median(run["first_token_s"] for run in runs[1:]) if runs[1:] else None,
        "warm": runs[1:],
    }
    if args.output:
        args.output.write_text(json.dumps(report, indent=2) + "\n")


def measure(model: str, flags: list[str], settle: float) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "server.cli", "serve", model, "--host", "127.0.0.1", "--port", str(port), *flags]
    start = time.monotonic()
    with tempfile.TemporaryFile() as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        while not _answers(url):
            if server.poll() is not None:
                log.seek(0)
                raise SystemExit(f"the server ended with {server.returncode}:\n{log.read().decode()}")
            time.sleep(0.02)
        health = time.monotonic() - start
        name = json.load(urllib.request.urlopen(f"{url}/v1/models"))["data"][0]["id"]
        body = {"model": name, "prompt": "The capital of France is", "max_tokens": 1, "temperature": 0}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        text = json.load(urllib.request.urlopen(request))["choices"][0]["text"]
        first = time.monotonic() - start
        time.sleep(settle)
        family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        peaks = [_peak_bytes(process.pid) for process in family]
        shared = sum(process.memory_full_info().pss for process in family)
        server.send_signal(signal.SIGTERM)
        status = server.wait()
    return {
        "health_s": round(health, 2),
        "first_token_s": round(first, 2),
        "text": text,
        "peak_rss_gb": [round(peak / 1e9, 3) for peak in peaks],
        "peak_rss_sum_gb": round(sum(peaks) / 1e9, 3),
        "pss_sum_gb": round(shared / 1e9, 3),
        "exit_status": status,
    }


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=1):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _peak_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    main()
