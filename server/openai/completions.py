"""POST /v1/completions: text or token ids in, their continuation out."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from jaxllm.errors import RequestError
from jaxllm.outputs import CompletionOutput, PositionLogprobs
from jaxllm.text.input_processor import Prompt
from server.openai.errors import unknown_model
from server.openai.generation import Generation, close_all, collect, merge, submit_all
from server.openai.http import EventStream, json_response, public_id, read_body, run_unless_gone
from server.openai.logprobs import CompletionLogprobs, TokenNames, prompt_logprobs
from server.openai.sampling import check_combinations, completion_sampling, is_prompt_only
from server.openai.schemas import CompletionRequest
from server.openai.streaming import UNUSED_ANSWER_FIELDS, UNUSED_CHOICE_FIELDS, UsageReports, framed, full_usage
from server.openai.unsupported import refuse_unsupported
from server.state import ServerState, state_of

router = APIRouter()


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    """Continue one or more prompts."""
    state = state_of(request)
    body = await read_body(request, CompletionRequest)
    completion = await _Completion.prepare(state, body, public_id(request, "cmpl", body.request_id))
    if not body.stream:
        return json_response(await run_unless_gone(request, completion.run()))
    await run_unless_gone(request, submit_all(completion.generations))
    return EventStream(framed(completion.chunks()), lambda: close_all(completion.generations))


class _Completion:
    """One request: a generation for each of its prompts."""

    def __init__(self, state: ServerState, body: CompletionRequest, id: str, generations: list[Generation]):
        self.generations = generations
        self.state = state
        self.body = body
        self._n = generations[0].prepared.sampling.n
        self._head = {
            "id": id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model or state.settings.model_name,
        }

    @classmethod
    async def prepare(cls, state: ServerState, body: CompletionRequest, id: str) -> "_Completion":
        """Check and tokenise everything; nothing runs yet."""
        if body.model and body.model not in state.settings.served_model_names:
            raise unknown_model(body.model)
        refuse_unsupported(body.model_extra or {})
        check_combinations(body)
        prompts = _prompts(body)
        sampling = completion_sampling(body, state.input_processor)
        arrival_time = time.time()

        def tokenise() -> list[Generation]:
            return [
                Generation(
                    state,
                    state.input_processor.prepare(
                        prompt,
                        sampling,
                        request_id=f"{id}-{position}-{secrets.token_hex(4)}",
                        priority=body.priority,
                        cache_salt=body.cache_salt,
                        add_special_tokens=body.add_special_tokens,
                        arrival_time=arrival_time,
                        strict=True,
                    ),
                    is_stream=bool(body.stream),
                    is_prompt_only=is_prompt_only(body),
                )
                for position, prompt in enumerate(prompts)
            ]

        generations = await asyncio.get_running_loop().run_in_executor(state.executor, tokenise)
        return cls(state, body, id, generations)

    async def run(self) -> dict[str, Any]:
        """Generate everything: the body of an answer that is not streamed."""
        try:
            await submit_all(self.generations)
            results = await collect(self.generations)
            choices = []
            for position, result in enumerate(results):
                for output in result.outputs:
                    choice = _Choice(self, position)
                    choices.append(choice.whole(output, position * self._n + output.index))
            return {
                **self._head,
                "choices": choices,
                "service_tier": None,
                "system_fingerprint": self.state.fingerprint,
                "usage": full_usage(self.generations, self.state.settings),
                **UNUSED_ANSWER_FIELDS,
            }
        finally:
            close_all(self.generations)

    async def chunks(self) -> AsyncGenerator[dict[str, Any]]:
        """The chunks of a streamed answer."""
        reports = UsageReports(self.body, self.generations, self.state.settings)
        choices: dict[int, _Choice] = {}
        async with aclosing(merge(self.generations)) as results:
            async for position, result in results:
                for output in result.outputs:
                    index = position * self._n + output.index
                    if index not in choices:
                        choices[index] = _Choice(self, position)
                    chunk: dict[str, Any] = {**self._head, "choices": [choices[index].delta(output, index)]}
                    if output.finish_reason is not None:
                        chunk["system_fingerprint"] = self.state.fingerprint
                    yield reports.add_to(chunk)
        if reports.at_end:
            fingerprint = self.state.fingerprint
            yield {**self._head, "choices": [], "usage": reports.final(), "system_fingerprint": fingerprint}


class _Choice:
    """One sequence of an answer; keeps what its chunks have told."""

    def __init__(self, completion: _Completion, position: int):
        self._body = completion.body
        self._generation = completion.generations[position]
        self._tokenizer = completion.state.input_processor.tokenizer
        self._has_started = False
        names = TokenNames(self._tokenizer, self._body.return_tokens_as_token_ids)
        self._logprobs = CompletionLogprobs(names)

    def whole(self, output: CompletionOutput, index: int) -> dict[str, Any]:
        """The choice of an answer that is not streamed."""
        body, generation = self._body, self._generation
        choice = self.delta(output, index)
        choice["prompt_logprobs"] = (
            None if body.prompt_logprobs is None else prompt_logprobs(generation.prompt_logprobs)
        )
        return choice | UNUSED_CHOICE_FIELDS

    def delta(self, output: CompletionOutput, index: int) -> dict[str, Any]:
        """The choice of a chunk: what is new, the prompt first if it is wanted."""
        body, generation = self._body, self._generation
        is_first, self._has_started = not self._has_started, True
        text, tokens, logprobs = output.text, output.token_ids, output.logprobs
        reason = output.finish_reason
        if generation.is_prompt_only:
            text, tokens, logprobs = "", [], [] if logprobs is not None else None
            reason = "length" if reason == "stop" else reason
        shown_tokens, shown_logprobs = tokens, logprobs
        if is_first and body.echo:
            text = self._prompt_text() + text
            shown_tokens = generation.prompt_tokens + tokens
            if logprobs is not None:
                shown_logprobs = [*self._echoed_logprobs(), *logprobs]
        return {
            "index": index,
            "text": text,
            "logprobs": None if shown_logprobs is None else self._logprobs.format(shown_tokens, shown_logprobs),
            "finish_reason": reason,
            "stop_reason": None if generation.is_prompt_only else output.stop_reason,
            "token_ids": tokens if body.return_token_ids else None,
            "prompt_token_ids": generation.prompt_tokens if body.return_token_ids and is_first else None,
        }

    def _prompt_text(self) -> str:
        prompt = self._generation.prepared.prompt
        if prompt is not None and self._body.truncate_prompt_tokens is None:
            return prompt
        assert self._tokenizer is not None  # prepared requests without text need no tokenizer, echo does
        return self._tokenizer.decode(self._generation.prompt_tokens, self._body.skip_special_tokens)

    def _echoed_logprobs(self) -> Sequence[PositionLogprobs | None]:
        tokens = self._generation.prompt_tokens
        positions = self._generation.prompt_logprobs or [None] * len(tokens)
        # prompt_logprobs may have asked for more of them than logprobs does.
        most = self._body.logprobs or 0
        return [entries and _at_most(entries, token, most) for token, entries in zip(tokens, positions, strict=True)]


def _at_most(entries: PositionLogprobs, chosen: int, count: int) -> PositionLogprobs:
    return {t: e for t, e in entries.items() if t == chosen or (e.rank or 0) <= count}


def _prompts(body: CompletionRequest) -> list[Prompt]:
    """The prompts of a request, whichever of the four forms they came in."""
    prompt = body.prompt
    if prompt is None or len(prompt) == 0:
        raise RequestError("prompt must be a non-empty string, token ids, or a list of either.", "prompt")
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]  # type: ignore[list-item]
    return list(prompt)  # type: ignore[arg-type]
