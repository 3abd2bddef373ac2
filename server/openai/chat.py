"""POST /v1/chat/completions: a conversation in, the next message out."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from jaxllm.errors import RequestError
from jaxllm.outputs import CompletionOutput
from jaxllm.text.input_processor import PreparedRequest
from server.openai.errors import unknown_model, unsupported
from server.openai.generation import Generation, close_all, collect, submit_all
from server.openai.http import EventStream, json_response, public_id, read_body, run_unless_gone
from server.openai.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from server.openai.sampling import chat_names, chat_sampling, check_combinations
from server.openai.schemas import ChatCompletionRequest
from server.openai.streaming import UNUSED_ANSWER_FIELDS, UNUSED_CHOICE_FIELDS, UsageReports, framed, full_usage
from server.openai.unsupported import refuse_unsupported
from server.state import ServerState, state_of

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    state = state_of(request)
    body = await read_body(request, ChatCompletionRequest)
    chat = await _Chat.prepare(state, body, public_id(request, "chatcmpl", body.request_id))
    if not body.stream:
        return json_response(await run_unless_gone(request, chat.run()))
    await run_unless_gone(request, submit_all([chat.generation]))
    return EventStream(framed(chat.chunks()), chat.generation.close)


class _Chat:
    """One request."""

    def __init__(self, state: ServerState, body: ChatCompletionRequest, id: str, generation: Generation):
        self.generation = generation
        self._state = state
        self._body = body
        self._names = TokenNames(state.input_processor.tokenizer, body.return_tokens_as_token_ids)
        self._role = state.settings.response_role if body.add_generation_prompt else body.messages[-1].role
        self._head = {
            "id": id,
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": body.model or state.settings.model_name,
        }

    @classmethod
    async def prepare(cls, state: ServerState, body: ChatCompletionRequest, id: str) -> "_Chat":
        """Check, render and tokenise everything; nothing runs yet."""
        if body.model and body.model not in state.settings.served_model_names:
            raise unknown_model(body.model)
        refuse_unsupported(body.model_extra or {})
        check_combinations(body)
        if body.chat_template is not None and not state.settings.trust_request_chat_template:
            raise unsupported(
                "chat_template", "is not accepted: start the server with --trust-request-chat-template to allow it"
            )
        arrival_time = time.time()
        prepared = await asyncio.get_running_loop().run_in_executor(
            state.executor, _prepare, state, body, f"{id}-{secrets.token_hex(4)}", arrival_time
        )
        return cls(state, body, id, Generation(state, prepared, is_stream=bool(body.stream)))

    async def run(self) -> dict[str, Any]:
        """Generate everything: the body of an answer that is not streamed."""
        generation, body = self.generation, self._body
        try:
            await submit_all([generation])
            (result,) = await collect([generation])
            return {
                **self._head,
                "choices": [self._choice(output) for output in result.outputs],
                "service_tier": None,
                "system_fingerprint": self._state.fingerprint,
                "usage": full_usage([generation], self._state.settings),
                "prompt_logprobs": prompt_logprobs(generation.prompt_logprobs),
                "prompt_token_ids": generation.prompt_tokens if body.return_token_ids else None,
                "prompt_text": generation.prepared.prompt if body.return_prompt_text else None,
                **UNUSED_ANSWER_FIELDS,
            }
        finally:
            close_all([generation])

    async def chunks(self) -> AsyncGenerator[dict[str, Any]]:
        """The chunks of a streamed answer: for each choice one with the role, then what it says."""
        reports = UsageReports(self._body, [self.generation], self._state.settings)
        started: set[int] = set()
        async for result in self.generation.outputs():
            for output in result.outputs:
                if output.index not in started:
                    started.add(output.index)
                    for chunk in self._opening(output.index):
                        yield reports.add_to(chunk)
                chunk = {**self._head, "choices": [self._delta(output)]}
                if output.finish_reason is not None:
                    chunk["system_fingerprint"] = self._state.fingerprint
                yield reports.add_to(chunk)
        if reports.at_end:
            fingerprint = self._state.fingerprint
            yield {**self._head, "choices": [], "usage": reports.final(), "system_fingerprint": fingerprint}

    def _choice(self, output: CompletionOutput) -> dict[str, Any]:
        message = {
            "role": self._role,
            "content": self._echo() + output.text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        }
        return {
            "index": output.index,
            "message": message,
            "logprobs": self._logprobs(output),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "token_ids": output.token_ids if self._body.return_token_ids else None,
            **UNUSED_CHOICE_FIELDS,
        }

    def _opening(self, index: int) -> list[dict[str, Any]]:
        """The chunks before a choice's own text: its role, and the echo if there is one."""
        body, generation = self._body, self.generation
        first = {
            **self._head,
            "choices": [_choice_delta(index, {"role": self._role, "content": ""})],
            "prompt_token_ids": generation.prompt_tokens if body.return_token_ids else None,
            "prompt_text": generation.prepared.prompt if body.return_prompt_text else None,
        }
        echo = self._echo()
        if not echo:
            return [first]
        return [first, {**self._head, "choices": [_choice_delta(index, {"content": echo})]}]

    def _delta(self, output: CompletionOutput) -> dict[str, Any]:
        choice = _choice_delta(output.index, {"content": output.text})
        choice["logprobs"] = self._logprobs(output)
        choice["finish_reason"] = output.finish_reason
        choice["token_ids"] = output.token_ids if self._body.return_token_ids else None
        if output.finish_reason is not None:
            choice["stop_reason"] = output.stop_reason
        return choice

    def _logprobs(self, output: CompletionOutput) -> dict[str, Any] | None:
        if output.logprobs is None:
            return None
        positions = zip(output.token_ids, output.logprobs, strict=True)
        return chat_logprobs(positions, self._body.top_logprobs or 0, self._names)

    def _echo(self) -> str:
        """What `echo` puts before the answer: the last message, if it is the same speaker's."""
        last = self._body.messages[-1]
        if not self._body.echo or last.role != self._role or last.content is None:
            return ""
        if isinstance(last.content, str):
            return last.content
        parts = (part if isinstance(part, str) else part.get("text") for part in last.content)
        return "\n".join(part for part in parts if part)


def _choice_delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _prepare(state: ServerState, body: ChatCompletionRequest, request_id: str, arrival_time: float) -> PreparedRequest:
    """Messages to an engine request. Runs on a thread of the executor."""
    inputs = state.input_processor
    if state.chat_template is None or inputs.tokenizer is None:
        raise RequestError("this server has no tokenizer, so it cannot chat: use /v1/completions.", "messages")
    with chat_names(body):
        sampling = chat_sampling(body, inputs)
    text = state.chat_template.render(
        [message.model_dump(exclude_unset=True) for message in body.messages],
        documents=body.documents,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template=body.chat_template,
        chat_template_kwargs=_template_kwargs(state, body),
    )
    with chat_names(body):
        return inputs.prepare(
            text,
            sampling,
            request_id=request_id,
            priority=body.priority,
            cache_salt=body.cache_salt,
            add_special_tokens=body.add_special_tokens,
            arrival_time=arrival_time,
            strict=True,
        )


def _template_kwargs(state: ServerState, body: ChatCompletionRequest) -> dict[str, Any]:
    kwargs = state.settings.default_chat_template_kwargs | (body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    return kwargs
