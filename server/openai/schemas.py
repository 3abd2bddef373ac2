"""Request bodies of OpenAI's API with vLLM's additions. Types and shapes only.

Ranges of sampling values are checked by SamplingParams, limits of the model by the input processor.
Fields that are known and cannot be served are listed in `unsupported.py`.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, field_validator

Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
StopStrings = Annotated[list[str], Field(max_length=4)]
TokenIds = Annotated[list[Annotated[StrictInt, Field(ge=0)]], Field(min_length=1)]


class StreamOptions(BaseModel):
    """When a stream reports usage."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingFields(BaseModel):
    """What chat and completions share. None everywhere means: not said."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Int64 | None = None
    stop: str | StopStrings | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    echo: bool = False
    priority: Int64 = 0
    cache_salt: str | None = None
    request_id: str | None = None
    return_tokens_as_token_ids: bool = False
    return_token_ids: bool = False
    user: str | None = None


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    prompt: StrictStr | TokenIds | list[StrictStr] | list[TokenIds] | None = None
    max_tokens: int | None = 16
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool = True


class ChatMessage(BaseModel):
    """One message of a conversation; what else it holds goes to the chat template as it is."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[str | dict[str, Any]] | None = None
    name: str | None = None

    @field_validator("content")
    @classmethod
    def _only_assistants_may_say_nothing(cls, content: Any, info: Any) -> Any:
        # Runs for a null that was sent, not for a field left out. An assistant that only called
        # tools sends null.
        if content is None and info.data.get("role") not in ("assistant", "tool", "function"):
            raise ValueError("content must be a string or a list of parts, got null")
        return content


class ChatCompletionRequest(SamplingFields):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, str]] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    return_prompt_text: bool = False
