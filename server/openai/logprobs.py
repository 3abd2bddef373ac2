"""Log-probabilities in the shapes of OpenAI's and vLLM's answers."""

from collections.abc import Iterable, Sequence
from typing import Any

from jaxllm.outputs import Logprob, PositionLogprobs
from jaxllm.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


class TokenNames:
    """How tokens are spelled in an answer: their text, or `token_id:17` when the caller asked for that."""

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool):
        self._tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None

    def name(self, token: int, entry: Logprob) -> str:
        """The token's spelling."""
        return f"token_id:{token}" if self._as_ids else entry.decoded_token or ""

    def bytes_of(self, token: int) -> list[int] | None:
        """The token's bytes, which may be half of a character."""
        return None if self._tokenizer is None else list(self._tokenizer.token_bytes(token))


def chat_logprobs(positions: Iterable[tuple[int, PositionLogprobs]], num_top: int, names: TokenNames) -> dict[str, Any]:
    """`choices[].logprobs` of chat.

    Args:
        positions: the generated token and its log-probabilities, per position.
        num_top: entries in `top_logprobs`; -1 for all.
        names: spelling of tokens.
    """
    content = []
    for token, entries in positions:
        entry = _chat_entry(token, entries[token], names)
        ranked = sorted(entries.items(), key=lambda item: item[1].rank or 0)
        top = [(t, e) for t, e in ranked if num_top < 0 or (e.rank or 0) <= num_top]
        entry["top_logprobs"] = [_chat_entry(t, e, names) for t, e in top]
        content.append(entry)
    return {"content": content}


class CompletionLogprobs:
    """`choices[].logprobs` of completions, whose `text_offset` counts on from chunk to chunk."""

    def __init__(self, names: TokenNames):
        self._names = names
        self._offset = 0

    def format(self, tokens: Sequence[int], positions: Sequence[PositionLogprobs | None]) -> dict[str, Any]:
        """The block for some tokens, which follow those of the last call."""
        offsets: list[int] = []
        values: list[float | None] = []
        spelled: list[str] = []
        tops: list[dict[str, float] | None] = []
        for token, entries in zip(tokens, positions, strict=True):
            offsets.append(self._offset)
            if entries is None:
                spelled.append(self._names.name(token, Logprob(0.0, None, self._text(token))))
                values.append(None)
                tops.append(None)
                self._offset += len(self._text(token))
                continue
            spelled.append(self._names.name(token, entries[token]))
            values.append(max(entries[token].logprob, LOWEST))
            top: dict[str, float] = {}
            for other, entry in entries.items():
                # Different tokens may be spelled alike; the first is the chosen or the likelier one.
                top.setdefault(self._names.name(other, entry), max(entry.logprob, LOWEST))
            tops.append(top)
            self._offset += len(entries[token].decoded_token or "")
        return {"text_offset": offsets, "token_logprobs": values, "tokens": spelled, "top_logprobs": tops}

    def _text(self, token: int) -> str:
        data = self._names.bytes_of(token)
        return bytes(data).decode("utf-8", "ignore") if data is not None else ""


def prompt_logprobs(positions: Sequence[PositionLogprobs | None] | None) -> list[Any] | None:
    """`prompt_logprobs` of both APIs: one object per prompt token, null at the first."""
    if positions is None:
        return None
    return [
        entries
        and {
            str(token): {
                "logprob": max(entry.logprob, LOWEST),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token, entry in entries.items()
        }
        for entries in positions
    ]


def _chat_entry(token: int, entry: Logprob, names: TokenNames) -> dict[str, Any]:
    return {
        "token": names.name(token, entry),
        "logprob": max(entry.logprob, LOWEST),
        "bytes": names.bytes_of(token),
    }
