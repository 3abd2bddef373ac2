"""Health, models, metrics, keys and cross-origin rules."""

import subprocess
import sys
from pathlib import Path

import pytest

from server.settings import CorsSettings, ServerSettings


async def test_health_version_load_ping(serve):
    served = serve()
    health = await served.http.get("/health")
    assert (health.status_code, health.text) == (200, "")
    assert (await served.http.get("/ping")).status_code == 200
    assert (await served.http.post("/ping")).status_code == 200
    assert (await served.http.get("/load")).json() == {"server_load": 0}
    assert set((await served.http.get("/version")).json()) == {"version"}


async def test_models(serve):
    served = serve({"served_model_names": ("org/name", "short"), "model_path": "folder"})
    listed = (await served.http.get("/v1/models")).json()
    assert listed["object"] == "list" and [m["id"] for m in listed["data"]] == ["org/name", "short"]
    card = listed["data"][0]
    assert (card["object"], card["root"], card["max_model_len"]) == ("model", "folder", 512)
    assert card["permission"][0]["object"] == "model_permission"
    assert (await served.http.get("/v1/models/org/name")).json() == card


async def test_openapi_describes_the_bodies(serve):
    schema = (await serve().http.get("/openapi.json")).json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics"} <= schema["paths"].keys()
    body = schema["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    name = body["$ref"].removeprefix("#/components/schemas/")
    assert "prompt" in schema["components"]["schemas"][name]["properties"]


NAMES = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "num_preemptions_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "cache_config_info",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "e2e_request_latency_seconds_bucket",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
    "request_queue_time_seconds_bucket",
    "request_prefill_time_seconds_bucket",
    "request_decode_time_seconds_bucket",
    "request_inference_time_seconds_bucket",
    "iteration_tokens_total_bucket",
    "request_params_n_bucket",
    "request_params_max_tokens_bucket",
]


async def test_metric_names_and_labels(serve):
    served = serve()
    text = (await served.http.get("/metrics")).text
    for name in NAMES:
        lines = [line for line in text.splitlines() if line.startswith(f"vllm:{name}{{")]
        assert lines, name
        assert all('model_name="fake"' in line and 'engine="0"' in line for line in lines)
    assert "# TYPE vllm:num_requests_running gauge" in text
    assert "# TYPE vllm:prompt_tokens_total counter" in text
    assert "# TYPE vllm:time_to_first_token_seconds histogram" in text
    assert "gpu_cache_usage_perc" not in text
    legacy = (await serve({"show_legacy_metrics": True}).http.get("/metrics")).text
    for name in ("num_requests_swapped", "gpu_cache_usage_perc", "cpu_cache_usage_perc"):
        assert f"vllm:{name}{{" in legacy
    assert "vllm:time_per_output_token_seconds_bucket" in legacy


@pytest.mark.parametrize("stream", [False, True])
async def test_counters_move_by_what_was_served(serve, stream):
    served = serve()
    await served.completion(max_tokens=6, stream=stream)
    assert await served.metric("vllm:prompt_tokens_total") == 5
    assert await served.metric("vllm:generation_tokens_total") == 6
    assert await served.metric("vllm:request_success_total", finished_reason="length") == 1
    assert await served.metric("vllm:request_success_total", finished_reason="stop") == 0
    assert await served.metric("vllm:time_to_first_token_seconds_count") == 1
    assert await served.metric("vllm:inter_token_latency_seconds_count") == 5
    assert await served.metric("vllm:e2e_request_latency_seconds_count") == 1
    assert await served.metric("vllm:request_generation_tokens_sum") == 6
    assert await served.metric("vllm:request_queue_time_seconds_count") == 1


async def test_stop_string_counts_as_stop(serve):
    served = serve(script=lambda request, index: list(b"ab stop cd"))
    await served.completion(stop="stop")
    assert await served.metric("vllm:request_success_total", finished_reason="stop") == 1


async def test_gauges_follow_the_engine(serve):
    served = serve()
    stats = served.client.latest_stats
    stats.num_running, stats.num_waiting, stats.kv_cache_usage, stats.num_preemptions = 3, 2, 0.5, 7
    assert await served.metric("vllm:num_requests_running") == 3
    assert await served.metric("vllm:num_requests_waiting") == 2
    assert await served.metric("vllm:kv_cache_usage_perc") == 0.5
    assert await served.metric("vllm:num_preemptions_total") == 7


