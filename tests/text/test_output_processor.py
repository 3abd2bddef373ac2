"""Deltas to outputs: text, stop strings, log-probabilities, best_of; the same however the tokens were cut."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.engine.protocol import RequestDelta
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.testing import ByteTokenizer, FakeEngine
from jaxllm.text.input_processor import InputProcessor
from jaxllm.text.output_processor import OutputProcessor

DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
TOKENIZER = ByteTokenizer()
HARD = "Hi 👩‍👩‍👧 삼겹살 𠮷!"


def run(
    script: str | Sequence[int] | None = HARD,
    *,
    tokens_per_step: int = 1,
    prompt: str = "abc",
    **sampling: Any,
) -> tuple[list[RequestOutput], FakeEngine]:
    """Outputs of one request whose tokens are `script`, and the engine that ran it."""
    tokens = list(script.encode()) if isinstance(script, str) else script
    engine = FakeEngine(script=None if tokens is None else lambda *_: tokens, tokens_per_step=tokens_per_step)
    params = SamplingParams(**{"max_tokens": None, **sampling})
    prepared = InputProcessor(TOKENIZER, engine.model_info).prepare(prompt, params)
    processor = OutputProcessor(prepared, TOKENIZER)
    engine.add_request(prepared.engine_request)
    outputs = []
    while not processor.is_finished:
        for delta in engine.step():
            output = processor.add(delta)
            outputs += [output] if output else []
            for index in processor.take_aborts():
                engine.abort(delta.request_id, index)
    assert not engine.has_work()
    return outputs, engine


def text_of(outputs: list[RequestOutput], index: int = 0) -> str:
    return "".join(c.text for o in outputs for c in o.outputs if c.index == index)


def test_the_three_kinds():
    deltas, _ = run(output_kind=DELTA)
    cumulative, _ = run()
    final, _ = run(output_kind=FINAL)
    assert text_of(deltas) == cumulative[-1].outputs[0].text == final[0].outputs[0].text == HARD
    assert [t for o in deltas for t in o.outputs[0].token_ids] == final[0].outputs[0].token_ids
    assert len(final) == 1
    assert len(deltas) == len(cumulative) == len(HARD.encode()) + 1
    texts = [o.outputs[0].text for o in cumulative]
    assert all(b.startswith(a) for a, b in itertools.pairwise(texts))
    assert not any("\ufffd" in text for text in texts)
    assert [o.finished for o in deltas] == [False] * (len(deltas) - 1) + [True]


@settings(max_examples=100, deadline=None)
@given(
    text=st.text(alphabet="ab.𠮷é", max_size=14),
    stop=st.lists(st.text(alphabet="ab.𠮷", min_size=1, max_size=3), max_size=2),
    step=st.integers(1, 5),
    min_tokens=st.integers(0, 6),
    include=st.booleans(),
)
def test_chunking_changes_nothing(text: str, stop: list[str], step: int, min_tokens: int, include: bool):
    options = {"stop": stop, "min_tokens": min_tokens, "include_stop_str_in_output": include, "logprobs": 1}
    (whole,) = run(text, output_kind=FINAL, **options)[0]
    deltas, _ = run(text, tokens_per_step=step, output_kind=DELTA, **options)
    assert text_of(deltas) == whole.outputs[0].text
    assert [t for o in deltas for t in o.outputs[0].token_ids] == whole.outputs[0].token_ids
    assert [p for o in deltas for p in o.outputs[0].logprobs or []] == whole.outputs[0].logprobs
    assert deltas[-1].outputs[0].stop_reason == whole.outputs[0].stop_reason


def test_stop_string_drops_what_came_after_it():
    """Several tokens in one delta used to leave tokens behind the stop string in the output."""
    outputs, engine = run("alpha beta gamma", tokens_per_step=64, stop=["beta", "lph"])
    completion = outputs[-1].outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("a", "stop", "lph")
    assert bytes(completion.token_ids) == b"alph"
    assert engine.aborted == []  # the engine had ended it itself, with EOS


def test_stop_string_aborts_a_running_sequence():
    outputs, engine = run("alpha beta gamma", stop="beta", output_kind=DELTA)
    assert text_of(outputs) == "alpha "
    assert engine.aborted == [(outputs[0].request_id, 0)]
    kept, _ = run("alpha beta gamma", stop="beta", include_stop_str_in_output=True)
    assert kept[-1].outputs[0].text == "alpha beta"


def test_held_back_text_is_released_at_the_end():
    outputs, _ = run("xbe", stop="beta", output_kind=DELTA)
    assert text_of(outputs) == "xbe"
    assert outputs[-1].outputs[0].stop_reason is None


def test_min_tokens_holds_for_stop_strings():
    outputs, _ = run("ab ab ab", stop="ab", min_tokens=2)
    assert outputs[-1].outputs[0].text == "ab "


@pytest.mark.parametrize("include", [False, True])
def test_stop_token_is_counted_but_not_shown(include: bool):
    outputs, _ = run("Hi.", stop_token_ids=[ord(".")], include_stop_str_in_output=include)
    completion = outputs[-1].outputs[0]
    assert completion.text == ("Hi." if include else "Hi")
    assert (completion.finish_reason, completion.stop_reason) == ("stop", ord("."))
    assert bytes(completion.token_ids) == b"Hi."


def test_eos_has_no_stop_reason_and_no_text():
    completion = run("Hi", skip_special_tokens=False)[0][-1].outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("Hi", "stop", None)
    assert completion.token_ids == [*b"Hi", 256]
    shown = run([256] * 3, skip_special_tokens=False, ignore_eos=True, max_tokens=3)[0][-1].outputs[0]
    assert (shown.text, shown.finish_reason) == ("<|im_end|>" * 3, "length")


def test_cut_within_a_character():
    completion = run("é𠮷", max_tokens=4)[0][-1].outputs[0]
    assert completion.text == "é\ufffd"


def test_logprobs_of_split_characters():
    (output,) = run("a𠮷b", logprobs=2, output_kind=FINAL)[0]
    completion = output.outputs[0]
    assert completion.logprobs is not None
    chosen = [next(iter(position.values())) for position in completion.logprobs]
    assert [c.decoded_token for c in chosen] == ["a", "", "", "", "𠮷", "b", "<|im_end|>"]
    assert [next(iter(p)) for p in completion.logprobs] == completion.token_ids
    assert all(c.rank == 1 for c in chosen)
    assert completion.cumulative_logprob == pytest.approx(sum(c.logprob for c in chosen))
    assert [len(p) for p in completion.logprobs] == [2] * 7
    only = run("ab", logprobs=0)[0][-1].outputs[0].logprobs
    assert only is not None
    assert [len(p) for p in only] == [1, 1, 1]


def test_prompt_logprobs_come_once():
    deltas, _ = run("xy", prompt="é!", prompt_logprobs=1, output_kind=DELTA)
    assert [o.prompt_logprobs is None for o in deltas] == [False, True, True]
    prompt = deltas[0].prompt_logprobs
    assert prompt is not None
    assert prompt[0] is None
    texts = [next(iter(p.values())).decoded_token for p in prompt[1:] if p]
    assert texts == ["é", "!"]
    assert run("xy", prompt="é!", prompt_logprobs=1)[0][-1].prompt_logprobs == prompt


def test_n_sequences_finish_one_by_one():
    outputs, _ = run(None, n=3, max_tokens=4, output_kind=DELTA)
    finishes = [c.index for o in outputs for c in o.outputs if c.finish_reason]
    assert sorted(finishes) == [0, 1, 2]
    assert [o.finished for o in outputs].count(True) == 1
    (final,) = run(None, n=3, max_tokens=4, output_kind=FINAL)[0]
    assert [c.text for c in final.outputs] == [text_of(outputs, i) for i in range(3)]


def test_late_deltas_and_ending_from_outside():
    prepared = InputProcessor(TOKENIZER, FakeEngine().model_info).prepare("a", SamplingParams(n=2, stop="x"))
    request_id = prepared.engine_request.request_id
    processor = OutputProcessor(prepared, TOKENIZER)

    def delta(index: int, text: str) -> RequestDelta:
        return RequestDelta(request_id=request_id, index=index, tokens=list(text.encode()))

    processor.add(delta(0, "okx"))
    assert processor.take_aborts() == [0]
    assert processor.take_aborts() == []
    assert processor.add(delta(0, "more")) is None
    processor.add(delta(1, "half\xe9"[:4]))
    output = processor.end("error", "the engine died")
    assert output is not None
    assert output.finished
    assert [(c.text, c.finish_reason, c.error) for c in output.outputs] == [
        ("ok", "stop", None),
        ("half", "error", "the engine died"),
    ]
    assert processor.end() is None
    assert processor.num_output_tokens == 7


def test_no_text_without_detokenize():
    completion = run("Hi", detokenize=False)[0][-1].outputs[0]
    assert (completion.text, completion.token_ids) == ("", [*b"Hi", 256])
