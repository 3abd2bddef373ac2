"""Tokenizers from GGUF metadata against SentencePiece, `tokenizers`' own parts and splits written by hand."""

import io
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2 as model_proto
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from converters.gguf_pretokenizers import RULES, pre_tokenizer, rule_named
from converters.gguf_tokenizer import tokenizer_from_gguf
from jaxllm.errors import CheckpointError

NASTY = [
    "Hello world! Café déjà vu — 123 😊 <special>",
    "삼겹살 ďábelské 𠮷",
    "  leading and   runs    of  spaces  ",
    "tabs\t\tand\nnewlines\n\n\nend\r\n",
    "def f(x):\n    return x**2  # ok\n\n\tif True:\n\t\tpass",
    "1234567890 3.14 ½ ² ٣٤",
    "'s 'S don't I'LL we've",
    "a" * 50,
    "",
    " ",
    "\u200b\u00a0\u3000x",
    "👩‍👩‍👧‍👦🏳️‍🌈 ﬁ ſ İ ǅ e\u0301",
    "日本語のテキスト、漢字。 हिन्दी বাংলা العربية עברית ไทย",
    "\x01\x7f",
]
CORPUS = [
    "the quick brown fox jumps over the lazy dog and the dog sleeps",
    "def main():\n    return 12345 + 67890  # numbers, words and spaces\n",
    "Hello world! Café déjà vu, mañana, naïve; ďábelské ódy. 삼겹살 맛있다",
    "    indented    text\twith\ttabs and don't we've I'll",
    "日本語のテキストと漢字、日本語の文章。",
] * 4


def random_texts(count: int) -> list[str]:
    generator = random.Random(0)
    ranges = ((33, 127), (0xA0, 0x180), (0x3040, 0x3080), (0xAC00, 0xAC20), (0x1F600, 0x1F620))
    letters = [chr(c) for low, high in ranges for c in range(low, high)]
    letters += [" "] * 60 + ["\n"] * 10 + ["\t"] * 5 + list("0123456789") * 3 + list("the lazy dog") * 8
    return ["".join(generator.choices(letters, k=generator.randint(1, 40))) for _ in range(count)]


TEXTS = NASTY + random_texts(300)


def write(
    path: Path, model: str, tokens: list[str], types: list[int], architecture: str = "llama", **values: Any
) -> Path:
    out = gguf.GGUFWriter(path, architecture)
    out.add_context_length(128)
    out.add_tokenizer_model(model)
    out.add_token_list(tokens)
    out.add_token_types(types)
    for key, value in values.items():
        getattr(out, f"add_{key}")(value)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


# --- byte-level BPE -----------------------------------------------------------------------------------------


