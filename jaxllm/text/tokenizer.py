"""Tokenizer: a thin, thread-safe wrapper of a transformers tokenizer, and loading one from a folder."""

import logging
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that torch is missing is no fault here

import transformers
from transformers import PreTrainedTokenizerBase

from jaxllm.errors import CheckpointError, RequestError
from jaxllm.text.pieces import TokenPieces, token_pieces

_LOG = logging.getLogger(__name__)

TOKENIZER_MODES = ("auto", "hf", "slow")
_PROBE = "Hello, world! It's 3.14 - naïve\n\n  日本 👩‍👩‍👧 [x] </y>."


class Tokenizer:
    """Text to token ids and back.

    Every method may be called from any thread: a fast tokenizer changes its truncation state while it
    encodes, so calls into transformers take a lock; text of single tokens comes from a cache.

    Attributes:
        hf: the wrapped transformers tokenizer.
        pieces: bytes of each token, or None where the decoder does not work token by token.
        special_ids: tokens that skip_special_tokens leaves out.
        added_ids: tokens added to the vocabulary by hand, special or not.
    """

    def __init__(self, hf: PreTrainedTokenizerBase):
        self.hf = hf
        self._lock = threading.RLock()
        added: dict[int, Any] = dict(hf.added_tokens_decoder)
        self.added_ids = frozenset(added)
        special = {token for token, entry in added.items() if entry.special}
        # The Rust decoder skips by the added token's flag; the Python one by the named special tokens.
        self.special_ids = frozenset(special if hf.is_fast else special | set(hf.all_special_ids))
        self._texts: dict[int, str | None] = {}
        self.pieces = token_pieces(hf)
        if self.pieces is not None and not self._pieces_agree(self.pieces):
            self.pieces = None

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's embedding may have more rows."""
        return len(self.hf)

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token that starts a text, if there is one."""
        return _single_id(self.hf.bos_token_id)

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends a text, if there is one."""
        return _single_id(self.hf.eos_token_id)

    def encode(self, text: str, add_special_tokens: bool = True, truncation: int | None = None) -> list[int]:
        """Token ids of `text`.

        Args:
            text: any text; names of special tokens in it become these tokens.
            add_special_tokens: add BOS and the like as the tokenizer's post-processor says.
            truncation: keep at most this many tokens, the last ones; added special tokens count and stay.

        Raises:
            RequestError: the text holds a lone surrogate, so it is not Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            bad = text[error.start]
            raise RequestError(
                f"the text holds a lone surrogate ({bad!r} at {error.start}), which is not valid Unicode.", "prompt"
            ) from None
        with self._lock:
            if truncation is None:
                return self._call(text, add_special_tokens=add_special_tokens)
            side = self.hf.truncation_side
            self.hf.truncation_side = "left"
            try:
                return self._call(text, add_special_tokens=add_special_tokens, truncation=True, max_length=truncation)
            finally:
                self.hf.truncation_side = side

    def _pieces_agree(self, pieces: TokenPieces) -> bool:
        """False for a tokenizer whose own decode does more than its decoder says."""
        tokens = [t for t in self.encode(_PROBE, add_special_tokens=False) if t not in self.special_ids]
        data = b"".join(pieces.get(t) if i else pieces.first(t) for i, t in enumerate(tokens))
        text = data.decode("utf-8", "replace")
        for _ in range(pieces.strip_left):
            text = text.removeprefix(" ")
        return text == self.decode(tokens)

    def _call(self, text: str, **options: Any) -> list[int]:
        # verbose=False: a text longer than the tokenizer's own maximum is judged by the caller.
        ids: Any = self.hf(text, return_attention_mask=False, verbose=False, **options)["input_ids"]
        return list(ids)

    def decode(
        self,
        tokens: Iterable[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Text of `tokens`. Spaces are never tidied up afterwards, so that pieces join to the whole."""
        options: dict[str, Any] = {}
        if not self.hf.is_fast:
            options["spaces_between_special_tokens"] = spaces_between_special_tokens
        with self._lock:
            text = self.hf.decode(
                list(tokens),
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=False,
                **options,
            )
        assert isinstance(text, str)  # a list comes back for a list of lists only
        return text

    def token_string(self, token: int) -> str:
        """The vocabulary entry of `token` as it is stored ("Ġthe", "▁the", "<0x0A>"), or ""."""
        with self._lock:
            name = self.hf.convert_ids_to_tokens(token)
        return name if isinstance(name, str) else ""

    def token_bytes(self, token: int) -> bytes:
        """Bytes of `token` inside a text; halves of a character are possible."""
        if self.pieces is not None:
            return self.pieces.get(token)
        return self.decode([token], skip_special_tokens=False).encode("utf-8", "replace")

    def token_text(self, token: int) -> str | None:
        """Text of `token` inside a text; None when it is not whole characters."""
        try:
            return self._texts[token]
        except KeyError:
            pass
        try:
            text = self.token_bytes(token).decode()
        except UnicodeDecodeError:
            text = None
        if self.pieces is None and text and "\ufffd" in text:
            text = None
        self._texts[token] = text
        return text

    def bad_word_token_ids(self, words: Sequence[str]) -> list[list[int]]:
        """Token sequences of `words`, each as it starts a text and as it follows a space."""
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.lstrip() or word
            for text in (bare, f" {bare}"):
                if tokens := self.encode(text, add_special_tokens=False):
                    sequences[tuple(tokens)] = None
        return [list(tokens) for tokens in sequences]

    def longest_token(self) -> int:
        """Characters of the longest vocabulary entry: an upper bound of the text one token stands for."""
        with self._lock:
            return max((len(name) for name in self.hf.get_vocab()), default=1)