async def test_steps_are_observed(serve):
    served = serve()
    await served.completion(max_tokens=6)
    await served.eventually(lambda: served.client.latest_stats.num_steps == 6)
    assert await served.metric("vllm:iteration_tokens_total_count") == 6
    assert await served.metric("vllm:iteration_tokens_total_sum") == pytest.approx(11)


async def test_applications_share_no_metrics(serve):
    first, second = serve(), serve()
    await first.completion(max_tokens=2)
    assert await second.metric("vllm:generation_tokens_total") == 0


async def test_http_requests_are_counted_by_route(serve):
    served = serve()
    await served.completion(max_tokens=1)
    await served.completion(max_tokens=-1)
    await served.http.get("/made/up/path")
    labels = {"handler": "/v1/completions", "method": "POST"}
    assert await served.metric("http_requests_total", **labels, status="2xx") == 1
    assert await served.metric("http_requests_total", **labels, status="4xx") == 1
    assert await served.metric("http_request_duration_seconds_count", **labels) == 2
    assert await served.metric("http_requests_total", handler="none", status="4xx") == 1
    assert "made/up" not in (await served.http.get("/metrics")).text


KEYS = {"api_keys": ("sk-one", "sk-two")}
BODY = {"prompt": "x", "max_tokens": 1}


@pytest.mark.parametrize("key", ["sk-one", "sk-two"])
async def test_each_key_opens(serve, key):
    headers = {"Authorization": f"Bearer {key}"}
    response = await serve(KEYS).post("/v1/completions", BODY, headers=headers)
    assert response.status_code == 200


@pytest.mark.parametrize(
    "value", [None, "Bearer sk-wrong", "Bearer ", "Basic sk-one", "sk-one", "Bearer sk-one sk-two", "Bearer sk-on"]
)
async def test_wrong_key_is_refused(serve, value):
    headers = {} if value is None else {"Authorization": value}
    served = serve(KEYS)
    response = await served.post("/v1/completions", BODY, headers=headers)
    assert (response.status_code, response.json()) == (401, {"error": "Unauthorized"})
    assert not served.engine.requests


@pytest.mark.parametrize("path", ["/v1/models", "/load", "/tokenize", "/v1/messages", "/nope", "/v1/", "//health"])
async def test_everything_else_needs_a_key(serve, path):
    assert (await serve(KEYS).http.get(path)).status_code == 401


@pytest.mark.parametrize("path", ["/health", "/ping", "/version", "/metrics", "/docs", "/openapi.json"])
async def test_open_paths(serve, path):
    assert (await serve(KEYS).http.get(path)).status_code == 200


async def test_preflight_needs_no_key(serve):
    headers = {"Origin": "http://example.com", "Access-Control-Request-Method": "POST"}
    response = await serve(KEYS).http.options("/v1/chat/completions", headers=headers)
    assert response.status_code == 400  # no foreign origin is allowed
    assert "access-control-allow-origin" not in response.headers


async def test_allowed_origin(serve):
    served = serve(KEYS | {"cors": CorsSettings(allowed_origins=("http://example.com",))})
    headers = {"Origin": "http://example.com", "Access-Control-Request-Method": "POST"}
    response = await served.http.options("/v1/chat/completions", headers=headers)
    assert response.headers["access-control-allow-origin"] == "http://example.com"
    # A page may read why it was refused.
    response = await served.http.get("/v1/models", headers={"Origin": "http://example.com"})
    assert response.status_code == 401
    assert response.headers["access-control-allow-origin"] == "http://example.com"


def test_front_end_does_not_import_jax():
    """The engine process owns the device; a front end that imports jax would take a part of it."""
    script = "import sys, server.app; sys.exit('jax' in sys.modules)"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", script], cwd=root, check=False).returncode == 0


async def test_settings_are_checked():
    with pytest.raises(ValueError, match="api_keys"):
        ServerSettings(served_model_names=("m",), api_keys=("",))
    with pytest.raises(ValueError, match="served_model_names"):
        ServerSettings(served_model_names=())
    assert "sk-one" not in repr(ServerSettings(served_model_names=("m",), api_keys=("sk-one",)))
