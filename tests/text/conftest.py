"""Tiny tokenizers of the kinds models use, trained here on a few lines."""

import json

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast

from jaxllm.text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, doesn't it? It's 3.14!",
    "Здравствуй, мир! 你好,世界。 こんにちは 삼겹살 ďábelské 𠮷野家 naïve café",
    "👩‍👩‍👧 family 🏳️‍🌈 flag 👍🏽 thumbs 😀😀 <tag> x = [1, 2];\n\n    return x",
] * 3
SPECIAL = ["<s>", "</s>", "<|end|>"]
TAGS = ["<tool>", "[NAME]"]
"""Added tokens that are not special."""


def _wrap(backend: RustTokenizer, **names: str) -> Tokenizer:
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    names = {"bos_token": "<s>", "eos_token": "</s>", **names}
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, **names))


def byte_level_bpe() -> Tokenizer:
    """GPT-2's kind: the pieces are bytes."""
    backend = RustTokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, show_progress=False, initial_alphabet=alphabet)
    backend.train_from_iterator(CORPUS, trainer)
    return _wrap(backend)


def byte_fallback_bpe() -> Tokenizer:
    """Llama 2's kind: ▁ for spaces, a dummy leading one, unknown characters as <0xNN>."""
    trained = RustTokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    ascii_only = [line.encode("ascii", "ignore").decode() for line in CORPUS]
    trained.train_from_iterator(ascii_only, trainers.BpeTrainer(vocab_size=200, show_progress=False))
    state = trained.model.__getstate__()
    backend = RustTokenizer(_with_byte_tokens(state))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _wrap(backend)


def _with_byte_tokens(state: bytes) -> models.BPE:
    trained = json.loads(state)
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for token in trained["vocab"]:
        vocab.setdefault(token, len(vocab))
    merges = [tuple(merge) for merge in trained["merges"]]
    return models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)


def unigram_metaspace() -> Tokenizer:
    """T5's and XLM-R's kind: SentencePiece unigram without byte fallback."""
    backend = RustTokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=250, show_progress=False, special_tokens=["<unk>"], unk_token="<unk>")
    backend.train_from_iterator(CORPUS, trainer)
    return _wrap(backend)


def word_piece() -> Tokenizer:
    """BERT's kind: ## for continuations, spaces made by the decoder."""
    backend = RustTokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, show_progress=False, special_tokens=["[UNK]"])
    backend.train_from_iterator(CORPUS, trainer)
    return _wrap(backend, unk_token="[UNK]")


def suffix_bpe() -> Tokenizer:
    """A decoder that looks at the neighbours (</w> at word ends): pieces are unknown, windows are used."""
    backend = RustTokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=300, show_progress=False, special_tokens=["<unk>"], end_of_word_suffix="</w>"
    )
    backend.train_from_iterator(CORPUS, trainer)
    return _wrap(backend)


@pytest.fixture(scope="session")
def tiny() -> dict[str, Tokenizer]:
    """Every kind by name; all but "suffix_bpe" have known pieces."""
    makers = (byte_level_bpe, byte_fallback_bpe, unigram_metaspace, word_piece, suffix_bpe)
    return {make.__name__: make() for make in makers}
