"""Messages to prompt text by a model's chat template.

The text is encoded without adding special tokens: a template writes its own BOS.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jinja2
from jinja2 import nodes

from jaxllm.errors import RequestError

if TYPE_CHECKING:
    from jaxllm.text.tokenizer import Tokenizer

ContentFormat = Literal["auto", "string", "openai"]
Message = Mapping[str, Any]

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Type of a content part that is text -> the key that holds it."""
_MEDIA_WORDS = ("image", "audio", "video", "file", "embeds")
_NOT_VARIABLES = frozenset(
    {"self", "conversation", "messages", "tools", "documents", "chat_template", "tokenize", "padding"}
    | {"truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"}
    | {"tokenizer_kwargs"}
)
"""Names that chat_template_kwargs may not set: they are arguments of the rendering itself."""


class ChatTemplate:
    """Renders conversations for one tokenizer.

    Args:
        tokenizer: its own template is the default; its special tokens are the template's variables.
        chat_template: a Jinja template, or the name of one of the tokenizer's, instead of the default.
        content_format: what the template takes a message's content as: "string", "openai" (a list of
            parts), or "auto", which looks whether the template loops over it.

    Raises:
        ValueError: a template with a syntax error, an unknown content format.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        chat_template: str | None = None,
        content_format: ContentFormat = "auto",
    ):
        if content_format not in ("auto", "string", "openai"):
            raise ValueError(
                f'chat_template_content_format must be "auto", "string" or "openai", got {content_format!r}'
            )
        if chat_template is not None:
            _check_syntax(chat_template)
        self._tokenizer = tokenizer
        self._template = chat_template
        self._content_format: ContentFormat = content_format

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        content_format: ContentFormat | None = None,
    ) -> str:
        """The prompt's text.

        Args:
            messages: dicts with "role" and "content" (text, a list of text parts, or None), and whatever
                else the template knows (tool_calls, name, ...).
            tools: JSON schemas of functions, passed to the template.
            documents: passed to the template.
            add_generation_prompt: end with what opens the assistant's answer.
            continue_final_message: leave the last message open, for the model to go on with.
            chat_template: a template (or the name of one) for this call only.
            chat_template_kwargs: further variables of the template.
            content_format: as the constructor's, for this call only.

        Raises:
            RequestError: a bad message, a part that is not text, no template, or the template's own error.
        """
        if not messages:
            raise RequestError("messages must not be empty.", "messages")
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
                "continue_final_message",
            )
        template = self._pick(chat_template or self._template, bool(tools))
        wanted = content_format or self._content_format
        as_parts = wanted == "openai" or (wanted == "auto" and loops_over_content(template))
        conversation = [_clean(message, i, as_parts) for i, message in enumerate(messages)]
        options: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            **_template_variables(chat_template_kwargs or {}),
        }
        try:
            text = self._tokenizer.hf.apply_chat_template(
                conversation,
                tools=[dict(tool) for tool in tools] if tools else None,
                documents=[dict(document) for document in documents] if documents else None,
                chat_template=template,
                tokenize=False,
                **options,
            )
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template refused the messages: {error}", "messages") from error
        except Exception as error:
            # A template is a program, and fails in any way on a message it was not written for.
            raise RequestError(
                f"the chat template failed on the messages: {type(error).__name__}: {error}", "messages"
            ) from error
        assert isinstance(text, str)  # tokenize=False
        return text

    def encode(
        self, messages: Sequence[Message], truncation: int | None = None, **options: Any
    ) -> tuple[str, list[int]]:
        """Text and tokens of a conversation; `options` as for `render`."""
        text = self.render(messages, **options)
        return text, self._tokenizer.encode(text, add_special_tokens=False, truncation=truncation)

    def _pick(self, template: str | None, has_tools: bool) -> str:
        """The template's text, looked up by name where the tokenizer has several."""
        own: Any = self._tokenizer.hf.chat_template
        if isinstance(own, dict):
            if template is None:
                template = "tool_use" if has_tools and "tool_use" in own else "default"
                if template not in own:
                    raise RequestError(
                        f"this model has the chat templates {sorted(own)} and no default: name one with "
                        "--chat-template.",
                        "chat_template",
                    )
            return own.get(template, template)
        if template is None and own is None:
            raise RequestError(
                "this model's tokenizer has no chat template, so messages cannot be made into a prompt: give "
                "one with --chat-template (chat_template= in Python), or send a plain prompt.",
                "messages",
            )
        return own if template is None else template


def load_chat_template(value: str | Path | None) -> str | None:
    """A template given as a file name or as the template's text itself.

    Raises:
        ValueError: neither a file nor something with Jinja marks in it.
    """
    if value is None:
        return None
    text = str(value)
    if "\n" not in text and "{" not in text:
        path = Path(text)
        if not path.is_file():
            raise ValueError(f"chat template {text!r} is neither a file nor a Jinja template")
        return path.read_text(encoding="utf-8")
    return text


