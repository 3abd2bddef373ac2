"""Run a server: find the model, start the engine process, serve HTTP until a signal, stop in order."""

import asyncio
import contextlib
import dataclasses
import logging
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from converters import ModelSource
from converters.default_model import fetch_default_model
from jaxllm.engine.client import ProcessClient
from jaxllm.engine_args import EngineArgs
from jaxllm.errors import EngineDeadError
from jaxllm.text_side import TextSide, build_text_side, find_model
from server.cli_server import ServeOptions
from server.engine_start import build_logged_engine
from server.listen import ExampleKind, log_address
from server.serve_log import RequestLoggingClient, log_stats

if TYPE_CHECKING:
    from jaxllm.engine.engine import Engine

logger = logging.getLogger(__name__)

# What is left of a request after its engine has gone: sending the error to its client.
_LAST_WORDS_SECONDS = 5
_WATCH_SECONDS = 0.5
_DRAIN_SECONDS = 0.1
_SPAWN_SECONDS = 0.01
_KILL_SECONDS = 1.0
_KILLED = 130


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: they end the process with the signal's own status."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(args: EngineArgs, options: ServeOptions, listener: socket.socket, level: str) -> int:
    """Serve until SIGINT or SIGTERM; a second one ends everything at once.

    Args:
        args: the engine's; an empty model is the default one.
        options: of HTTP.
        listener: bound to the server's address, not yet listening.
        level: of the log, for the engine process.

    Returns:
        The exit status: 0 after a signal, 130 after two, 1 when the engine could not start or died.

    Raises:
        ValueError: arguments that cannot work; a CheckpointError if it is the model.
    """
    # Before anything takes long: the file may be missing.
    from jaxllm.text.chat_template import load_chat_template

    template = load_chat_template(args.chat_template)
    if not args.model:
        args = dataclasses.replace(args, model=str(fetch_default_model(logger.info)))
    source = find_model(args)
    serving = _Serving(args, options, listener, template)
    build = partial(build_logged_engine, args, source, level)
    make_loop = uvicorn.Config("", log_config=None).get_loop_factory()
    with asyncio.Runner(loop_factory=make_loop) as runner:
        return runner.run(serving.run(build, partial(_load_text, args, source)))


def _load_text(args: EngineArgs, source: ModelSource) -> TextSide:
    """The tokenizer, and everything of the front end that is slow to import, while the engine starts."""
    import server.app  # noqa: F401 (the import is what takes long)

    return build_text_side(args, source)