def trained_bpe(rule_name: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=rule_named(rule_name).ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizer(rule_named(rule_name))
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def bpe_file(path: Path, rule_name: str, **values: Any) -> tuple[Path, Tokenizer]:
    """A file of a freshly trained vocabulary, with <s>, </s> and a user-defined token behind it."""
    tokenizer = trained_bpe(rule_name)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [" ".join(pair) for pair in model["merges"]]
    types = [1] * len(tokens) + [3, 3, 4]
    base = len(tokens)
    keys = {
        "tokenizer_pre": rule_name,
        "token_merges": merges,
        "bos_token_id": base,
        "eos_token_id": base + 1,
    }
    write(path, "gpt2", [*tokens, "<s>", "</s>", "<tool call>"], types, **(keys | values))
    return path, tokenizer


@pytest.mark.parametrize("rule_name", ["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken", "gpt-4o", "default"])
def test_bpe_ids_are_those_of_the_tokenizer_it_was_made_of(tmp_path, rule_name):
    path, trained = bpe_file(tmp_path / "m.gguf", rule_name)
    tokenizer = tokenizer_from_gguf(path)
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert ids == trained.encode(text).ids, text
        assert tokenizer.decode(ids) == text


def test_special_tokens_are_whole_and_skipped_on_demand(tmp_path):
    path, trained = bpe_file(tmp_path / "m.gguf", "llama-bpe", add_bos_token=False)
    tokenizer = tokenizer_from_gguf(path)
    base = trained.get_vocab_size()
    ids = tokenizer("the<s>lazy<tool call> dog</s>").input_ids
    expected = [
        *trained.encode("the").ids,
        base,
        *trained.encode("lazy").ids,
        base + 2,
        *trained.encode(" dog").ids,
        base + 1,
    ]
    assert ids == expected
    assert tokenizer.decode(ids) == "the<s>lazy<tool call> dog</s>"
    # A control token is skipped, a user-defined one is text.
    assert tokenizer.decode(ids, skip_special_tokens=True) == "thelazy<tool call> dog"
    assert (tokenizer.bos_token, tokenizer.eos_token, len(tokenizer)) == ("<s>", "</s>", base + 3)
    assert tokenizer.model_max_length == 128


@pytest.mark.parametrize(
    ("rule_name", "flags", "first", "last"),
    [
        ("llama-bpe", {}, True, False),  # these vocabularies start with BOS unless the file says otherwise
        ("llama-bpe", {"add_bos_token": False}, False, False),
        ("gpt-2", {}, False, False),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, True, True),
    ],
)
def test_bos_and_eos_flags(tmp_path, rule_name, flags, first, last):
    path, trained = bpe_file(tmp_path / "m.gguf", rule_name, **flags)
    base = trained.get_vocab_size()
    ids = trained.encode("the dog").ids
    expected = [base] * first + ids + [base + 1] * last
    tokenizer = tokenizer_from_gguf(path)
    assert tokenizer("the dog").input_ids == expected
    assert tokenizer("the dog", add_special_tokens=False).input_ids == ids


def test_a_whole_token_wins_over_merges_only_where_the_rule_says(tmp_path):
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "abc"]
    for rule_name, whole in (("llama-bpe", True), ("gpt-2", False)):
        keys = {"tokenizer_pre": rule_name, "token_merges": []}
        path = write(tmp_path / f"{rule_name}.gguf", "gpt2", tokens, [1] * len(tokens), **keys)
        assert (tokenizer_from_gguf(path)("abc").input_ids == [256]) is whole


def pieces(rule_name: str, text: str) -> list[str]:
    """The splits of a rule, spelled as text again."""
    spelled = [piece for piece, _ in pre_tokenizer(rule_named(rule_name)).pre_tokenize_str(text)]
    return [decoders.ByteLevel().decode([piece]) for piece in spelled]


@pytest.mark.parametrize(
    ("rule_name", "text", "expected"),
    [
        ("gpt-2", "I'LL don't 1234 x", ["I", "'", "LL", " don", "'t", " 1234", " x"]),
        ("gpt-2", "a\n\n b  c", ["a", "\n\n", " b", " ", " c"]),
        ("smollm", "in 2024, 3.5½", ["in", " ", "2", "0", "2", "4", ",", " ", "3", ".", "5", "½"]),
        ("llama-bpe", "I'LL pay 12345$!\n\n  x", ["I", "'LL", " pay", " ", "123", "45", "$!\n\n", " ", " x"]),
        ("llama-bpe", "(word _word", ["(word", " _", "word"]),
        ("qwen2", "a 1234\r\nb", ["a", " ", "1", "2", "3", "4", "\r\n", "b"]),
        ("qwen2", "हिन्दी", ["ह", "िन", "्द", "ी"]),
        ("qwen35", "हिन्दी", ["हिन्दी"]),
        ("tekken", "HelloWorld HTTPServer 12", ["Hello", "World", " HTTPServer", " ", "1", "2"]),
        ("gpt-4o", "HelloWorld's 1234 a/b\n", ["Hello", "World's", " ", "123", "4", " a", "/b", "\n"]),
        ("deepseek-v3", "abc123漢字かな!x y", ["abc", "123", "漢字かな", "!x", " y"]),
        ("deepseek-coder", "x = 42\n", ["x", " = ", "4", "2", "\n"]),
        ("default", "a+b 12345", ["a", "+", "b", " ", "123", "45"]),
        ("falcon", "`a` 12345", ["`", "a", "`", " ", "123", "45"]),
        ("bloom", "Hello, world 12", ["Hello", ",", " world", " 12"]),
        ("viking", "ab 12", ["ab", " ", "1", "2"]),
        ("superbpe", "n 1234567 m", ["n ", "1", "234", "567", " m"]),
        ("bailingmoe", "I've 12\n\n", ["I", "'ve", " ", "1", "2", "\n\n"]),
        ("seed-coder", "x != 1\n", ["x", " !=", " ", "1", "\n"]),
    ],
)
def test_splits(rule_name, text, expected):
    assert pieces(rule_name, text) == expected


