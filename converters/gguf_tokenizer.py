"""A tokenizer built of a GGUF file's `tokenizer.ggml.*` metadata, without the model's original folder."""

from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from converters.gguf import open_shards
from converters.gguf_pretokenizers import pre_tokenizer, rule_named
from jaxllm.errors import CheckpointError

MODELS = ("gpt2", "llama")
_SPACE = "▁"
_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator", "mask": "mask"}
_ENDS = ("eot", "eom")


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class GGUFVocabulary:
    """The vocabulary of a file, checked.

    Attributes:
        tokens: text of each token id.
        types: TokenType of each token id.
        scores: SentencePiece score of each token id; empty for byte-level BPE.
        merges: "left right" in order of rank; empty for SentencePiece.
        special_ids: token id by role: bos, eos, unk, pad, sep, mask.
        end_ids: further ids that end a turn.
    """

    tokens: list[str]
    types: list[int]
    scores: list[float]
    merges: list[str]
    special_ids: dict[str, int]
    end_ids: list[int]

    def added_tokens(self, rstrip: bool = False) -> list[AddedToken]:
        """The tokens that are found in text before anything else and are never split, by id.

        `rstrip`: control tokens swallow the white space after them.
        """
        special = {*self.special_ids.values(), *self.end_ids}
        added = []
        for i, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            control = kind in (TokenType.CONTROL, TokenType.UNKNOWN) or i in special
            if control or kind == TokenType.USER_DEFINED:
                strip = rstrip and kind == TokenType.CONTROL and token not in ("<s>", "<|endoftext|>")
                added.append(AddedToken(token, special=control, normalized=False, rstrip=strip))
        return added


def tokenizer_from_gguf(path: Path | str) -> PreTrainedTokenizerFast:
    """The tokenizer of a GGUF model, chat template included.

    Special tokens in text are recognised and never split; `add_special_tokens` puts BOS and EOS as the file's
    `add_bos_token` and `add_eos_token` say.

    Raises:
        CheckpointError: no tokenizer in the file, or a kind of tokenizer or splitting rule that is not known.
    """
    path = Path(path)
    metadata = open_shards(path)[0].metadata
    model = metadata.get("tokenizer.ggml.model")
    if model is None:
        raise CheckpointError(f"{path} holds no tokenizer (no tokenizer.ggml.model); give one with --tokenizer")
    vocabulary = _vocabulary(path, metadata)
    if model == "gpt2":
        rule_name = metadata.get("tokenizer.ggml.pre", "default")
        try:
            rule = rule_named(rule_name)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None
        tokenizer, add_bos = _byte_level(vocabulary, rule_name), rule.add_bos
    elif model == "llama":
        tokenizer, add_bos = _sentencepiece(vocabulary, metadata), True
    else:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.model {model!r} is not supported; supported: {', '.join(MODELS)}"
        )
    return _wrap(tokenizer, vocabulary, metadata, add_bos)


def _vocabulary(path: Path, metadata: dict[str, Any]) -> GGUFVocabulary:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise CheckpointError(f"{path} holds no tokenizer.ggml.tokens; give a tokenizer with --tokenizer")
    # Padding entries may be empty; each needs a text of its own.
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
    if len(set(tokens)) != len(tokens):
        seen: dict[str, int] = {}
        twice = next((t, seen[t], i) for i, t in enumerate(tokens) if seen.setdefault(t, i) != i)
        raise CheckpointError(f"{path}: token {twice[0]!r} has two ids, {twice[1]} and {twice[2]}")
    types = metadata.get("tokenizer.ggml.token_type") or [int(TokenType.NORMAL)] * len(tokens)
    scores = metadata.get("tokenizer.ggml.scores") or []
    for name, values in (("token_type", types), ("scores", scores)):
        if values and len(values) < len(tokens):
            raise CheckpointError(f"{path}: tokenizer.ggml.{name} has {len(values)} entries for {len(tokens)} tokens")

    def ids(keys: Any) -> dict[str, int]:
        found = {role: metadata.get(f"tokenizer.ggml.{key}_token_id") for role, key in keys}
        return {role: i for role, i in found.items() if i is not None and 0 <= i < len(tokens)}

    return GGUFVocabulary(
        tokens=tokens,
        types=types[: len(tokens)],
        scores=scores[: len(tokens)],
        merges=metadata.get("tokenizer.ggml.merges") or [],
        special_ids=ids(_NAMED.items()),
        end_ids=list(ids((key, key) for key in _ENDS).values()),
    )


