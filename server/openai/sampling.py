"""From request fields to SamplingParams: one place that knows how the two spell things."""

from collections.abc import Iterator
from contextlib import contextmanager

from jaxllm.errors import RequestError
from jaxllm.sampling_params import SamplingParams
from jaxllm.text.input_processor import InputProcessor
from server.openai.schemas import ChatCompletionRequest, CompletionRequest, SamplingFields

# Fields that have the same name and meaning in both.
_SAME = (
    *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "seed", "stop"),
    *("repetition_penalty", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens"),
    *("skip_special_tokens", "spaces_between_special_tokens", "truncate_prompt_tokens", "allowed_token_ids"),
    *("bad_words", "prompt_logprobs"),
)


def check_combinations(body: SamplingFields) -> None:
    """Fields that exclude or need each other.

    Raises:
        RequestError: naming the field.
    """
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream to be true.", "stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs cannot be streamed.", "prompt_logprobs")


def completion_sampling(body: CompletionRequest, inputs: InputProcessor) -> SamplingParams:
    """Sampling parameters of a completion.

    With echo, max_tokens 0 asks for the prompt only. The engine makes at least one token, so it is asked
    for one, which nobody sees.

    Raises:
        RequestError: naming the field at fault.
    """
    if body.logprobs is not None and body.logprobs < 0:
        raise RequestError(f"logprobs must be at least 0, got {body.logprobs}.", "logprobs")
    values = _same(body)
    max_tokens = body.max_tokens
    if is_prompt_only(body):
        max_tokens, values["min_tokens"] = 1, 0
    if body.echo and body.logprobs is not None:
        values["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    return inputs.sampling_params(**values, max_tokens=max_tokens, logprobs=body.logprobs, best_of=body.best_of)


def is_prompt_only(body: CompletionRequest) -> bool:
    """True when the caller wants the prompt back and nothing generated."""
    return body.echo and body.max_tokens == 0


def chat_sampling(body: ChatCompletionRequest, inputs: InputProcessor) -> SamplingParams:
    """Sampling parameters of a chat completion.

    Raises:
        RequestError: naming the field at fault.
    """
    top = body.top_logprobs
    if top is not None and top < -1:
        raise RequestError(f"top_logprobs must be at least 0, or -1 for all, got {top}.", "top_logprobs")
    if top and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true.", "top_logprobs")
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if max_tokens is None:
        max_tokens = inputs.default_sampling_params.get("max_tokens")
    logprobs = (top or 0) if body.logprobs else None
    return inputs.sampling_params(**_same(body), max_tokens=max_tokens, logprobs=logprobs)


@contextmanager
def chat_names(body: ChatCompletionRequest) -> Iterator[None]:
    """Errors name fields as the chat request spells them."""
    try:
        yield
    except RequestError as error:
        if error.param == "max_tokens" and body.max_completion_tokens is not None:
            message = error.message.replace("max_tokens", "max_completion_tokens")
            raise RequestError(message, "max_completion_tokens") from None
        if error.param == "logprobs" and body.top_logprobs is not None:
            raise RequestError(error.message, "top_logprobs") from None
        raise


def _same(body: SamplingFields) -> dict:
    values = {name: getattr(body, name) for name in _SAME}
    if body.logit_bias is not None:
        values["logit_bias"] = _logit_bias(body.logit_bias)
    return values


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in given.items()}
    except ValueError:
        bad = next(key for key in given if not key.lstrip("-").isdecimal())
        raise RequestError(f"logit_bias keys must be token ids, got {bad!r}.", "logit_bias") from None
