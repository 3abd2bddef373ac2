"""Running prompts on the engine for a route: submit, follow, stop, measure."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence

from jaxllm.engine.request_streams import RequestStream
from jaxllm.errors import EngineDeadError
from jaxllm.outputs import PositionLogprobs, RequestOutput
from jaxllm.sampling_params import RequestOutputKind
from jaxllm.text.input_processor import PreparedRequest
from jaxllm.text.output_processor import OutputProcessor
from server.metrics import Outcome, RequestMeter
from server.openai.errors import ApiError
from server.state import ServerState


class Generation:
    """One prompt being continued. `submit` it, iterate over `outputs`, and always `close` it.

    Args:
        state: of the application.
        prepared: what to run.
        is_stream: outputs hold what is new; else there is one, at the end.
        is_prompt_only: the one token of each sequence exists only to have the prompt computed, and counts
            for nothing (echo with max_tokens 0).

    Attributes:
        prompt_logprobs: of the prompt's tokens, once the first output has come; None unless asked for.
    """

    def __init__(self, state: ServerState, prepared: PreparedRequest, *, is_stream: bool, is_prompt_only: bool = False):
        self.prepared = prepared
        self.prompt_tokens = prepared.engine_request.prompt_tokens
        self.prompt_logprobs: list[PositionLogprobs | None] | None = None
        self.is_prompt_only = is_prompt_only
        self._state = state
        kind = RequestOutputKind.DELTA if is_stream else RequestOutputKind.FINAL_ONLY
        self._processor = OutputProcessor(
            prepared, state.input_processor.tokenizer, output_kind=kind, with_metrics=False
        )
        self._meter = RequestMeter(state.metrics, prepared.engine_request, int(is_prompt_only))
        self._outcomes: list[Outcome] = ["abort"] * prepared.engine_request.sampling.n
        self._stream: RequestStream | None = None

    @property
    def num_completion_tokens(self) -> int:
        """Tokens generated so far that count."""
        return 0 if self.is_prompt_only else self._processor.num_output_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose KV came from the prefix cache."""
        return self._processor.num_cached_tokens

    async def submit(self) -> None:
        """Hand the request to the engine and wait until it is taken.

        Raises:
            RequestError: the engine refused it.
            EngineDeadError: there is no engine.
        """
        self._stream = await self._state.client.submit(self.prepared.engine_request)
        self._state.num_requests += 1

    async def outputs(self) -> AsyncIterator[RequestOutput]:
        """Outputs as they come, until every sequence has ended.

        Raises:
            ApiError: the engine died, or gave up on a sequence.
        """
        assert self._stream is not None, "submit() first"
        request_id = self.prepared.engine_request.request_id
        try:
            async for delta in self._stream:
                self._meter.add(delta)
                output = self._processor.add(delta)
                if delta.finish_reason is not None:
                    self._outcomes[delta.index] = delta.finish_reason
                for index in self._processor.take_aborts():
                    self._outcomes[index] = "stop"
                    self._state.client.abort_sequence(request_id, index)
                if delta.finish_reason == "error":
                    raise ApiError(500, delta.error or "Generation failed", "InternalServerError")
                if output is not None:
                    self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
                    yield output
        except EngineDeadError as error:
            raise ApiError(500, f"The engine stopped: {error}", "InternalServerError") from error

    def close(self) -> None:
        """Stop listening; what still runs is aborted. May be called twice."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
            self._state.num_requests -= 1
            self._meter.end(self._outcomes)


async def submit_all(generations: Sequence[Generation]) -> None:
    """Submit every generation, or none: when one is refused or the caller gives up, all are closed."""
    try:
        results = await asyncio.gather(*(g.submit() for g in generations), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
    except BaseException:
        close_all(generations)
        raise


def close_all(generations: Iterable[Generation]) -> None:
    """Close every generation."""
    for generation in generations:
        generation.close()


async def collect(generations: Sequence[Generation]) -> list[RequestOutput]:
    """The final output of each generation, in order."""

    async def last(generation: Generation) -> RequestOutput:
        final: RequestOutput | None = None
        async for output in generation.outputs():
            final = output
        if final is None:
            raise ApiError(500, "Generation ended without an output", "InternalServerError")
        return final

    tasks = [asyncio.create_task(last(g)) for g in generations]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def merge(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """Outputs of all generations as they come, with the generation's position."""
    if len(generations) == 1:
        async for output in generations[0].outputs():
            yield 0, output
        return
    arrived: asyncio.Queue[tuple[int, RequestOutput | None, Exception | None]] = asyncio.Queue()

    async def follow(position: int, generation: Generation) -> None:
        error: Exception | None = None
        try:
            async for output in generation.outputs():
                arrived.put_nowait((position, output, None))
        except Exception as raised:
            error = raised
        arrived.put_nowait((position, None, error))

    tasks = [asyncio.create_task(follow(i, g)) for i, g in enumerate(generations)]
    try:
        num_open = len(tasks)
        while num_open:
            position, output, error = await arrived.get()
            if error is not None:
                raise error
            if output is None:
                num_open -= 1
            else:
                yield position, output
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
