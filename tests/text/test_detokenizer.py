"""Incremental detokenising: pieces join to the whole for every kind of tokenizer; nothing partial shows."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.testing import ByteTokenizer
from jaxllm.text.detokenizer import Detokenizer, StopStrings, WindowDetokenizer, make_detokenizer
from jaxllm.text.tokenizer import Tokenizer

Tiny = dict[str, Tokenizer]
BY_PIECES = ["byte_level_bpe", "byte_fallback_bpe", "unigram_metaspace", "word_piece"]
HARD = [
    "The quick brown fox jumps over the lazy dog, doesn't it?\n\n    return x",
    "👩‍👩‍👧 삼겹살 ďábelské 𠮷",
    "🏳️‍🌈👍🏽 e\u0301 ﷽ \u200b|\u00a0|",
    "  two leading spaces\tand\ttabs \n\n ",
    "It's 'quoted', isn't it? We do not . , !",
    "<tool> [NAME]</s> <|end|>text<s>",
    "▁ <0x41> ## ##ing Ġ Ċ",
]
texts = st.one_of(st.sampled_from(HARD), st.text(max_size=30), st.text(alphabet="aé𠮷👩 \n'.<0x41>", max_size=30))


def joined(tokenizer: Tokenizer, tokens: list[int], prompt: list[int] | None = None, **options: bool) -> str:
    detokenizer = make_detokenizer(tokenizer, prompt or [], **options)
    return "".join(map(detokenizer.add, tokens)) + detokenizer.finish()


@pytest.mark.parametrize("kind", BY_PIECES)
def test_the_pieces_of_common_tokenizers_are_known(tiny: Tiny, kind: str):
    assert tiny[kind].pieces is not None
    assert isinstance(make_detokenizer(tiny[kind]), Detokenizer)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", BY_PIECES)
@settings(max_examples=60, deadline=None)
@given(text=texts)
def test_joined_deltas_equal_the_full_decode(tiny: Tiny, kind: str, skip: bool, text: str):
    tokenizer = tiny[kind]
    tokens = tokenizer.encode(text)
    assert joined(tokenizer, tokens, skip_special_tokens=skip) == tokenizer.decode(tokens, skip)


@pytest.mark.parametrize("kind", BY_PIECES)
@settings(max_examples=60, deadline=None)
@given(text=texts, cut=st.integers(0, 40))
def test_output_continues_the_prompt(tiny: Tiny, kind: str, text: str, cut: int):
    """A SentencePiece output used to lose its leading space when it was decoded without its prompt."""
    tokenizer = tiny[kind]
    tokens = tokenizer.encode(text)
    prompt, output = tokens[:cut], tokens[cut:]
    prompt_text = tokenizer.decode(prompt)
    if prompt_text.endswith("\ufffd"):
        return  # the prompt ends within a character: test_a_character_begun_by_the_prompt
    assert prompt_text + joined(tokenizer, output, prompt) == tokenizer.decode(tokens)


@settings(max_examples=100, deadline=None)
@given(tokens=st.lists(st.integers(0, 340), max_size=20))
def test_random_byte_level_tokens(tiny: Tiny, tokens: list[int]):
    """Not only what an encoder makes: a model may say any bytes in any order."""
    tokenizer = tiny["byte_level_bpe"]
    assert joined(tokenizer, tokens) == tokenizer.decode(tokens)


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=12))
def test_random_fallback_bytes_are_plain_utf8(tiny: Tiny, data: bytes):
    """transformers turns a whole run of bytes into U+FFFD when one of them is wrong; a stream cannot."""
    tokenizer = tiny["byte_fallback_bpe"]
    prompt = tokenizer.encode("x")
    assert joined(tokenizer, [byte + 1 for byte in data], prompt) == data.decode("utf-8", "replace")


@pytest.mark.parametrize("character", ["é", "日", "𠮷", "😀"])
def test_a_character_shows_when_it_is_whole(character: str):
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(character)
    detokenizer = make_detokenizer(tokenizer, [65])
    assert [detokenizer.add(token) for token in tokens] == [""] * (len(tokens) - 1) + [character]
    assert detokenizer.finish() == ""


def test_an_unfinished_character_is_one_replacement_at_the_end():
    tokenizer = ByteTokenizer()
    detokenizer = make_detokenizer(tokenizer, [65])
    assert [detokenizer.add(token) for token in "ok😀".encode()[:-1]] == ["o", "k", "", "", ""]
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_a_character_begun_by_the_prompt():
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode("a😀b")
    for cut in range(2, 5):
        assert joined(tokenizer, tokens[cut:], tokens[:cut]) == "😀b"
    assert joined(tokenizer, [], tokens[:3]) == ""


def test_unknown_ids_give_no_text(tiny: Tiny):
    """The embedding has more rows than the tokenizer has tokens, and a model may pick one."""
    for kind in BY_PIECES:
        tokenizer = tiny[kind]
        assert joined(tokenizer, [tokenizer.vocab_size + 7], tokenizer.encode("a")) == ""


def test_spaces_between_special_tokens(tiny: Tiny):
    tokenizer = tiny["word_piece"]
    tokens = tokenizer.encode("fox<tool><|end|>dog")
    spaced = joined(tokenizer, tokens, skip_special_tokens=False)
    close = joined(tokenizer, tokens, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert spaced == tokenizer.decode(tokens, False)
    assert "<tool> <|end|>" in spaced
    assert "<tool><|end|>" in close


@settings(max_examples=40, deadline=None)
@given(text=texts)
def test_windowed_detokenizer_joins_to_the_full_decode(tiny: Tiny, text: str):
    for tokenizer in (tiny["suffix_bpe"], tiny["byte_level_bpe"], tiny["unigram_metaspace"]):
        tokens = tokenizer.encode(text)
        detokenizer = WindowDetokenizer(tokenizer)
        parts = [detokenizer.add(token) for token in tokens]
        if tokenizer.pieces is not None:
            assert "".join(parts) + detokenizer.finish() == tokenizer.decode(tokens)
        assert all(not part.endswith("\ufffd") for part in parts) or "\ufffd" in text


def test_windowed_detokenizer_does_not_wait_for_ever(tiny: Tiny):
    """A run of wrong bytes never becomes a character: the window must not grow with it."""
    tokenizer = tiny["byte_level_bpe"]
    wrong = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\xff")
    detokenizer = WindowDetokenizer(tokenizer)
    parts = [detokenizer.add(wrong) for _ in range(40)]
    assert any(parts)
    assert "".join(parts).count("\ufffd") >= 16


# --- stop strings


def shown(stops: StopStrings, text: str, cuts: list[int]) -> tuple[list[str], str | None]:
    """Feed `text` in pieces; the parts shown and the match."""
    parts, start = [], 0
    for end in [*sorted(c for c in cuts if c < len(text)), len(text)]:
        parts.append(stops.add(text[start:end]))
        start = end
        if stops.matched is not None:
            return parts, stops.matched
    return [*parts, stops.finish()], None


def brute_force(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The match that ends first, the longest of those, by trying every end."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="ab.", max_size=20),
    stops=st.lists(st.text(alphabet="ab.", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 20), max_size=20),
    include=st.booleans(),
)
def test_stop_strings_for_every_chunking(text: str, stops: list[str], cuts: list[int], include: bool):
    parts, matched = shown(StopStrings(stops, include), text, cuts)
    assert ("".join(parts), matched) == brute_force(text, stops, include)


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="ab.", max_size=20),
    stops=st.lists(st.text(alphabet="ab.", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_only_what_may_become_a_stop_string_is_held(text: str, stops: list[str]):
    checker, so_far = StopStrings(stops), ""
    for end in range(1, len(text) + 1):
        so_far += checker.add(text[end - 1 : end])
        if checker.matched is not None:
            return
        tails = [k for stop in stops for k in range(1, len(stop)) if text[:end].endswith(stop[:k])]
        assert len(so_far) == end - max(tails, default=0)


def test_stop_string_across_pieces_never_leaks():
    """The first half of a stop string used to be streamed before the match was complete."""
    parts, matched = shown(StopStrings(["DEFGHIJ"]), "ABCDEFGHIJK", [1, 2, 3, 4, 6, 8])
    assert (parts, matched) == (["A", "B", "C", "", "", "", ""], "DEFGHIJ")


def test_ignored_text_does_not_stop_but_a_match_may_begin_in_it():
    checker = StopStrings(["end"])
    assert checker.add("the end", is_ignored=True) == "the end"
    assert checker.add(" e", is_ignored=True) == " "
    assert checker.add("nd") == ""
    assert checker.matched == "end"
    again = StopStrings(["aa"])
    assert again.add("aa", is_ignored=True) == "a"
    assert again.add("b") == "ab"
    assert again.matched is None
