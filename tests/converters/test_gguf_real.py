"""The small real models, where their files are: SmolLM2-135M-Instruct (the default model) and Gemma 3 270M.

Files are looked for in the folder the environment variable JAXLLM_TEST_MODELS names, else where the default model
is kept (`python -m converters.default_model` puts it there).
"""

import os
import random
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from sentencepiece import SentencePieceProcessor
from sentencepiece import sentencepiece_model_pb2 as model_proto
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from converters import describe_model, load_model, resolve_model
from converters.default_model import FILE_NAME, default_model_path
from converters.gguf import GGUFCheckpoint
from converters.gguf_config import generation_config_from_gguf, hf_config_from_gguf
from converters.gguf_tokenizer import tokenizer_from_gguf
from jaxllm.batch import AttentionPlan, StepBatch
from jaxllm.cache.kv_pages import group_windows
from jaxllm.sharding import make_mesh

SMOLLM2, GEMMA3 = FILE_NAME, "gemma-3-270m-q4_k_m.gguf"
NASTY = [
    "Hello world! Café déjà vu — 123 😊 <special>",
    "삼겹살 ďábelské 𠮷",
    "  leading and   runs    of  spaces  ",
    "tabs\t\tand\nnewlines\n\n\nend\r\n",
    "def f(x):\n    return x**2  # ok\n\n\tif True:\n\t\tpass",
    "'s 'S don't I'LL we've 1234567890",
    "\u200b\u00a0\u3000x e\u0301 👩‍👩‍👧‍👦",
    "日本語のテキスト、漢字。 हिन्दी العربية ไทย",
]


def real_file(name: str) -> Path:
    folder = Path(os.environ.get("JAXLLM_TEST_MODELS") or default_model_path().parent)
    if not (folder / name).is_file():
        pytest.skip(f"{name} is not in {folder}")
    return folder / name


def random_texts(count: int) -> list[str]:
    generator = random.Random(0)
    ranges = ((32, 127), (0xA0, 0x250), (0x400, 0x460), (0x3040, 0x30FF), (0x4E00, 0x4E80), (0xAC00, 0xAC40))
    letters = [chr(c) for low, high in ranges for c in range(low, high)] + [" "] * 60 + ["\n"] * 10 + ["\t"] * 5
    return ["".join(generator.choices(letters, k=generator.randint(1, 60))) for _ in range(count)]


def test_smollm2_config():
    checkpoint = GGUFCheckpoint(real_file(SMOLLM2))
    config = hf_config_from_gguf(checkpoint)
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rope_theta": 100000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
    assert {key: config[key] for key in expected} == expected
    assert generation_config_from_gguf(checkpoint)["eos_token_id"] == [2, 0]