@lru_cache(maxsize=64)
def loops_over_content(template: str) -> bool:
    """True when a template takes a message's content as a list of parts: it loops over it."""
    try:
        tree = _parse(template)
    except jinja2.TemplateSyntaxError:
        return False
    aliases = {"content"}
    for assign in tree.find_all(nodes.Assign):
        if _names_content(assign.node, aliases) and isinstance(assign.target, nodes.Name):
            aliases.add(assign.target.name)
    return any(_names_content(loop.iter, aliases) for loop in tree.find_all(nodes.For))


def _names_content(node: nodes.Node, aliases: set[str]) -> bool:
    """True for `x.content`, `x["content"]`, a variable set to it, and these through filters and slices."""
    match node:
        case nodes.Filter(node=inner) if inner is not None and node.name not in ("string", "trim", "join"):
            return _names_content(inner, aliases)
        case nodes.Getattr(attr="content") | nodes.Getitem(arg=nodes.Const(value="content")):
            return True
        case nodes.Getitem(node=inner, arg=nodes.Slice()):
            return _names_content(inner, aliases)
        case nodes.Name(name=name):
            return name in aliases
    return False


def _parse(template: str) -> nodes.Template:
    # {% generation %} is transformers' own tag; it changes nothing here.
    plain = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template)
    return jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)


def _check_syntax(template: str) -> None:
    try:
        _parse(template)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template has a syntax error in line {error.lineno}: {error}") from error


def _template_variables(given: Mapping[str, Any]) -> Mapping[str, Any]:
    if taken := sorted(_NOT_VARIABLES & set(given)):
        raise RequestError(f"chat_template_kwargs may not set {taken}.", "chat_template_kwargs")
    return given


def _clean(message: Message, index: int, as_parts: bool) -> dict[str, Any]:
    """One message in the form the template takes."""
    if not isinstance(message, Mapping):
        raise RequestError(f"messages.{index} must be an object, got {message!r}.", f"messages.{index}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"messages.{index} has no role.", f"messages.{index}.role")
    clean = dict(message)
    # OpenAI renamed system to developer; templates know system.
    clean["role"] = "system" if role == "developer" else role
    content = message.get("content")
    where = f"messages.{index}.content"
    if content is None:
        parts = []
    elif isinstance(content, str):
        parts = [content]
    elif isinstance(content, Sequence):
        parts = [_part_text(part, f"{where}.{i}") for i, part in enumerate(content)]
    else:
        raise RequestError(f"{where} must be text or a list of parts, got {type(content).__name__}.", where)
    if as_parts and content is not None:
        clean["content"] = [{"type": "text", "text": text} for text in parts]
    else:
        # A template that tests `content is none` never meets it: null and "" say the same.
        clean["content"] = "\n".join(parts)
    _clean_reasoning(clean)
    if role == "assistant" and isinstance(message.get("tool_calls"), Sequence):
        clean["tool_calls"] = [
            _clean_tool_call(call, f"messages.{index}.tool_calls.{i}") for i, call in enumerate(message["tool_calls"])
        ]
    if not clean.get("tool_calls"):
        # Templates test for the key, not for calls in it.
        clean.pop("tool_calls", None)
    return clean


def _clean_reasoning(message: dict[str, Any]) -> None:
    """Templates know a message's reasoning under either of two names: give both."""
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    for name in ("reasoning", "reasoning_content"):
        if reasoning:
            message[name] = reasoning
        else:
            message.pop(name, None)


def _clean_tool_call(call: Any, where: str) -> dict[str, Any]:
    """A tool call with its arguments as an object: the API sends JSON text, templates take objects."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise RequestError(f"{where} must be an object with a function, got {call!r}.", where)
    function = dict(call["function"])
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError as error:
            at = f"{where}.function.arguments"
            raise RequestError(f"{at} is not valid JSON: {error}.", at) from None
    function["arguments"] = arguments
    return {**call, "function": function}


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise RequestError(f"{where} must be an object, got {part!r}.", where)
    kind = part.get("type", "text")
    key = _TEXT_PARTS.get(kind)
    if key is None:
        if isinstance(kind, str) and any(word in kind for word in _MEDIA_WORDS):
            raise RequestError(
                f"{where} is of type {kind!r}, and this is not a multimodal model: only text parts are supported.",
                where,
            )
        raise RequestError(f"{where} has the unknown type {kind!r}; known: {', '.join(_TEXT_PARTS)}.", where)
    text = part.get(key)
    if not isinstance(text, str):
        raise RequestError(f"{where}.{key} must be a string, got {text!r}.", where)
    return text
