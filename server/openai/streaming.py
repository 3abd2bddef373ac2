"""Server-sent events: framing, and the chunks that every kind of stream has."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from server.openai.errors import to_api_error
from server.openai.generation import Generation
from server.openai.schemas import SamplingFields
from server.settings import ServerSettings

# Fields of vLLM's answers that belong to features this server does not have; clients may look for the keys.
UNUSED_ANSWER_FIELDS = {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}
UNUSED_CHOICE_FIELDS = {"routed_experts": None}

DONE = b"data: [DONE]\n\n"
_encoder = msgspec.json.Encoder()


def event(content: Any) -> bytes:
    """One event."""
    return b"data: " + _encoder.encode(content) + b"\n\n"


async def framed(chunks: AsyncGenerator[dict[str, Any]]) -> AsyncGenerator[bytes]:
    """Frame the chunks of an answer and end it. A failure becomes an event, since the status is long sent."""
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                yield event(chunk)
        except Exception as error:
            yield event(to_api_error(error).body())
        yield DONE


def usage(generations: Sequence[Generation], settings: ServerSettings) -> dict[str, Any]:
    """`usage` of an answer: what has been generated so far. A prompt counts once, whatever n is."""
    num_prompt = sum(len(generation.prompt_tokens) for generation in generations)
    num_completion = sum(generation.num_completion_tokens for generation in generations)
    counts: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "total_tokens": num_prompt + num_completion,
        "completion_tokens": num_completion,
    }
    if settings.enable_prompt_tokens_details:
        num_cached = sum(generation.num_cached_tokens for generation in generations)
        counts["prompt_tokens_details"] = {"cached_tokens": num_cached}
    return counts


def full_usage(generations: Sequence[Generation], settings: ServerSettings) -> dict[str, Any]:
    """`usage` of an answer that is not streamed: with its nulls."""
    details = {"prompt_tokens_details": None, "completion_tokens_details": None}
    return details | usage(generations, settings)


class UsageReports:
    """Which chunks of a stream report usage, as the request and the server want it."""

    def __init__(self, body: SamplingFields, generations: Sequence[Generation], settings: ServerSettings):
        options = body.stream_options
        forced = settings.enable_force_include_usage
        self._generations = generations
        self._settings = settings
        self.at_end = forced or (options is not None and options.include_usage)
        # As in vLLM, usage with every chunk is a kind of include_usage, not an alternative to it.
        self._always = self.at_end and (forced or (options is not None and options.continuous_usage_stats))

    def add_to(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """`chunk`, with usage if every chunk has it."""
        if self._always:
            chunk["usage"] = usage(self._generations, self._settings)
        return chunk

    def final(self) -> dict[str, Any]:
        """The usage of the whole answer."""
        return usage(self._generations, self._settings)
