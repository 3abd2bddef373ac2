"""The bytes each token stands for, read off a tokenizer's decoder, so that text can be made token by token.

A decoder that only maps tokens to bytes and joins them (byte-level BPE, SentencePiece with or without
byte fallback, WordPiece) is compiled into a function of one token. Others are not handled here.
"""

import json
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerBase

PieceFn = Callable[[str, bool], bytes]
"""(token string, is it the first token of the text) -> its bytes."""


class TokenPieces:
    """Token id -> bytes, cached. Safe to share between threads and sequences.

    Attributes:
        strip_left: spaces that are taken off the very start of a text (SentencePiece's dummy prefix).
    """

    def __init__(self, id_to_token: Callable[[int], str | None], to_bytes: PieceFn, strip_left: int = 0):
        self._id_to_token = id_to_token
        self._to_bytes = to_bytes
        self._bytes: dict[int, bytes] = {}
        self.strip_left = strip_left

    def get(self, token: int) -> bytes:
        """Bytes of `token` inside a text; b"" for an id that the tokenizer does not know."""
        piece = self._bytes.get(token)
        if piece is None:
            piece = self._bytes[token] = self._make(token, False)
        return piece

    def first(self, token: int) -> bytes:
        """Bytes of `token` as the first one of a text, before `strip_left`."""
        return self._make(token, True)

    def _make(self, token: int, is_first: bool) -> bytes:
        name = self._id_to_token(token)
        return b"" if name is None else self._to_bytes(name, is_first)


def token_pieces(hf: PreTrainedTokenizerBase) -> TokenPieces | None:
    """The pieces of a fast tokenizer; None for a slow one or a decoder that does not work token by token."""
    backend: Any = getattr(hf, "backend_tokenizer", None)
    if backend is None:
        return None
    if backend.decoder is None:
        return TokenPieces(backend.id_to_token, _spaced)
    compiled = _compile(json.loads(backend.decoder.__getstate__()))
    return compiled and TokenPieces(backend.id_to_token, *compiled)


def _compile(spec: dict[str, Any]) -> tuple[PieceFn, int] | None:
    """A decoder's JSON -> (function of one token, spaces stripped at the text's start)."""
    stages = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    steps: list[Callable[[str | bytes, bool], str | bytes]] = []
    strip_left = 0
    is_fused = False
    for stage in stages:
        kind = stage["type"]
        if kind == "Fuse":
            is_fused = True
        elif kind == "Strip" and is_fused and stage["stop"] == 0 and stage["content"] == " ":
            # After Fuse the text is one string: this strips its start, once.
            strip_left += stage["start"]
        elif not is_fused and (step := _step(stage)):
            steps.append(step)
        else:
            return None

    def to_bytes(token: str, is_first: bool) -> bytes:
        value: str | bytes = token
        for step in steps:
            value = step(value, is_first)
        return value.encode("utf-8", "replace") if isinstance(value, str) else value

    return to_bytes, strip_left


def _step(stage: dict[str, Any]) -> Callable[[str | bytes, bool], str | bytes] | None:
    """One decoder stage as a function of one token; None when it is not known."""
    match stage["type"]:
        case "ByteLevel":
            return lambda value, _: _byte_level(value)
        case "ByteFallback":
            return lambda value, _: _byte_fallback(value)
        case "Replace" if "String" in stage["pattern"]:
            old, new = stage["pattern"]["String"], stage["content"]
            return lambda value, _: value.replace(old, new) if isinstance(value, str) else value
        case "Metaspace":
            mark, drop = stage["replacement"], stage["prepend_scheme"] != "never"
            return lambda value, first: (
                value.replace(mark, "" if first and drop else " ") if isinstance(value, str) else value
            )
        case "WordPiece":
            return _word_piece(stage["prefix"], stage["cleanup"])
        case "Strip":
            content, start, stop = stage["content"], stage["start"], stage["stop"]
            return lambda value, _: _strip(value, content, start, stop) if isinstance(value, str) else value
    return None


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes: character -> byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHAR = byte_level_alphabet()


def _byte_level(value: str | bytes) -> str | bytes:
    # A token with a character outside the alphabet (an added token) stands for itself.
    try:
        return bytes([_BYTE_OF_CHAR[c] for c in value]) if isinstance(value, str) else value
    except KeyError:
        return value


def _byte_fallback(value: str | bytes) -> str | bytes:
    if isinstance(value, str) and len(value) == 6 and value.startswith("<0x") and value.endswith(">"):
        try:
            return bytes([int(value[3:5], 16)])
        except ValueError:
            return value
    return value


# What the WordPiece decoder tidies inside one token, in its order.
_WORD_PIECE_TIDY = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"),
    (" do not", " don't"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip


def _word_piece(prefix: str, cleanup: bool) -> Callable[[str | bytes, bool], str | bytes]:
    def step(value: str | bytes, is_first: bool) -> str | bytes:
        if not isinstance(value, str):
            return value
        if not is_first:
            value = value.removeprefix(prefix) if value.startswith(prefix) else f" {value}"
        if cleanup:
            for old, new in _WORD_PIECE_TIDY:
                value = value.replace(old, new)
        return value

    return step


def _strip(value: str, content: str, start: int, stop: int) -> str:
    for _ in range(start):
        value = value.removeprefix(content)
    for _ in range(stop):
        value = value.removesuffix(content)
    return value


def _spaced(token: str, is_first: bool) -> bytes:
    return (token if is_first else f" {token}").encode()
