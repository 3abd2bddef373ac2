"""Engine clients, in process and over a process boundary: the same promises, and what happens when it dies."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest

from jaxllm.engine.client import EngineClient, InProcessClient, ProcessClient, ProcessOptions
from jaxllm.engine.protocol import EngineRequest, EngineStats, RequestDelta
from jaxllm.errors import EngineDeadError, RequestError
from jaxllm.sampling_params import SamplingParams
from jaxllm.testing import FakeEngine

FAST = ProcessOptions(
    heartbeat_interval=0.05, heartbeat_timeout=2.0, step_timeout=20.0, start_timeout=120.0, shutdown_timeout=1.0
)
MakeClient = Callable[..., Awaitable[EngineClient]]


def make_request(request_id: str = "r", max_tokens: int = 5, **sampling) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    return EngineRequest(request_id=request_id, prompt_tokens=[1, 2, 3], sampling=params, arrival_time=0.0)


async def collect(client: EngineClient, request: EngineRequest) -> list[RequestDelta]:
    return [delta async for delta in client.generate(request)]


async def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.fixture(params=["thread", "process"])
async def make_client(request: pytest.FixtureRequest) -> AsyncIterator[MakeClient]:
    clients: list[EngineClient] = []

    async def make(**fake) -> EngineClient:
        if request.param == "thread":
            client: EngineClient = InProcessClient(FakeEngine(**fake))
        else:
            client = await ProcessClient.start(partial(FakeEngine, **fake), FAST)
        clients.append(client)
        return client

    yield make
    for client in clients:
        await client.shutdown()


async def test_generates_until_every_sequence_has_finished(make_client: MakeClient):
    client = await make_client()
    assert client.model_info.max_model_len == 512
    deltas = await collect(client, make_request(max_tokens=4, n=3))
    for index in range(3):
        mine = [d for d in deltas if d.index == index]
        assert sum(len(d.tokens) for d in mine) == 4
        assert [d.finish_reason for d in mine] == [None, None, None, "length"]


async def test_sampling_parameters_and_logprobs_cross_the_border(make_client: MakeClient):
    client = await make_client()
    request = make_request(logprobs=2, prompt_logprobs=0, logit_bias={40: 100.0}, stop_token_ids=[40])
    (delta,) = await collect(client, request)
    assert (delta.tokens, delta.finish_reason, delta.stop_reason) == ([40], "stop", 40)
    assert delta.logprobs is not None and len(delta.logprobs[0].token_ids) == 3
    assert delta.prompt_logprobs is not None and delta.prompt_logprobs[0] is None


async def test_refused_request_fails_alone(make_client: MakeClient):
    client = await make_client(step_seconds=0.01)
    other = asyncio.create_task(collect(client, make_request("other", max_tokens=20)))
    big = EngineRequest(request_id="big", prompt_tokens=[1] * 600, sampling=SamplingParams(), arrival_time=0.0)
    with pytest.raises(RequestError) as caught:
        await client.submit(big)
    assert caught.value.param == "prompt"
    assert (await other)[-1].finish_reason == "length"


async def test_request_id_in_use_is_refused(make_client: MakeClient):
    client = await make_client(step_seconds=0.01)
    stream = await client.submit(make_request("same", max_tokens=100))
    with pytest.raises(RequestError, match="same"):
        await client.submit(make_request("same"))
    stream.close()


async def test_closing_early_aborts(make_client: MakeClient):
    client = await make_client(step_seconds=0.01)
    generation = client.generate(make_request(max_tokens=400, n=2))
    async for _ in generation:
        break
    await generation.aclose()  # type: ignore[attr-defined]
    await eventually(lambda: client.latest_stats.num_steps > 0 and client.latest_stats.num_running == 0)
    assert client.latest_stats.generation_tokens < 100


async def test_cancelled_reader_aborts(make_client: MakeClient):
    client = await make_client(step_seconds=0.01)
    tasks = [asyncio.create_task(collect(client, make_request(f"r{i}", max_tokens=400))) for i in range(8)]
    await eventually(lambda: client.latest_stats.num_running == 8)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await eventually(lambda: client.latest_stats.num_running == 0)


async def test_aborted_sequence_is_not_waited_for(make_client: MakeClient):
    client = await make_client(step_seconds=0.005)
    deltas = []
    async for delta in client.generate(make_request(max_tokens=50, n=2)):
        if delta.index == 1 and not any(d.index == 1 for d in deltas):
            client.abort_sequence("r", 1)
        deltas.append(delta)
    assert sum(d.index == 0 for d in deltas) == 50
    assert sum(d.index == 1 for d in deltas) < 10


async def test_stats_are_pushed_and_fresh_when_idle(make_client: MakeClient):
    client = await make_client()
    seen: list[EngineStats] = []
    client.subscribe_stats(seen.append)
    await collect(client, make_request(max_tokens=7))
    await eventually(lambda: client.latest_stats.generation_tokens == 7)
    assert seen[-1] == await client.stats()
    assert seen[-1].num_running == 0


async def test_reset_prefix_cache(make_client: MakeClient):
    client = await make_client()
    assert await client.reset_prefix_cache() is True


async def test_exception_in_a_step_kills_the_engine_and_every_request(make_client: MakeClient):
    client = await make_client(fail_at_step=3)
    results = await asyncio.gather(
        *(collect(client, make_request(f"r{i}", max_tokens=50)) for i in range(4)), return_exceptions=True
    )
    assert all(isinstance(r, EngineDeadError) and "told to fail" in str(r) for r in results), results
    assert not client.is_healthy
    with pytest.raises(EngineDeadError):
        await client.submit(make_request("late"))
    with pytest.raises(EngineDeadError):
        await client.check_health()


async def test_shutdown_ends_running_requests_and_may_be_repeated(make_client: MakeClient):
    client = await make_client(step_seconds=0.01)
    task = asyncio.create_task(collect(client, make_request(max_tokens=400)))
    await eventually(lambda: client.latest_stats.num_steps > 0)
    await client.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        await task
    await client.shutdown()


async def test_hung_step_in_process_is_noticed():
    client = InProcessClient(FakeEngine(step_seconds=1.0), step_timeout=0.1)
    with pytest.raises(EngineDeadError, match="hangs"):
        await collect(client, make_request())
    assert not client.is_healthy
    await client.shutdown()


async def start(fake: dict, **options) -> ProcessClient:
    merged = {name: getattr(FAST, name) for name in ProcessOptions.__dataclass_fields__} | options
    return await ProcessClient.start(partial(FakeEngine, **fake), ProcessOptions(**merged))


async def test_hung_step_is_noticed_and_the_process_is_ended():
    client = await start({"step_seconds": 600.0}, step_timeout=0.3)
    pid = client.pid
    assert pid is not None
    with pytest.raises(EngineDeadError, match="hangs: a step"):
        await collect(client, make_request())
    assert not client.is_healthy
    await client.shutdown()
    assert not is_running(pid)


async def test_silent_process_is_noticed():
    client = await start({}, heartbeat_timeout=0.5)
    assert client.pid is not None
    os.kill(client.pid, signal.SIGSTOP)
    with pytest.raises(EngineDeadError, match="no sign of life"):
        await collect(client, make_request())
    await client.shutdown()
    assert not is_running(client.pid)


async def test_killed_process_is_noticed():
    client = await start({"step_seconds": 0.01})
    task = asyncio.create_task(collect(client, make_request(max_tokens=400)))
    await eventually(lambda: client.latest_stats.num_steps > 0)
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="exit code -9"):
        await task
    assert not client.is_healthy
    await client.shutdown()


async def test_error_while_building_reaches_the_caller():
    with pytest.raises(EngineDeadError, match=r"could not start: TypeError.*no_such_knob") as caught:
        await start({"no_such_knob": 1})
    assert "Traceback" in str(caught.value)


async def test_process_that_dies_while_building_is_noticed():
    with pytest.raises(EngineDeadError, match="exit code 3 before it was ready"):
        await ProcessClient.start(partial(os._exit, 3), FAST)


async def test_engine_process_ends_with_its_parent(tmp_path: Path):
    """A front end killed outright once left an engine holding the device."""
    script = tmp_path / "front_end.py"
    script.write_text(
        "import asyncio\n"
        "from jaxllm.engine.client import ProcessClient\n"
        "from jaxllm.testing import FakeEngine\n"
        "async def main():\n"
        "    client = await ProcessClient.start(FakeEngine)\n"
        "    print(client.pid, client._folder, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "if __name__ == '__main__':\n"
        "    asyncio.run(main())\n"
    )
    root = Path(__file__).parents[2]
    parent = await asyncio.create_subprocess_exec(
        sys.executable, str(script), stdout=asyncio.subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(root)}
    )
    assert parent.stdout is not None
    number, folder = (await parent.stdout.readline()).decode().split()
    pid = int(number)
    assert is_running(pid) and Path(folder).exists()
    parent.kill()
    await parent.wait()
    await eventually(lambda: not is_running(pid))
    assert not Path(folder).exists()


def test_options_are_checked():
    with pytest.raises(ValueError, match="heartbeat_timeout"):
        ProcessOptions(heartbeat_interval=5, heartbeat_timeout=6)
    with pytest.raises(ValueError, match="step_timeout"):
        ProcessOptions(step_timeout=0)
