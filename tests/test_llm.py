"""LLM over a fake engine: order, validation, stopping, interruption."""

import signal
import threading
from typing import Any

import pytest

from jaxllm.engine.protocol import EngineRequest, RequestDelta
from jaxllm.errors import RequestError
from jaxllm.llm import LLM, _supported
from jaxllm.sampling_params import SamplingParams
from jaxllm.testing import ByteTokenizer, FakeEngine


def make(**engine: Any) -> tuple[LLM, FakeEngine]:
    fake = FakeEngine(**engine)
    return LLM.from_engine(fake, ByteTokenizer()), fake


def generate(llm: LLM, *args: Any, **kwargs: Any):
    return llm.generate(*args, use_tqdm=False, **kwargs)


def test_outputs_come_in_the_order_of_the_prompts():
    llm, _ = make()
    lengths = [9, 2, 5]
    outputs = generate(llm, ["a", "b", "c"], [SamplingParams(max_tokens=n) for n in lengths])
    assert [o.prompt for o in outputs] == ["a", "b", "c"]
    assert [len(o.outputs[0].token_ids) for o in outputs] == lengths
    assert all(o.finished and o.outputs[0].finish_reason == "length" for o in outputs)
    assert all(o.outputs[0].text == bytes(o.outputs[0].token_ids).decode() for o in outputs)


@pytest.mark.parametrize("prompt", ["hi", [104, 105], {"prompt": "hi"}, {"prompt_token_ids": [104, 105]}], ids=str)
def test_every_form_of_prompt(prompt: Any):
    llm, _ = make()
    one = generate(llm, prompt)
    many = generate(llm, [prompt, prompt])
    assert [o.prompt_token_ids for o in [*one, *many]] == [[104, 105]] * 3
    assert one[0].outputs == many[0].outputs == many[1].outputs


def test_nothing_in_nothing_out():
    llm, fake = make()
    assert generate(llm, []) == []
    assert fake.requests == []


def test_lists_of_other_lengths_are_refused():
    llm, fake = make()
    with pytest.raises(ValueError, match=r"sampling_params .* 3 prompts, got 2"):
        generate(llm, ["a", "b", "c"], [SamplingParams()] * 2)
    with pytest.raises(ValueError, match=r"priority .* 1 prompts, got 2"):
        generate(llm, "a", priority=[1, 2])
    assert fake.requests == []


def test_one_bad_prompt_runs_nothing():
    llm, fake = make()
    with pytest.raises(RequestError) as caught:
        generate(llm, ["fine", ""])
    assert caught.value.param == "prompt"
    assert fake.requests == []


def test_priorities_reach_the_engine():
    llm, fake = make()
    generate(llm, ["a", "b"], priority=[5, -1])
    assert [r.priority for r in fake.requests] == [5, -1]


def test_stop_string_aborts_its_sequence_only():
    text = "one two three"
    llm, fake = make(script=lambda request, index: list(text[index:].encode()))
    (output,) = generate(llm, "x", SamplingParams(n=2, max_tokens=30, stop=["one", "three"]))
    assert [c.text for c in output.outputs] == ["", "ne two "]
    assert [c.stop_reason for c in output.outputs] == ["one", "three"]
    assert fake.aborted == [(output.request_id, 0), (output.request_id, 1)]
    assert not fake.has_work()


def test_best_of_returns_the_most_probable():
    # The fake engine's first tokens: log-probability -0.5 - (token % 7) / 10.
    llm, fake = make(script=lambda request, index: [70 + 6 - index])
    params = SamplingParams(n=2, best_of=4, max_tokens=1)
    (output,) = generate(llm, "x", params)
    assert fake.requests[0].sampling.n == 4
    assert [c.token_ids for c in output.outputs] == [[73], [74]]
    assert [c.index for c in output.outputs] == [0, 1]
    assert output.outputs[0].logprobs is None
    assert output.outputs[0].cumulative_logprob is None


def test_defaults_are_the_models():
    fake = FakeEngine()
    config = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 3, "eos_token_id": [5, 6]}
    llm = LLM.from_engine(fake, ByteTokenizer(), generation_config=config)
    (output,) = generate(llm, "x")
    assert len(output.outputs[0].token_ids) == 3
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.6, top_k=20, max_tokens=3)
    assert fake.requests[0].eos_token_ids == [ByteTokenizer.EOS, 5, 6]


