"""Token ids to text as they come: whole characters only, and stop strings that never leak.

The work per token is constant: a token's text is looked up, not decoded with its neighbours. The joined
pieces equal the decoding of all tokens, however they were cut.
"""

import codecs
from collections.abc import Sequence

from jaxllm.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_WINDOW_PROMPT_TOKENS = 6
"""Prompt tokens that give a windowed detokenizer its context."""
_MAX_WINDOW = 16
"""Tokens a windowed detokenizer waits for a character to become whole; no character has more bytes."""


class Detokenizer:
    """Text of one sequence, token by token, for tokenizers whose pieces are known.

    Bytes of an unfinished character are kept until it is whole; `finish` gives them up as one U+FFFD.
    The text continues the prompt: the first token keeps its leading space unless the prompt shows no text.

    Args:
        tokenizer: with `pieces`.
        prompt_tokens: what the output continues.
        skip_special_tokens: special tokens give no text.
        spaces_between_special_tokens: False drops the space a decoder puts between two added tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_tokens: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ):
        assert tokenizer.pieces is not None
        self._tokenizer = tokenizer
        self._pieces = tokenizer.pieces
        self._text_of = tokenizer.token_text
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._joins_added = not (skip_special_tokens or spaces_between_special_tokens)
        self._last_is_added = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_first = all(token in self._skipped for token in prompt_tokens)
        self._strip_left = self._pieces.strip_left if self._is_first else 0
        self._has_own_bytes = False
        self._prime(prompt_tokens)
        self._is_slow = self._needs_slow_path()

    @property
    def pending(self) -> bytes:
        """Bytes of the unfinished character, if any."""
        return self._decoder.getstate()[0] if self._is_slow else b""

    def add(self, token: int) -> str:
        """The text that `token` makes certain; "" while a character is unfinished."""
        if token in self._skipped:
            return ""
        if not self._is_slow:
            text = self._text_of(token)
            if text is not None:
                return text
        return self._add_bytes(token)

    def finish(self) -> str:
        """What is left at the end: one U+FFFD for an unfinished character, else ""."""
        text = self._decoder.decode(b"", final=True)
        return text if self._has_own_bytes else ""

    def _add_bytes(self, token: int) -> str:
        text = self._decoder.decode(self._piece(token))
        while self._strip_left and text.startswith(" "):
            text = text[1:]
            self._strip_left -= 1
        if text:
            self._strip_left = 0
        self._is_first = False
        self._has_own_bytes = True
        self._is_slow = self._needs_slow_path()
        return text

    def _piece(self, token: int) -> bytes:
        if self._joins_added:
            is_added = token in self._tokenizer.added_ids
            joins, self._last_is_added = is_added and self._last_is_added, is_added
            if joins:
                return self._tokenizer.token_string(token).encode()
        return self._pieces.first(token) if self._is_first else self._pieces.get(token)

    def _needs_slow_path(self) -> bool:
        is_partial = bool(self._decoder.getstate()[0])
        return self._joins_added or self._is_first or self._strip_left > 0 or is_partial

    def _prime(self, prompt_tokens: Sequence[int]) -> None:
        """Take over a character that the prompt's last tokens began; none has more than three bytes open."""
        if self._is_first or self._text_of(prompt_tokens[-1]) is not None:
            return
        for token in prompt_tokens[-3:]:
            if token not in self._skipped:
                self._decoder.decode(self._pieces.get(token))


class WindowDetokenizer:
    """The same for tokenizers that only decode whole lists: decodes the last few tokens again each time.

    Args:
        as for Detokenizer.
    """

    pending = b""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_tokens: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ):
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._spaces = spaces_between_special_tokens
        self._window = list(prompt_tokens[-_WINDOW_PROMPT_TOKENS:])
        self._num_read = len(self._window)
        self._read_text = self._decode(self._window)

    def add(self, token: int) -> str:
        """The text that `token` makes certain; "" while a character is unfinished."""
        if self._skip and token in self._tokenizer.special_ids:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        is_partial = text.endswith(_REPLACEMENT) and len(self._window) - self._num_read < _MAX_WINDOW
        if is_partial or len(text) <= len(self._read_text):
            return ""
        new = text[len(self._read_text) :]
        self._window = self._window[self._num_read :]
        self._num_read = len(self._window)
        self._read_text = self._decode(self._window)
        return new

    def finish(self) -> str:
        """What is left at the end, an unfinished character as one U+FFFD."""
        rest = self._decode(self._window)[len(self._read_text) :]
        whole = rest.rstrip(_REPLACEMENT)
        return rest if whole == rest else whole + _REPLACEMENT

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, self._skip, self._spaces)


def make_detokenizer(
    tokenizer: Tokenizer,
    prompt_tokens: Sequence[int] = (),
    *,
    skip_special_tokens: bool = True,
    spaces_between_special_tokens: bool = True,
) -> Detokenizer | WindowDetokenizer:
    """The detokenizer for one sequence: by pieces where they are known, else by window."""
    kind = WindowDetokenizer if tokenizer.pieces is None else Detokenizer
    return kind(
        tokenizer,
        prompt_tokens,
        skip_special_tokens=skip_special_tokens,
        spaces_between_special_tokens=spaces_between_special_tokens,
    )


class StopStrings:
    """Finds stop strings in text that comes in pieces, and holds back only what may still become one.

    The match that ends first counts; of several that end together the longest. So the result does not
    depend on how the text was cut.

    Args:
        stops: non-empty strings.
        include: leave the matched string in the text.
    """

    def __init__(self, stops: Sequence[str], include: bool = False):
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self._num_ignored = 0
        self.matched: str | None = None

    def add(self, text: str, is_ignored: bool = False) -> str:
        """Take new text, give back what may be shown. Sets `matched` when a stop string is complete.

        Args:
            text: new text.
            is_ignored: a match that ends within `text` does not count (the sequence is still too short).
        """
        window = self._held + text
        if is_ignored:
            self._num_ignored = len(window)
        elif found := self._find(window):
            start, self.matched = found
            self._held = ""
            return window[: start + len(self.matched)] if self._include else window[:start]
        num_held = self._num_held(window)
        cut = len(window) - num_held
        self._held = window[cut:]
        self._num_ignored = max(0, self._num_ignored - cut)
        return window[:cut]

    def finish(self) -> str:
        """The text held back, once nothing more comes."""
        held, self._held = self._held, ""
        return held

    def _find(self, window: str) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            # It must end behind the ignored part.
            start = window.find(stop, max(0, self._num_ignored - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return best and (best[1], best[2])

    def _num_held(self, window: str) -> int:
        """Length of the longest suffix of `window` that begins a stop string."""
        longest = 0
        for stop in self._stops:
            # Only a suffix shorter than the stop string, and longer than the best one, is of interest.
            start = max(0, len(window) - len(stop) + 1)
            while 0 <= (start := window.find(stop[0], start)) < len(window) - longest:
                if stop.startswith(window[start:]):
                    longest = len(window) - start
                    break
                start += 1
        return longest
