"""Prometheus metrics under vLLM's names, in a registry of the application's own.

What the engine counts (queues, cache) is read from its last snapshot when somebody scrapes. What a client
feels (latencies, tokens, finishes) is measured where the answer is made.
"""

import time
from collections.abc import Iterable, Iterator
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, GCCollector, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from jaxllm.engine.client import EngineClient
from jaxllm.engine.protocol import EngineRequest, EngineStats, RequestDelta

_LABELS = ("model_name", "engine")
_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
    *(80.0, 160.0, 640.0, 2560.0),
)
_PER_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
    *(960.0, 1920.0, 7680.0),
)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

Outcome = Literal["stop", "length", "abort", "error", "repetition"]
_OUTCOMES: tuple[Outcome, ...] = ("stop", "length", "abort", "error", "repetition")


def one_two_five(limit: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `limit`."""
    steps: list[int] = []
    power = 1
    while power <= limit:
        steps.extend(power * digit for digit in (1, 2, 5) if power * digit <= limit)
        power *= 10
    return tuple(steps)


class ServerMetrics:
    """All metrics of one application.

    Args:
        client: whose snapshots are shown.
        model_name: label of every sample.
        show_legacy: also expose names that vLLM has dropped or renamed.
    """

    def __init__(self, client: EngineClient, model_name: str, show_legacy: bool = False):
        self.registry = CollectorRegistry()
        self._labels = (model_name, "0")
        info = client.model_info
        lengths = one_two_five(info.max_model_len)
        self.time_to_first_token = self._histogram("time_to_first_token_seconds", "From arrival to token 1.", _TTFT)
        self._between_tokens = [
            self._histogram("inter_token_latency_seconds", "Between two tokens of a sequence.", _PER_TOKEN)
        ]
        if show_legacy:
            self._between_tokens.append(
                self._histogram("time_per_output_token_seconds", "Old name of inter_token_latency.", _PER_TOKEN)
            )
        self._time_per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time between a request's tokens.", _PER_TOKEN
        )
        self._latency = self._histogram("e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST)
        self._queue_time = self._histogram("request_queue_time_seconds", "Waiting for the first step.", _REQUEST)
        self._prefill_time = self._histogram("request_prefill_time_seconds", "First step to token 1.", _REQUEST)
        self._decode_time = self._histogram("request_decode_time_seconds", "First to last token.", _REQUEST)
        self._inference_time = self._histogram("request_inference_time_seconds", "First step to end.", _REQUEST)
        self._prompt_length = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", lengths)
        self._output_length = self._histogram("request_generation_tokens", "Output tokens of a request.", lengths)
        self._longest_output = self._histogram(
            "request_max_num_generation_tokens", "Output tokens of a request's longest sequence.", lengths
        )
        self._param_n = self._histogram("request_params_n", "The parameter n.", (1, 2, 5, 10, 20))
        self._param_max_tokens = self._histogram("request_params_max_tokens", "The parameter max_tokens.", lengths)
        self._step_tokens = self._histogram(
            "iteration_tokens_total", "Tokens of a step (mean of the steps between two snapshots).", _STEP_TOKENS
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that got a first token.")
        self._cached_tokens = self._counter("prompt_tokens_cached", "Prompt tokens taken from the prefix cache.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        success = Counter(
            "vllm:request_success",
            "Sequences ended, by reason.",
            (*_LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._finished = {outcome: success.labels(*self._labels, outcome) for outcome in _OUTCOMES}
        self._last_stats = client.latest_stats
        client.subscribe_stats(self._on_stats)
        self.registry.register(_EngineCollector(client, self._labels, show_legacy))
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        family = Histogram(f"vllm:{name}", text, _LABELS, buckets=tuple(buckets), registry=self.registry)
        return family.labels(*self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"vllm:{name}", text, _LABELS, registry=self.registry).labels(*self._labels)

    def _on_stats(self, stats: EngineStats) -> None:
        before, self._last_stats = self._last_stats, stats
        num_steps = stats.num_steps - before.num_steps
        num_tokens = (stats.prompt_tokens - before.prompt_tokens) + (stats.generation_tokens - before.generation_tokens)
        for _ in range(num_steps):
            self._step_tokens.observe(num_tokens / num_steps)


class RequestMeter:
    """Measures one engine request; call `add` for every delta and `end` once, whatever happens.

    Args:
        metrics: where the figures go.
        request: what was sent.
        num_hidden_tokens: tokens of each sequence that the caller never sees and so are not counted.
    """

    def __init__(self, metrics: ServerMetrics, request: EngineRequest, num_hidden_tokens: int = 0):
        self._metrics = metrics
        self._request = request
        self._num_hidden = num_hidden_tokens
        self._arrival = time.monotonic() - max(0.0, time.time() - request.arrival_time)
        self._last_times: dict[int, float] = {}
        self._num_tokens = [0] * request.sampling.n
        self._first_delta: RequestDelta | None = None

    def add(self, delta: RequestDelta) -> None:
        """Count the tokens of a delta and the time since the sequence's last one."""
        count = len(delta.tokens)
        if not count:
            return
        metrics, before = self._metrics, self._last_times.get(delta.index)
        if self._first_delta is None:
            self._first_delta = delta
            metrics.time_to_first_token.observe(time.monotonic() - self._arrival)
            metrics._prompt_tokens.inc(len(self._request.prompt_tokens))
            metrics._cached_tokens.inc(delta.num_cached_tokens)
        if before is not None:
            seconds = (delta.last_token_time - before) / count
            for histogram in metrics._between_tokens:
                for _ in range(count):
                    histogram.observe(seconds)
        self._last_times[delta.index] = delta.last_token_time
        self._num_tokens[delta.index] += count
        metrics._generation_tokens.inc(max(0, count - self._num_hidden))

    def end(self, outcomes: Iterable[Outcome]) -> None:
        """The request is over; one outcome per sequence."""
        metrics, sampling = self._metrics, self._request.sampling
        for outcome in outcomes:
            metrics._finished[outcome].inc()
        metrics._param_n.observe(sampling.n)
        if sampling.max_tokens is not None:
            metrics._param_max_tokens.observe(sampling.max_tokens)
        metrics._latency.observe(time.monotonic() - self._arrival)
        metrics._prompt_length.observe(len(self._request.prompt_tokens))
        metrics._output_length.observe(sum(self._num_tokens))
        metrics._longest_output.observe(max(self._num_tokens))
        if self._first_delta is not None:
            self._observe_phases(self._first_delta)

    def _observe_phases(self, delta: RequestDelta) -> None:
        metrics = self._metrics
        end = max(self._last_times.values())
        metrics._queue_time.observe(delta.scheduled_time - delta.queued_time)
        metrics._prefill_time.observe(delta.first_token_time - delta.scheduled_time)
        metrics._decode_time.observe(end - delta.first_token_time)
        metrics._inference_time.observe(end - delta.scheduled_time)
        longest = max(self._num_tokens)
        if longest > 1:
            metrics._time_per_token.observe((end - delta.first_token_time) / (longest - 1))


class _EngineCollector(Collector):
    """Reads the engine's last snapshot at scrape time: no round trip, nothing to keep in step."""

    def __init__(self, client: EngineClient, labels: tuple[str, str], show_legacy: bool):
        self._client = client
        self._labels = labels
        self._show_legacy = show_legacy

    def collect(self) -> Iterator[Metric]:
        """The families, with one sample each."""
        stats = self._client.latest_stats
        gauges = {
            "num_requests_running": ("Sequences in the running batch.", stats.num_running),
            "num_requests_waiting": ("Sequences waiting to run.", stats.num_waiting),
            "kv_cache_usage_perc": ("KV pages in use, 0 to 1.", stats.kv_cache_usage),
        }
        if self._show_legacy:
            gauges["num_requests_swapped"] = ("Sequences swapped to host memory.", stats.num_swapped)
            gauges["gpu_cache_usage_perc"] = ("Old name of kv_cache_usage_perc.", stats.kv_cache_usage)
            gauges["cpu_cache_usage_perc"] = ("Swap space in use, 0 to 1.", stats.swap_usage)
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=_LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        counters = {
            "vllm:num_preemptions": ("Sequences preempted.", stats.num_preemptions),
            "vllm:prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", stats.prefix_cache_queries),
            "vllm:prefix_cache_hits": ("Prompt tokens found in the prefix cache.", stats.prefix_cache_hits),
            "jaxllm:steps": ("Steps of the engine.", stats.num_steps),
            "jaxllm:launches": ("Programs launched on the device.", stats.num_launches),
            "jaxllm:unexpected_compiles": ("Compilations after warm-up.", stats.num_unexpected_compiles),
        }
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(name, text, labels=_LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        yield self._cache_config()

    def _cache_config(self) -> Metric:
        info = self._client.model_info
        facts = {
            "block_size": str(info.page_size),
            "num_gpu_blocks": str(info.kv_capacity_tokens // info.page_size),
            "max_model_len": str(info.max_model_len),
        }
        gauge = GaugeMetricFamily("vllm:cache_config_info", "The KV cache's shape.", labels=(*_LABELS, *facts))
        gauge.add_metric((*self._labels, *facts.values()), 1)
        return gauge
