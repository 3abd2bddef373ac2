"""Tokenizer: the wrapper's own promises, and loading from a folder."""

import threading
from pathlib import Path

import pytest
from transformers import ByT5Tokenizer

from jaxllm.errors import CheckpointError, RequestError
from jaxllm.testing import ByteTokenizer
from jaxllm.text.detokenizer import make_detokenizer
from jaxllm.text.tokenizer import Tokenizer, load_tokenizer

Tiny = dict[str, Tokenizer]
TEXT = "Hello 👩‍👩‍👧 삼겹살 ďábelské 𠮷"


def test_byte_tokenizer_is_what_it_says():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(TEXT) == list(TEXT.encode())
    assert tokenizer.decode(list(TEXT.encode())) == TEXT
    assert tokenizer.encode("<|im_end|>") == [tokenizer.eos_token_id] == [256]
    assert [tokenizer.token_bytes(i) for i in range(256)] == [bytes([i]) for i in range(256)]


def test_token_texts(tiny: Tiny):
    fallback = tiny["byte_fallback_bpe"]
    bell = fallback.encode("\a", add_special_tokens=False)[-1]
    assert (fallback.token_string(bell), fallback.token_text(bell)) == ("<0x07>", "\a")
    half = fallback.encode("日")[-1]
    assert (fallback.token_text(half), fallback.token_bytes(half)) == (None, "日".encode()[-1:])
    for tokenizer in tiny.values():
        assert tokenizer.token_text(tokenizer.vocab_size + 10) == ""
        assert tokenizer.token_string(tokenizer.vocab_size + 10) == ""
        assert tokenizer.token_string(tokenizer.encode("<tool>")[-1]) == "<tool>"


def test_special_and_added_tokens(tiny: Tiny):
    for tokenizer in tiny.values():
        names = {tokenizer.token_string(i) for i in tokenizer.special_ids}
        assert {"<s>", "</s>", "<|end|>"} <= names
        assert "<tool>" not in names
        assert "<tool>" in {tokenizer.token_string(i) for i in tokenizer.added_ids}


def test_truncation_keeps_the_last_tokens_and_leaves_no_trace(tiny: Tiny):
    for tokenizer in tiny.values():
        whole = tokenizer.encode("the quick brown fox", add_special_tokens=False)
        assert tokenizer.encode("the quick brown fox", False, 2) == whole[-2:]
        assert tokenizer.encode("the quick brown fox", False) == whole


def test_bad_words_with_and_without_a_leading_space(tiny: Tiny):
    for tokenizer in tiny.values():
        sequences = tokenizer.bad_word_token_ids(["fox", " fox"])
        assert sequences == tokenizer.bad_word_token_ids(["fox"])
        assert {tokenizer.decode(ids).strip() for ids in sequences} == {"fox"}
    assert len(tiny["byte_level_bpe"].bad_word_token_ids(["fox"])) == 2


def test_lone_surrogates_are_refused():
    with pytest.raises(RequestError, match="surrogate"):
        ByteTokenizer().encode("ok \ud83d")


def test_many_threads_share_a_tokenizer(tiny: Tiny):
    """The Rust tokenizer used to fail with "Already borrowed" when threads encoded with and without truncation."""
    tokenizer, errors = tiny["byte_level_bpe"], []

    def work(cut: int | None):
        try:
            for _ in range(50):
                tokens = tokenizer.encode(TEXT, True, cut)
                assert cut is None or len(tokens) == cut
                tokenizer.decode(tokens)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(cut,)) for cut in (None, 3, None, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.parametrize("kind", ["byte_level_bpe", "byte_fallback_bpe", "unigram_metaspace", "word_piece"])
def test_load_from_a_folder(tiny: Tiny, kind: str, tmp_path: Path):
    tiny[kind].hf.save_pretrained(str(tmp_path))
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode(TEXT) == tiny[kind].encode(TEXT)
    assert loaded.eos_token_id == tiny[kind].eos_token_id
    assert loaded.special_ids == tiny[kind].special_ids
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        (tmp_path / name).unlink(missing_ok=True)
    bare = load_tokenizer(tmp_path)
    assert bare.encode(TEXT) == tiny[kind].encode(TEXT)


def test_chat_template_is_loaded_with_the_folder(tmp_path: Path):
    tokenizer = ByteTokenizer("{{ messages[0].content }}")
    tokenizer.hf.save_pretrained(str(tmp_path))
    assert load_tokenizer(tmp_path).hf.chat_template == "{{ messages[0].content }}"


def test_what_cannot_be_loaded(tmp_path: Path):
    with pytest.raises(CheckpointError, match="not a folder"):
        load_tokenizer(tmp_path / "missing")
    with pytest.raises(CheckpointError, match="cannot load the tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="auto, hf, slow"):
        load_tokenizer(tmp_path, mode="mistral")


def test_slow_mode_says_when_there_is_none(tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    tiny["byte_level_bpe"].hf.save_pretrained(str(tmp_path))
    assert load_tokenizer(tmp_path, mode="slow").encode(TEXT) == tiny["byte_level_bpe"].encode(TEXT)
    assert "only the fast" in caplog.text


def test_a_slow_tokenizer(tmp_path: Path):
    """ByT5's is written in Python and needs no file."""
    ByT5Tokenizer().save_pretrained(str(tmp_path))
    tokenizer = load_tokenizer(tmp_path, mode="slow")
    assert not tokenizer.hf.is_fast
    assert tokenizer.pieces is None
    tokens = tokenizer.encode(TEXT)
    assert tokenizer.decode(tokens) == TEXT
    detokenizer = make_detokenizer(tokenizer, tokens[:2])
    assert "".join(map(detokenizer.add, tokens[2:])) + detokenizer.finish() == TEXT[2:]
    assert tokenizer.token_text(tokens[0]) == "H"
    assert tokenizer.encode(TEXT, truncation=3) == tokens[-3:]