@pytest.mark.parametrize("rule_name", sorted(RULES))
def test_splitting_loses_nothing(rule_name):
    for text in TEXTS:
        spelled = [piece for piece, _ in pre_tokenizer(rule_named(rule_name)).pre_tokenize_str(text)]
        assert decoders.ByteLevel().decode(spelled) == text


def test_gpt2_and_smollm_rules_equal_the_library_parts_their_models_use():
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    smollm = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    for name, reference in (("gpt-2", gpt2), ("smollm", smollm)):
        for text in TEXTS:
            ours = [piece for piece, _ in pre_tokenizer(rule_named(name)).pre_tokenize_str(text)]
            assert ours == [piece for piece, _ in reference.pre_tokenize_str(text)], (name, text)


# --- SentencePiece --------------------------------------------------------------------------------------------


def trained_sentencepiece(**options: Any) -> sentencepiece.SentencePieceProcessor:
    buffer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=buffer,
        model_type="bpe",
        vocab_size=460,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=buffer.getvalue())


def sentencepiece_file(path: Path, processor: sentencepiece.SentencePieceProcessor, **values: Any) -> Path:
    """As llama.cpp's converters write it: user-defined pieces with real spaces."""
    proto: Any = model_proto.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
    proto.ParseFromString(processor.serialized_model_proto())
    user_defined = 4  # of the type numbers, which SentencePiece and GGUF share
    tokens = [p.piece.replace("▁", " ") if p.type == user_defined else p.piece for p in proto.pieces]
    keys = {
        "token_scores": [p.score for p in proto.pieces],
        "bos_token_id": processor.bos_id(),
        "eos_token_id": processor.eos_id(),
        "unk_token_id": processor.unk_id(),
        "add_space_prefix": proto.normalizer_spec.add_dummy_prefix,
    }
    return write(path, "llama", tokens, [p.type for p in proto.pieces], **(keys | values))


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_ids(tmp_path, prefix):
    processor = trained_sentencepiece(add_dummy_prefix=prefix)
    tokenizer = tokenizer_from_gguf(sentencepiece_file(tmp_path / "m.gguf", processor))
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert ids == processor.encode(text), text
        assert tokenizer.decode(ids) == text


def test_user_defined_pieces_are_found_first(tmp_path):
    symbols = ["▁▁", "▁▁▁", "▁▁▁▁", "\n\n", "<mark>", "the▁lazy"]
    processor = trained_sentencepiece(add_dummy_prefix=False, user_defined_symbols=symbols)
    tokenizer = tokenizer_from_gguf(sentencepiece_file(tmp_path / "m.gguf", processor))
    for text in [*TEXTS, "a<mark>b", "if x:\n\n        y", "the lazy dog", "     five"]:
        assert tokenizer(text, add_special_tokens=False).input_ids == processor.encode(text), text


def test_sentencepiece_starts_with_bos_unless_told_otherwise(tmp_path):
    processor = trained_sentencepiece()
    ids = processor.encode("the dog")
    path = sentencepiece_file(tmp_path / "a.gguf", processor)
    assert tokenizer_from_gguf(path)("the dog").input_ids == [processor.bos_id(), *ids]
    path = sentencepiece_file(tmp_path / "b.gguf", processor, add_bos_token=False, add_eos_token=True)
    assert tokenizer_from_gguf(path)("the dog").input_ids == [*ids, processor.eos_id()]
    # Control tokens named in text are those tokens.
    ids = tokenizer_from_gguf(path)("<s>the dog", add_special_tokens=False).input_ids
    assert ids == [processor.bos_id(), *processor.encode("the dog")]