def _byte_level(vocabulary: GGUFVocabulary, rule_name: str) -> Tokenizer:
    """Byte-level BPE: every byte has a letter, so nothing is unknown."""
    rule = rule_named(rule_name)
    merges = []
    for merge in vocabulary.merges:
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=rule.ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizer(rule)
    tokenizer.decoder = decoders.ByteLevel()
    _add(tokenizer, vocabulary.added_tokens())
    return tokenizer


def _sentencepiece(vocabulary: GGUFVocabulary, metadata: dict[str, Any]) -> Tokenizer:
    """SentencePiece BPE: pieces merge by score, characters without a piece fall back to bytes."""
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    unknown = vocabulary.special_ids.get("unk")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=_merges_by_score(vocabulary),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=TokenType.BYTE in vocabulary.types,
        )
    )
    space_first = metadata.get("tokenizer.ggml.add_space_prefix", True)
    prefix = [normalizers.Prepend(_SPACE)] if space_first else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if space_first else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    # Phi-3's chat tokens swallow the white space after them, which GGUF has no field for.
    rstrip = metadata.get("general.architecture") == "phi3"
    _add(tokenizer, vocabulary.added_tokens(rstrip=rstrip))
    return tokenizer


def _merges_by_score(vocabulary: GGUFVocabulary) -> list[tuple[str, str]]:
    """Every way to build a normal piece of two others, best score of the result first.

    SentencePiece merges whatever pair makes the best-scored piece, so the rank of a pair is the score of what
    it makes. Control and user-defined pieces are matched in the text itself and never merged.
    """
    scores = {
        token: vocabulary.scores[i] if vocabulary.scores else -float(i)
        for i, token in enumerate(vocabulary.tokens)
        if vocabulary.types[i] == TokenType.NORMAL
    }
    merges = []
    for token, score in scores.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in scores and right in scores:
                merges.append((-score, -len(left), left, right))
    merges.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in merges]


def _add(tokenizer: Tokenizer, added: list[AddedToken]) -> None:
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])


def _wrap(
    tokenizer: Tokenizer, vocabulary: GGUFVocabulary, metadata: dict[str, Any], add_bos: bool
) -> PreTrainedTokenizerFast:
    named = {f"{role}_token": vocabulary.tokens[i] for role, i in vocabulary.special_ids.items()}
    architecture = metadata.get("general.architecture")
    context = metadata.get(f"{architecture}.context_length")
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", add_bos)
    # transformers copies what it wraps, seconds for a large vocabulary; this one is wrapped once and let go.
    vars(tokenizer)["__deepcopy__"] = lambda _: tokenizer
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        add_bos_token=add_bos and "bos" in vocabulary.special_ids,
        add_eos_token=metadata.get("tokenizer.ggml.add_eos_token", False) and "eos" in vocabulary.special_ids,
        clean_up_tokenization_spaces=False,
        **({"model_max_length": context} if context else {}),
        **named,
    )
    del vars(tokenizer)["__deepcopy__"]
    template = _chat_template(metadata)
    if template is not None:
        wrapped.chat_template = template
    return wrapped


def _chat_template(metadata: dict[str, Any]) -> str | dict[str, str] | None:
    """The chat template, or all of them by name if the file has more than one."""
    default = metadata.get("tokenizer.chat_template")
    prefix = "tokenizer.chat_template."
    others = {key.removeprefix(prefix): text for key, text in metadata.items() if key.startswith(prefix)}
    if not others:
        return default
    return others if default is None else {"default": default} | others