def test_chat_one_and_many():
    llm, fake = make()
    ask = [{"role": "user", "content": "Hi"}]
    one = llm.chat(ask, use_tqdm=False)
    many = llm.chat([ask, [*ask, {"role": "assistant", "content": "Yo"}]], use_tqdm=False)
    assert one[0].prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert one[0].prompt_token_ids[0] == 257
    assert many[0].prompt == one[0].prompt
    assert len(many) == 2
    assert one[0].outputs == many[0].outputs
    text = llm.get_tokenizer().decode(fake.requests[0].prompt_tokens)
    assert text == one[0].prompt


def test_without_a_tokenizer():
    llm = LLM.from_engine(FakeEngine(), None)
    (output,) = generate(llm, [1, 2, 3], SamplingParams(detokenize=False, logprobs=1))
    assert output.outputs[0].text == ""
    assert len(output.outputs[0].token_ids) == 16
    with pytest.raises(RequestError, match="no tokenizer"):
        generate(llm, "text")
    with pytest.raises(ValueError, match="no tokenizer"):
        llm.chat([{"role": "user", "content": "Hi"}])


class _InterruptedEngine(FakeEngine):
    """Ctrl-C in the middle of its third step."""

    def step(self) -> list[RequestDelta]:
        if self.num_steps == 2:
            signal.raise_signal(signal.SIGINT)
        return super().step()


def test_ctrl_c_aborts_and_leaves_the_llm_usable():
    fake = _InterruptedEngine()
    llm = LLM.from_engine(fake, ByteTokenizer())
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        generate(llm, ["a", "b"], SamplingParams(max_tokens=50))
    assert fake.num_steps == 3  # the step was not torn apart
    assert {request_id for request_id, _ in fake.aborted} == {r.request_id for r in fake.requests}
    assert signal.getsignal(signal.SIGINT) is handler
    assert len(generate(llm, "again")) == 1


def test_engine_failure_aborts_what_is_left():
    llm, fake = make(fail_at_step=2)
    with pytest.raises(RuntimeError, match="told to fail"):
        generate(llm, "a")
    assert len(fake.aborted) == 1


class _LosingEngine(FakeEngine):
    """Forgets the requests it took."""

    def add_request(self, request: EngineRequest) -> None:
        self.requests.append(request)


def test_a_lost_request_is_an_error_not_a_hang():
    llm = LLM.from_engine(_LosingEngine(), ByteTokenizer())
    with pytest.raises(RuntimeError, match="1 requests are unfinished"):
        generate(llm, "a")


def test_calls_from_several_threads():
    llm, _ = make()
    results: dict[str, str] = {}

    def work(prompt: str):
        results[prompt] = generate(llm, prompt)[0].outputs[0].text

    threads = [threading.Thread(target=work, args=(p,)) for p in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {p: generate(llm, p)[0].outputs[0].text for p in "abcd"}


def test_progress_bar_counts_requests_and_tokens():
    llm, _ = make()
    bars: list[Any] = []

    class Bar:
        def __init__(self, total: int, **_: Any):
            self.total, self.count, self.text, self.closed = total, 0, "", False
            bars.append(self)

        def update(self, count: int):
            self.count += count

        def set_postfix_str(self, text: str, refresh: bool = True):
            self.text = text

        def close(self):
            self.closed = True

    llm.generate(["a", "b"], use_tqdm=Bar)
    (bar,) = bars
    assert (bar.total, bar.count, bar.closed) == (2, 2, True)
    assert "toks/s" in bar.text


def test_metrics():
    llm, _ = make()
    (output,) = generate(llm, "a")
    assert output.metrics is not None
    assert output.metrics.num_generation_tokens == 16
    assert output.metrics.first_token_latency > 0
    assert output.metrics.queued_ts <= output.metrics.first_token_ts <= output.metrics.last_token_ts
    assert llm.get_metrics().generation_tokens == 16
    quiet = LLM.from_engine(FakeEngine(), ByteTokenizer(), with_metrics=False)
    assert generate(quiet, "a")[0].metrics is None


def test_shutdown():
    fake = FakeEngine()
    with LLM.from_engine(fake, ByteTokenizer()) as llm:
        assert llm.reset_prefix_cache()
    assert fake.is_shut_down
    with pytest.raises(RuntimeError, match="shut down"):
        generate(llm, "a")


def test_arguments_of_missing_features_may_only_ask_for_nothing():
    known = {"seed", "dtype"}
    assert _supported({"seed": 1, "quantization": None, "enable_lora": False}, known) == {"seed": 1}
    with pytest.raises(ValueError, match="quantization='awq' is not supported"):
        _supported({"quantization": "awq"}, known)
    with pytest.raises(TypeError, match=r"unknown argument 'sed'; known: \['dtype', 'seed'\]"):
        _supported({"sed": 1}, known)