def test_gemma3_config():
    config = hf_config_from_gguf(GGUFCheckpoint(real_file(GEMMA3)))
    expected = {
        "architectures": ["Gemma3ForCausalLM"],
        "vocab_size": 262144,
        "head_dim": 256,
        "sliding_window": 512,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rms_norm_eps": 1e-6,
    }
    assert {key: config[key] for key in expected} == expected
    full = [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"]
    assert full == [5, 11, 17]


def test_smollm2_tokenizer():
    tokenizer = tokenizer_from_gguf(real_file(SMOLLM2))
    for text in [*NASTY, *random_texts(300)]:
        plain = tokenizer(text).input_ids
        assert tokenizer.decode(plain) == text
        assert not any(i < 17 for i in plain)  # no BOS, no control token out of plain text
    messages = [{"role": "user", "content": "hi"}]
    ids: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids[-10:] == [1, 4093, 198, 6004, 2, 198, 1, 520, 9531, 198]
    assert tokenizer.decode(ids[-10:]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(tokenizer.decode(ids)).input_ids == ids
    # Digits stand alone, and so do number signs that are not digits.
    assert tokenizer.convert_ids_to_tokens(tokenizer("12½").input_ids) == ["1", "2", "Â½"]
    assert (tokenizer.eos_token, tokenizer.pad_token, len(tokenizer)) == ("<|im_end|>", "<|im_end|>", 49152)


@pytest.mark.slow
def test_smollm2_tokenizer_equals_transformers_reading_of_the_file():
    path = real_file(SMOLLM2)
    tokenizer = tokenizer_from_gguf(path)
    # That reading leaves out the splitting of number signs, so other numbers than ASCII digits are not compared.
    reference = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    texts = [t for t in random_texts(1000) if not any(c.isnumeric() for c in t)]
    for text in [*NASTY, *texts, "<|im_start|>user\nhi<|im_end|>\n"]:
        assert tokenizer(text).input_ids == reference(text).input_ids, text


def sentencepiece_of(metadata: dict[str, Any]) -> SentencePieceProcessor:
    """SentencePiece itself, with the file's pieces and scores."""
    proto: Any = model_proto.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
    types = metadata["tokenizer.ggml.token_type"]
    for i, (token, score) in enumerate(
        zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"], strict=True)
    ):
        piece = proto.pieces.add()
        piece.piece = token.replace(" ", "▁") if types[i] == 4 else token
        piece.score = score
        piece.type = 2 if i == metadata["tokenizer.ggml.unknown_token_id"] else types[i]
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    trainer.model_type, trainer.byte_fallback = 2, True
    for role, key in (("unk", "unknown"), ("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        setattr(trainer, f"{role}_id", metadata[f"tokenizer.ggml.{key}_token_id"])
    normalizer.name = "identity"
    normalizer.add_dummy_prefix = normalizer.remove_extra_whitespaces = False
    normalizer.escape_whitespaces = True
    return SentencePieceProcessor(model_proto=proto.SerializeToString())


def test_gemma3_tokenizer():
    path = real_file(GEMMA3)
    tokenizer = tokenizer_from_gguf(path)
    reference = sentencepiece_of(GGUFCheckpoint(path).metadata)
    for text in [*NASTY, *random_texts(1000)]:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert ids == reference.encode(text), text
        assert tokenizer.decode(ids) == text
    assert tokenizer("<start_of_turn>user\n").input_ids == [2, 105, 2364, 107]


@pytest.mark.slow
@pytest.mark.parametrize("name", [SMOLLM2, GEMMA3])
def test_weights_equal_transformers_reading_of_the_file(name):
    path = real_file(name)
    checkpoint = GGUFCheckpoint(path)
    config = transformers.AutoConfig.for_model(**hf_config_from_gguf(checkpoint))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    expected = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    assert checkpoint.names() == set(expected)
    for tensor_name, weight in expected.items():
        np.testing.assert_array_equal(checkpoint.read(tensor_name), weight.numpy(), err_msg=tensor_name)


def our_logits(path: Path, tokens: np.ndarray, positions: list[int]) -> np.ndarray:
    """Logits of one prefill in float32, at some positions: file -> source -> model -> one step."""
    source = resolve_model(str(path))
    facts = describe_model(source.hf_config)
    mesh = make_mesh(1)
    model: Any = load_model(source, facts, dtype="float32", mesh=mesh).model
    T, page_size = len(tokens), 16
    num_pages = -(-T // page_size)
    windows = group_windows(facts.kv_layers)
    table = np.stack([np.arange(1, num_pages + 1), np.zeros(num_pages)]).astype(np.int32)
    batch = StepBatch(
        tokens=jnp.asarray(tokens, jnp.int32),
        positions=jnp.arange(T, dtype=jnp.int32),
        rows=jnp.zeros(T, jnp.int32),
        kv_lengths=jnp.asarray([T], jnp.int32),
        block_rows=jnp.zeros(1, jnp.int32),
        page_tables=tuple(jnp.asarray(table) for _ in windows),
        plan=AttentionPlan("reference", mesh, windows, page_size, T, False),
    )
    pages = [
        jnp.zeros((num_pages + 1, 2, layer.num_kv_heads, page_size, layer.head_dim), jnp.float32)
        for layer in facts.kv_layers
    ]
    with jax.default_matmul_precision("highest"):
        hidden, _ = model(batch, pages)
        return np.asarray(model.logits(hidden[jnp.asarray(positions)]))


def transformers_logits(path: Path, tokens: np.ndarray, positions: list[int]) -> np.ndarray:
    """The same from transformers' model class, with the file's dequantised weights."""
    checkpoint = GGUFCheckpoint(path)
    config = transformers.AutoConfig.for_model(**hf_config_from_gguf(checkpoint) | {"torch_dtype": "float32"})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    weights = {name: torch.from_numpy(np.array(checkpoint.read(name))) for name in checkpoint.names()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (set(missing) - {"lm_head.weight"}, unexpected) == (set(), [])
    with torch.no_grad():
        return model(torch.from_numpy(tokens)[None], logits_to_keep=torch.tensor(positions)).logits[0].numpy()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "length", "positions"),
    [(SMOLLM2, 64, [0, 1, 17, 40, 63]), (GEMMA3, 544, [0, 1, 100, 511, 512, 543])],  # Gemma's window is 512
)
def test_logits_equal_those_of_transformers(name, length, positions):
    path = real_file(name)
    text = "The quick brown fox jumps over the lazy dog. 삼겹살, déjà vu: def f(x): return x ** 2\n" * 40
    tokens = np.asarray(tokenizer_from_gguf(path)(text).input_ids[:length], np.int64)
    assert len(tokens) == length
    ours = our_logits(path, tokens, positions)
    expected = transformers_logits(path, tokens, positions)
    assert ours.shape == expected.shape
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    np.testing.assert_array_equal(ours.argmax(-1), expected.argmax(-1))