class _Serving:
    """One run of the server, from the spawning of its engine to the end of it."""

    def __init__(self, args: EngineArgs, options: ServeOptions, listener: socket.socket, template: str | None):
        self._args = args
        self._options = options
        self._listener = listener
        self._template = template
        self._stop = asyncio.Event()
        self._is_killed = False
        self._kind: ExampleKind = "tokens"

    async def run(self, build: "Callable[[], Engine]", load_text: Callable[[], TextSide]) -> int:
        """Start, serve, stop; the exit status."""
        starting = asyncio.create_task(self._start(build, load_text))
        await self._take_signals(starting)
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            logger.info("stopping before the engine was ready")
            starting.cancel()
        try:
            client, text = await starting
        except asyncio.CancelledError:
            return 0
        except EngineDeadError as error:
            _explain_failed_start(error)
            return 1
        try:
            status = await self._serve(client, self._make_app(client, text), stopping)
            return _KILLED if self._is_killed else status
        finally:
            stopping.cancel()
            await client.shutdown()

    async def _take_signals(self, starting: asyncio.Task) -> None:
        """The first signal stops, the second kills.

        SIGINT is ignored while the engine process is spawned, as a Ctrl-C reaches it, too, and would find
        an interpreter that does not handle it yet; what is ignored stays so in the new process.
        """
        loop = asyncio.get_running_loop()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        loop.add_signal_handler(signal.SIGTERM, self._on_signal)
        while not multiprocessing.active_children() and not starting.done():
            await asyncio.sleep(_SPAWN_SECONDS)
        loop.add_signal_handler(signal.SIGINT, self._on_signal)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            logger.warning("killed by a second signal")
            self._is_killed = True
            for child in multiprocessing.active_children():
                child.kill()
            # Without its engine the server ends by itself, and cleans up; unless it cannot.
            asyncio.get_running_loop().call_later(_KILL_SECONDS, os._exit, _KILLED)
        self._stop.set()

    async def _start(
        self, build: "Callable[[], Engine]", load_text: Callable[[], TextSide]
    ) -> tuple[ProcessClient, TextSide]:
        """The engine in its process and, meanwhile, the tokenizer in this one."""
        client_class = RequestLoggingClient if self._options.log_requests else ProcessClient
        engine = asyncio.create_task(client_class.start(build))
        try:
            text = await asyncio.to_thread(load_text)
            return await engine, text
        except BaseException:
            engine.cancel()
            await asyncio.gather(engine, return_exceptions=True)
            raise

    def _make_app(self, client: ProcessClient, text: TextSide) -> FastAPI:
        from jaxllm.text.chat_template import ChatTemplate
        from jaxllm.text.input_processor import InputProcessor
        from server.app import create_app

        chat = None
        if text.tokenizer is not None:
            chat = ChatTemplate(text.tokenizer, self._template, self._options.chat_template_content_format)
            self._kind = "chat"
            if self._template is None and text.tokenizer.hf.chat_template is None:
                self._kind = "text"
                logger.warning("the model has no chat template: /v1/chat/completions needs --chat-template")
        inputs = InputProcessor(
            text.tokenizer,
            client.model_info,
            generation_config=text.generation_config,
            eos_token_ids=text.eos_token_ids,
        )
        if inputs.default_sampling_params:
            logger.info("sampling defaults of the model: %s", inputs.default_sampling_params)
        return create_app(client, inputs, chat, self._options.settings)

    async def _serve(self, client: ProcessClient, app: FastAPI, stopping: asyncio.Task) -> int:
        options = self._options
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level=options.uvicorn_log_level,
            access_log=options.access_log,
            timeout_graceful_shutdown=options.shutdown_timeout + _LAST_WORDS_SECONDS,
            ssl_keyfile=options.ssl_keyfile,
            ssl_certfile=options.ssl_certfile,
            ssl_ca_certs=options.ssl_ca_certs,
            ssl_cert_reqs=options.ssl_cert_reqs,
            ssl_ciphers=options.ssl_ciphers or "TLSv1",
        )
        server = _HttpServer(config)
        http = asyncio.create_task(server.serve(sockets=[self._listener]))
        watching = asyncio.create_task(_until_dead(client))
        stats = None if self._args.disable_log_stats else asyncio.create_task(log_stats(client))
        while not server.started and not http.done():
            await asyncio.sleep(_SPAWN_SECONDS)
        if not http.done():
            log_address(options, self._listener, kind=self._kind)
        await asyncio.wait({http, stopping, watching}, return_when=asyncio.FIRST_COMPLETED)
        died = not client.is_healthy
        logger.info("stopping: the engine is gone" if died else "stopping")
        server.should_exit = True
        if not died:
            await self._drain(app)
        for task in (watching, stats):
            if task is not None:
                task.cancel()
        # Ends what still runs with an error to its client, so that uvicorn has nobody to wait for.
        await client.shutdown()
        await http
        return int(died)

    async def _drain(self, app: FastAPI) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._options.shutdown_timeout):
                while app.state.server.num_requests:
                    await asyncio.sleep(_DRAIN_SECONDS)
                return
        if left := app.state.server.num_requests:
            logger.info("aborting %d running requests", left)


async def _until_dead(client: ProcessClient) -> None:
    while client.is_healthy:
        await asyncio.sleep(_WATCH_SECONDS)


def _explain_failed_start(error: EngineDeadError) -> None:
    """The engine's own error without its traceback, which is for DEBUG."""
    message, _, trace = str(error).partition("\nTraceback ")
    for plain in ("ValueError: ", "CheckpointError: "):
        message = message.replace(f"the engine could not start: {plain}", "the engine could not start: ")
    lines = [line for line in message.splitlines() if line.strip()][:2]
    logger.error("%s", "\n".join(lines))
    if trace:
        logger.debug("Traceback %s", trace)