def load_tokenizer(
    path: str | Path,
    *,
    mode: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> Tokenizer:
    """Load the tokenizer of a model folder. Nothing is downloaded.

    Args:
        path: a folder with the tokenizer's files.
        mode: "auto", "hf" or "slow". transformers 5 has one tokenizer for each model, which all three
            give; with "slow" a warning says when that one is fast.
        revision: passed on to code loaded from the folder.
        trust_remote_code: run tokenizer code found in the folder.
        options: further arguments of AutoTokenizer.from_pretrained.

    Raises:
        CheckpointError: no tokenizer in the folder, or it cannot be loaded.
        ValueError: an unknown mode.
    """
    folder = Path(path)
    if mode not in TOKENIZER_MODES:
        raise ValueError(f"tokenizer_mode must be one of {', '.join(TOKENIZER_MODES)}, got {mode!r}")
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder with a tokenizer")
    if not trust_remote_code and _is_bare(folder):
        # No configuration says which class it is: the file alone is a whole fast tokenizer.
        return Tokenizer(transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json")))
    try:
        hf = transformers.AutoTokenizer.from_pretrained(
            str(folder),
            revision=revision or "main",
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            **options,
        )
    except Exception as error:  # transformers raises many kinds, also for a config.json beside it that is wrong
        raise CheckpointError(f"cannot load the tokenizer of {folder}: {type(error).__name__}: {error}") from error
    if mode == "slow" and hf.is_fast:
        _LOG.warning('tokenizer_mode "slow": transformers has only the fast %s', type(hf).__name__)
    return Tokenizer(hf)


def _is_bare(folder: Path) -> bool:
    """True for a folder with a tokenizer.json but neither tokenizer_config.json nor config.json."""
    names = ("tokenizer.json", "tokenizer_config.json", "config.json")
    has = {name: (folder / name).is_file() for name in names}
    return has["tokenizer.json"] and not (has["tokenizer_config.json"] or has["config.json"])


def _single_id(value: Any) -> int | None:
    # Some tokenizers keep a list of EOS ids here.
    if isinstance(value, (list, tuple)):
        return value[0] if value else None
    return value
