"""Fields other servers know and this one cannot serve: refused, because ignoring them would mislead."""

import logging
from collections.abc import Mapping
from typing import Any

from server.openai.errors import malformed, unsupported

logger = logging.getLogger(__name__)

_NOT_HERE = "is not supported by this server"
_NO_GUIDANCE = "is not supported: this server does not constrain the output to a grammar or schema"
_NO_BEAMS = "is not supported: this server does not do beam search"
_NO_TOOLS = "is not supported: this server does not call tools"
_NO_MEDIA = "is not supported: this server takes and makes text only"

# Field -> (values that ask for nothing, what is wrong with the others). None always asks for nothing.
_KNOWN: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_beam_search": ((False,), _NO_BEAMS),
    "logits_processors": (([],), "is not supported: use the sampling parameters"),
    "best_of": ((1,), "is not supported in chat: use n, or /v1/completions"),
    "length_penalty": ((1, 1.0), _NO_BEAMS),
    "suffix": ((), "is not supported: this model completes from the left only"),
    "prompt_embeds": ((), "is not supported: give the prompt as text or token ids"),
    "structured_outputs": ((), _NO_GUIDANCE),
    "guided_json": ((), _NO_GUIDANCE),
    "guided_regex": ((), _NO_GUIDANCE),
    "guided_choice": ((), _NO_GUIDANCE),
    "guided_grammar": ((), _NO_GUIDANCE),
    "guided_whitespace_pattern": ((), _NO_GUIDANCE),
    "guided_decoding_backend": ((), _NO_GUIDANCE),
    "tools": ((), _NO_TOOLS),
    "tool_choice": (("none",), _NO_TOOLS),
    "functions": ((), _NO_TOOLS),
    "function_call": (("none",), _NO_TOOLS),
    "modalities": ((["text"],), _NO_MEDIA),
    "audio": ((), _NO_MEDIA),
    "mm_processor_kwargs": (({},), _NO_MEDIA),
    "media_io_kwargs": (({},), _NO_MEDIA),
    "web_search_options": ((), _NOT_HERE),
    "thinking_token_budget": ((-1,), _NOT_HERE),
    "repetition_detection": ((), _NOT_HERE),
    "logprob_token_ids": ((), _NOT_HERE),
    "prompt_logprob_token_ids": ((), _NOT_HERE),
    "kv_transfer_params": ((), _NOT_HERE),
    "ec_transfer_params": ((), _NOT_HERE),
    "vllm_xargs": (({},), _NOT_HERE),
    "truncation_side": (("left",), 'is not supported other than "left"'),
    "return_token_offsets": ((False,), _NOT_HERE),
}
_RESPONSE_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
# Hints and labels that may be left unread without changing what the answer means.
_HARMLESS = frozenset(
    {"parallel_tool_calls", "include_reasoning", "metadata", "store", "service_tier", "prediction"}
    | {"session_id", "safety_identifier", "prompt_cache_key", "verbosity"}
)


def refuse_unsupported(extra: Mapping[str, Any]) -> None:
    """Check the fields that no schema declares.

    Raises:
        ApiError: a 400 naming a field that is known and asks for something this server cannot do.
            Fields nobody knows are ignored, as vLLM does.
    """
    for field, value in extra.items():
        if value is None:
            continue
        if field == "response_format":
            _check_response_format(value)
        elif field in _KNOWN:
            harmless, why = _KNOWN[field]
            if not any(type(value) is type(other) and value == other for other in harmless):
                raise unsupported(field, why)
        elif field not in _HARMLESS:
            logger.debug("ignored the unknown request field %r", field)


def _check_response_format(value: Any) -> None:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind not in _RESPONSE_FORMATS:
        allowed = ", ".join(_RESPONSE_FORMATS)
        raise malformed(f"response_format.type must be one of {allowed}, got {kind!r}", "body.response_format.type")
    if kind != "text":
        raise unsupported("response_format", _NO_GUIDANCE)
