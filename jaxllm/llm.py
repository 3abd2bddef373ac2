"""LLM: a model for use from Python, without a server.

    llm = LLM("path-or-name")
    for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=20)):
        print(output.outputs[0].text)

The engine runs in this process; one call of `generate` or `chat` at a time has it.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from jaxllm.engine.protocol import EngineRequest, EngineStats, ModelInfo, RequestDelta
from jaxllm.errors import RequestError
from jaxllm.outputs import RequestOutput
from jaxllm.progress import StartProgress, is_interactive, tqdm
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.text.chat_template import ChatTemplate, ContentFormat, Message, load_chat_template
from jaxllm.text.input_processor import InputProcessor, PreparedRequest, Prompt
from jaxllm.text.output_processor import OutputProcessor
from jaxllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "quantization": (None,),
    "kv_cache_dtype": ("auto",),
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "distributed_executor_backend": (None, "uni"),
    "speculative_config": (None,),
    "enable_lora": (False, None),
    "cpu_offload_gb": (0,),
    "runner": ("auto", "generate"),
    "convert": ("auto", "none"),
    "task": (None, "auto", "generate"),
    "hf_overrides": (None, {}),
    "limit_mm_per_prompt": (None, {}),
    "mm_processor_kwargs": (None, {}),
    "allowed_local_media_path": ("", None),
    "pooler_config": (None,),
    "logits_processors": (None, []),
    "structured_outputs_config": (None, {}),
    "compilation_config": (None, {}),
    "skip_tokenizer_init": (False,),
    "enable_chunked_prefill": (True, None),
}
"""Arguments of vLLM for what is not supported -> the values that ask for nothing."""
_PROGRESS_SECONDS = 0.5
"""How often the progress bar shows new rates while no request finishes."""
_LOGGED_PROGRESS_SECONDS = 10.0


class SyncEngine(Protocol):
    """What LLM needs of an engine; jaxllm.engine.engine.Engine is one."""

    model_info: ModelInfo

    def add_request(self, request: EngineRequest) -> None: ...
    def abort(self, request_id: str, index: int | None = None) -> None: ...
    def step(self) -> list[RequestDelta]: ...
    def has_work(self) -> bool: ...
    def stats(self) -> EngineStats: ...
    def reset_prefix_cache(self) -> bool: ...
    def wait_until_compiled(self) -> None: ...
    def shutdown(self) -> None: ...


class LLM:
    """A model with its tokenizer and an engine in this process.

    Args:
        model: a model's name on the hub, a folder, or a GGUF file.
        engine_args: the fields of jaxllm.engine_args.EngineArgs, under vLLM's names: tokenizer, dtype,
            max_model_len, tensor_parallel_size, gpu_memory_utilization, seed, enforce_eager, ... An unknown
            name is a TypeError, a value that is not supported a ValueError.
    """

    def __init__(self, model: str, **engine_args: Any):
        # Imported here: `from_engine` needs neither jax nor the converters.
        from jaxllm.build import build_engine
        from jaxllm.engine_args import EngineArgs

        known = {f.name for f in fields(EngineArgs)}
        args = EngineArgs(model=model, **_supported(engine_args, known))
        built = build_engine(args, StartProgress())
        self._setup(
            built.engine,
            built.tokenizer,
            generation_config=built.generation_config,
            eos_token_ids=built.eos_token_ids,
            chat_template=load_chat_template(args.chat_template),
            with_metrics=not args.disable_log_stats,
        )

    @classmethod
    def from_engine(
        cls,
        engine: SyncEngine,
        tokenizer: Tokenizer | None,
        *,
        generation_config: Mapping[str, Any] | None = None,
        eos_token_ids: Sequence[int] = (),
        chat_template: str | None = None,
        with_metrics: bool = True,
    ) -> Self:
        """An LLM around an engine that is already built; the LLM owns it from now on.

        Args:
            engine: the engine.
            tokenizer: None takes and gives token ids only.
            generation_config: the model's sampling defaults and EOS ids.
            eos_token_ids: further ids that end a sequence.
            chat_template: instead of the tokenizer's own.
            with_metrics: fill RequestOutput.metrics.
        """
        llm = cls.__new__(cls)
        llm._setup(
            engine,
            tokenizer,
            generation_config=generation_config,
            eos_token_ids=eos_token_ids,
            chat_template=chat_template,
            with_metrics=with_metrics,
        )
        return llm

    def _setup(
        self,
        engine: SyncEngine,
        tokenizer: Tokenizer | None,
        *,
        generation_config: Mapping[str, Any] | None,
        eos_token_ids: Sequence[int],
        chat_template: str | None,
        with_metrics: bool,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._inputs = InputProcessor(
            tokenizer, engine.model_info, generation_config=generation_config, eos_token_ids=eos_token_ids
        )
        self._chat = None if tokenizer is None else ChatTemplate(tokenizer, chat_template)
        self._with_metrics = with_metrics
        self._lock = threading.Lock()
        self._is_shut_down = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many; outputs come in the prompts' order.

        Args:
            prompts: text, token ids, a dict with "prompt" or "prompt_token_ids", or a list of these.
            sampling_params: one for all, or one for each prompt. None takes the model's defaults.
            use_tqdm: show a progress bar; or what to call instead of tqdm.
            priority: one for each prompt, lower runs first.

        Raises:
            RequestError: a prompt or parameter that cannot be served; nothing has been run then.
            ValueError: lists of different lengths.
            KeyboardInterrupt: on Ctrl-C, when every request has been aborted. The LLM stays usable.
        """
        many = _as_prompts(prompts)
        params = _one_each("sampling_params", sampling_params, len(many))
        for one in params:
            if not isinstance(one, SamplingParams | None):
                raise TypeError(f"sampling_params must be SamplingParams, got {type(one).__name__}")
        priorities = _one_each("priority", priority, len(many))
        prepared = [
            self._inputs.prepare(prompt, sampling, priority=rank or 0)
            for prompt, sampling, rank in zip(many, params, priorities, strict=True)
        ]
        return self._run(prepared, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        chat_template: str | None = None,
        chat_template_content_format: ContentFormat = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many; outputs come in their order.

        Args:
            messages: a list of messages ({"role", "content"}), or a list of such lists.
            sampling_params: as for `generate`.
            use_tqdm: as for `generate`.
            chat_template: instead of the model's.
            chat_template_content_format: "string", "openai" or "auto".
            add_generation_prompt: open the assistant's answer.
            continue_final_message: go on with the last message instead (with add_generation_prompt=False).
            tools: JSON schemas of functions the model may call.
            chat_template_kwargs: further variables of the template.

        Raises:
            as `generate`; and RequestError for messages that the template refuses.
        """
        if self._chat is None:
            raise ValueError("this LLM has no tokenizer: messages cannot be made into a prompt")
        many = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts: list[Prompt] = []
        for conversation in many:
            text, tokens = self._chat.encode(
                conversation,  # type: ignore[arg-type]
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                chat_template_kwargs=chat_template_kwargs,
                content_format=chat_template_content_format,
            )
            prompts.append({"prompt": text, "prompt_token_ids": tokens})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def get_tokenizer(self) -> "PreTrainedTokenizerBase":
        """The transformers tokenizer."""
        if self._tokenizer is None:
            raise ValueError("this LLM has no tokenizer")
        return self._tokenizer.hf

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses when it is given none: the model's generation_config.json."""
        return self._inputs.sampling_params()

    def get_metrics(self) -> EngineStats:
        """The engine's counters and gauges."""
        return self._engine.stats()

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False when requests still use them."""
        return self._engine.reset_prefix_cache()

    def wait_until_compiled(self) -> None:
        """Block until the programs that are compiled beside serving are ready: for measurements."""
        self._engine.wait_until_compiled()

    def shutdown(self) -> None:
        """Give the device's memory back; the LLM cannot be used any more."""
        with self._lock:  # a `generate` in another thread ends first
            if not self._is_shut_down:
                self._is_shut_down = True
                self._engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _run(self, prepared: list[PreparedRequest], use_tqdm: bool | Callable[..., Any]) -> list[RequestOutput]:
        """Run requests to their end."""
        final = RequestOutputKind.FINAL_ONLY
        running = {
            p.engine_request.request_id: OutputProcessor(
                p, self._tokenizer, output_kind=final, with_metrics=self._with_metrics
            )
            for p in prepared
        }
        done: dict[str, RequestOutput] = {}
        with self._lock, _Progress(prepared, use_tqdm) as progress, _deferred_interrupt() as interrupted:
            if self._is_shut_down:
                raise RuntimeError("this LLM has been shut down")
            try:
                for p in prepared:
                    self._engine.add_request(p.engine_request)
                while running:
                    if interrupted.is_set():
                        raise KeyboardInterrupt
                    if not self._engine.has_work():
                        raise RuntimeError(f"the engine is idle, but {len(running)} requests are unfinished")
                    for delta in self._engine.step():
                        self._take(delta, running, done, progress)
                self._drain()
                if interrupted.is_set():
                    raise KeyboardInterrupt
            except BaseException as error:
                for request_id in running:
                    self._engine.abort(request_id)
                if isinstance(error, KeyboardInterrupt | RequestError):  # not the engine's own failure
                    self._drain()
                raise
        return [done[p.engine_request.request_id] for p in prepared]

    def _drain(self) -> None:
        """Read the steps in flight: until then they hold pages of requests that have ended."""
        while self._engine.has_work():
            self._engine.step()

    def _take(
        self,
        delta: RequestDelta,
        running: dict[str, OutputProcessor],
        done: dict[str, RequestOutput],
        progress: "_Progress",
    ) -> None:
        processor = running.get(delta.request_id)
        if processor is None:
            return  # an aborted request's last step
        output = processor.add(delta)
        progress.add_tokens(len(delta.tokens))
        for index in processor.take_aborts():
            self._engine.abort(delta.request_id, index)
        if processor.is_finished:
            assert output is not None
            done[delta.request_id] = output
            del running[delta.request_id]
            progress.finish_one(output)


class _Progress:
    """The progress bar: finished requests, and tokens per second in and out."""

    def __init__(self, prepared: list[PreparedRequest], use_tqdm: bool | Callable[..., Any]):
        make = tqdm if use_tqdm is True else use_tqdm
        self._bar: Any = None
        if make:
            # In a log, a line now and then.
            pause = 0.1 if is_interactive() else _LOGGED_PROGRESS_SECONDS
            self._bar = make(total=len(prepared), desc="Processed prompts", dynamic_ncols=True, mininterval=pause)
        self._start = self._last = time.monotonic()
        self._num_input = self._num_output = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def add_tokens(self, count: int) -> None:
        """Count output tokens."""
        self._num_output += count
        if self._bar is not None and time.monotonic() - self._last >= _PROGRESS_SECONDS:
            self._show()

    def finish_one(self, output: RequestOutput) -> None:
        """One request is done."""
        self._num_input += len(output.prompt_token_ids)
        if self._bar is not None:
            self._show()
            self._bar.update(1)

    def _show(self) -> None:
        self._last = time.monotonic()
        seconds = max(self._last - self._start, 1e-9)
        self._bar.set_postfix_str(
            f"input: {self._num_input / seconds:.1f} toks/s, output: {self._num_output / seconds:.1f} toks/s",
            refresh=is_interactive(),
        )


@contextlib.contextmanager
def _deferred_interrupt() -> Iterator[threading.Event]:
    """Ctrl-C sets the event instead of breaking into a step, which could leave the engine half-way.

    A second one raises at once. Only the main thread may set signal handlers, and only Python's own
    handler is replaced.
    """
    interrupted = threading.Event()
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield interrupted
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if interrupted.is_set():
            signal.default_int_handler(number, frame)
        interrupted.set()

    signal.signal(signal.SIGINT, handle)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _supported(arguments: dict[str, Any], known: set[str]) -> dict[str, Any]:
    """The arguments that are known; those of features that are not there may only ask for nothing.

    Raises:
        TypeError: an unknown name.
        ValueError: a value that asks for what is not supported.
    """
    supported = {}
    for name, value in arguments.items():
        if name in known:
            supported[name] = value
        elif name not in _NOT_SUPPORTED:
            raise TypeError(f"LLM() got the unknown argument {name!r}; known: {sorted(known)}")
        elif value not in _NOT_SUPPORTED[name]:
            allowed = ", ".join(map(repr, _NOT_SUPPORTED[name]))
            raise ValueError(f"{name}={value!r} is not supported; allowed: {allowed}")
    return supported


def _as_prompts(prompts: Any) -> list[Prompt]:
    """One prompt or a list of them -> a list."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]  # type: ignore[list-item]
    many = list(prompts)
    return [many] if many and isinstance(many[0], int) else many


def _one_each[T](name: str, values: T | Sequence[T] | None, count: int) -> list[T | None]:
    """One value for each prompt, from one for all or a list of that length."""
    if not isinstance(values, Sequence):
        return [values] * count
    if len(values) != count:
        raise ValueError(f"{name} must have one entry for each of the {count} prompts, got {len(values)}")
    return list(values)
