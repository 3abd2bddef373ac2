"""Messages to prompts: forms of content, roles, errors; the tokens equal transformers' own."""

from pathlib import Path
from typing import Any

import pytest

from jaxllm.errors import RequestError
from jaxllm.testing import ByteTokenizer
from jaxllm.text.chat_template import ChatTemplate, load_chat_template, loops_over_content

USER = {"role": "user", "content": "Hi"}
PARTS = "{% for m in messages %}{% for p in m['content'] %}[{{ p['type'] }}:{{ p['text'] }}]{% endfor %}{% endfor %}"
PLAIN = "{% for m in messages %}({{ m.role }}:{{ m.content }}){% endfor %}"


def render(template: str | None, messages: list[Any], **options: Any) -> str:
    return ChatTemplate(ByteTokenizer(), template).render(messages, **options)


def test_tokens_equal_transformers_and_have_no_second_bos():
    """A template that writes BOS used to get another from the tokenizer."""
    tokenizer = ByteTokenizer("<|endoftext|>{% for m in messages %}{{ m.content }}{% endfor %}")
    text, tokens = ChatTemplate(tokenizer).encode([USER])
    assert tokens == tokenizer.hf.apply_chat_template([USER], return_dict=False)
    assert text == "<|endoftext|>Hi"
    assert tokens.count(258) == 1


def test_generation_prompt_and_continuing():
    assert render(None, [USER]).endswith("<|im_start|>assistant\n")
    assert render(None, [USER], add_generation_prompt=False).endswith("Hi<|im_end|>\n")
    half = [USER, {"role": "assistant", "content": "The colour is"}]
    text = render(None, half, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nThe colour is")
    with pytest.raises(RequestError, match="add_generation_prompt"):
        render(None, half, continue_final_message=True)


@pytest.mark.parametrize(
    ("template", "as_parts"),
    [
        (PLAIN, False),
        (PARTS, True),
        ("{% for m in messages %}{% for p in m.content %}x{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% set c = m.content %}{% for p in c|reverse %}x{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% set content = m.content|trim %}{{ content }}{% endfor %}", False),
        ("{% generation %}{% for p in messages[0].content %}{{ p }}{% endfor %}{% endgeneration %}", True),
        ("{% broken", False),
    ],
)
def test_content_format_is_read_off_the_template(template: str, as_parts: bool):
    assert loops_over_content(template) == as_parts


def test_content_is_given_as_the_template_takes_it():
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"]
    message = {"role": "user", "content": parts}
    assert render(PLAIN, [message]) == "(user:a\nb\nc)"
    assert render(PARTS, [message]) == "[text:a][text:b][text:c]"
    assert render(PARTS, [USER]) == "[text:Hi]"
    assert "[{'type'" in render(PLAIN, [message], content_format="openai")


@pytest.mark.parametrize("message", [{"role": "user"}, {"role": "user", "content": None}])
def test_absent_content_is_empty(message: dict[str, Any]):
    assert render(PLAIN, [message]) == "(user:)"
    assert render(PARTS, [message]) == ""


def test_roles():
    assert render(PLAIN, [{"role": "developer", "content": "x"}]) == "(system:x)"
    assert render(PLAIN, [{"role": "wizard", "content": "x"}]) == "(wizard:x)"


def test_tool_calls_reach_the_template_as_objects():
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}="
        "{{ c.function.arguments.cmd }};{% endfor %}{{ m.content }}{% endfor %}{{ tools[0].function.name }}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "run", "arguments": '{"cmd": "ls"}'}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    tools = [{"type": "function", "function": {"name": "run"}}]
    assert render(template, messages, tools=tools) == "Hirun=ls;run"
    bad = {"role": "assistant", "tool_calls": [{"function": {"name": "run", "arguments": "{"}}]}
    with pytest.raises(RequestError, match="not valid JSON") as caught:
        render(template, [USER, bad])
    assert caught.value.param == "messages.1.tool_calls.0.function.arguments"
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == '{"cmd": "ls"}'


def test_empty_tool_calls_are_left_out():
    template = "{{ 'tool_calls' in messages[0] }}"
    assert render(template, [{"role": "assistant", "content": "x", "tool_calls": []}]) == "False"


def test_variables_and_templates_of_one_call():
    kwargs = {"enable_thinking": False}
    assert render("{{ enable_thinking }}", [USER], chat_template_kwargs=kwargs) == "False"
    assert render(PLAIN, [USER], chat_template="{{ messages|length }}") == "1"
    with pytest.raises(RequestError, match="may not set") as caught:
        render(PLAIN, [USER], chat_template_kwargs={"tokenize": True})
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("messages", "param", "word"),
    [
        ([], "messages", "empty"),
        (["x"], "messages.0", "object"),
        ([{"content": "x"}], "messages.0.role", "role"),
        ([{"role": "user", "content": 5}], "messages.0.content", "int"),
        ([{"role": "user", "content": [5]}], "messages.0.content.0", "object"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0", "string"),
        ([USER, {"role": "user", "content": [{"type": "image_url"}]}], "messages.1.content.0", "multimodal"),
        ([{"role": "user", "content": [{"type": "banana"}]}], "messages.0.content.0", "banana"),
    ],
)
def test_bad_messages(messages: list[Any], param: str, word: str):
    with pytest.raises(RequestError) as caught:
        render(None, messages)
    assert caught.value.param == param
    assert word in caught.value.message


def test_errors_of_the_template_reach_the_caller():
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}", [USER])
    assert caught.value.param == "messages"
    with pytest.raises(RequestError, match="ZeroDivisionError"):
        render("{{ 1 // 0 }}", [USER])
    with pytest.raises(RequestError, match="unsafe"):
        render("{{ messages.__class__.__mro__ }}", [USER])


def test_no_template():
    with pytest.raises(RequestError, match="--chat-template"):
        ChatTemplate(ByteTokenizer(None)).render([USER])


def test_named_templates():
    tokenizer = ByteTokenizer(None)
    tokenizer.hf.chat_template = {"default": "plain", "tool_use": "tools"}  # type: ignore[assignment]
    assert ChatTemplate(tokenizer).render([USER]) == "plain"
    assert ChatTemplate(tokenizer).render([USER], tools=[{"type": "function"}]) == "tools"
    assert ChatTemplate(tokenizer, "tool_use").render([USER]) == "tools"
    tokenizer.hf.chat_template = {"rag": "x"}  # type: ignore[assignment]
    with pytest.raises(RequestError, match="rag"):
        ChatTemplate(tokenizer).render([USER])


def test_template_from_a_file(tmp_path: Path):
    path = tmp_path / "chat.jinja"
    path.write_text(PLAIN)
    assert load_chat_template(path) == load_chat_template(str(path)) == load_chat_template(PLAIN) == PLAIN
    assert load_chat_template(None) is None
    with pytest.raises(ValueError, match="neither a file"):
        load_chat_template("missing.jinja")
    with pytest.raises(ValueError, match="syntax error in line 1"):
        ChatTemplate(ByteTokenizer(), "{{ x")
    with pytest.raises(ValueError, match="content_format"):
        ChatTemplate(ByteTokenizer(), content_format="list")  # type: ignore[arg-type]