def test_phi3_chat_tokens_swallow_the_white_space_after_them(tmp_path):
    processor = trained_sentencepiece(add_dummy_prefix=False, control_symbols=["<|user|>", "<|endoftext|>"])
    user, end = processor.piece_to_id("<|user|>"), processor.piece_to_id("<|endoftext|>")
    ids = processor.encode("the dog")
    for architecture, rest in (("phi3", ids), ("llama", processor.encode("\n the dog"))):
        path = sentencepiece_file(tmp_path / f"{architecture}.gguf", processor, architecture=architecture)
        tokenizer = tokenizer_from_gguf(path)
        assert tokenizer("<|user|>\n the dog", add_special_tokens=False).input_ids == [user, *rest]
    assert tokenizer_from_gguf(tmp_path / "phi3.gguf")("<|endoftext|> the").input_ids[1:] == [
        end,
        *processor.encode(" the"),
    ]


# --- the rest -------------------------------------------------------------------------------------------------


def test_chat_templates(tmp_path):
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    path, _ = bpe_file(tmp_path / "one.gguf", "gpt-2", chat_template=template)
    tokenizer = tokenizer_from_gguf(path)
    messages = [{"role": "user", "content": "the dog"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "[user]the dog"
    two = [{"name": "default", "template": template}, {"name": "tool_use", "template": "tools"}]
    path, _ = bpe_file(tmp_path / "two.gguf", "gpt-2", chat_template=two)
    tokenizer = tokenizer_from_gguf(path)
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "[user]the dog"
    assert tokenizer.apply_chat_template(messages, chat_template="tool_use", tokenize=False) == "tools"
    path, _ = bpe_file(tmp_path / "none.gguf", "gpt-2")
    assert tokenizer_from_gguf(path).chat_template is None


def test_padding_entries_without_text_get_one(tmp_path):
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "", ""]
    path = write(tmp_path / "m.gguf", "gpt2", tokens, [1] * 256 + [5, 5], tokenizer_pre="gpt-2", token_merges=[])
    assert len(tokenizer_from_gguf(path)) == 258


@pytest.mark.parametrize(
    ("model", "tokens", "keys", "message"),
    [
        ("bert", ["a"], {}, "tokenizer.ggml.model 'bert' is not supported; supported: gpt2, llama"),
        (
            "gpt2",
            ["a"],
            {"tokenizer_pre": "mystery"},
            "pre 'mystery' is not supported; supported: .*llama-bpe",
        ),
        ("gpt2", ["a", "b", "a"], {"tokenizer_pre": "gpt-2"}, "token 'a' has two ids, 0 and 2"),
        ("llama", ["a", "b"], {"token_scores": [0.5]}, "scores has 1 entries for 2 tokens"),
    ],
)
def test_errors_name_the_file(tmp_path, model, tokens, keys, message):
    path = write(tmp_path / "bad.gguf", model, tokens, [1] * len(tokens), **keys)
    with pytest.raises(CheckpointError, match=f"bad.gguf: .*{message}"):
        tokenizer_from_gguf(path)


def test_a_file_without_tokenizer(tmp_path):
    out = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        tokenizer_from_gguf(tmp_path / "m.gguf")


def test_works_where_torch_is_not_installed(tmp_path):
    path, trained = bpe_file(tmp_path / "m.gguf", "qwen2")
    program = (
        "import importlib.util, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda n, p=None: None if n.split('.')[0] == 'torch' else find(n, p)\n"
        "sys.modules['torch'] = None\n"
        "from converters.gguf_tokenizer import tokenizer_from_gguf\n"
        "print(tokenizer_from_gguf(sys.argv[1])('the lazy dog').input_ids)\n"
    )
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, cwd=root, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(trained.encode("the lazy dog").ids)
