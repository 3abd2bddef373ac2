"""GGUFFile and GGUFCheckpoint on small files written with the `gguf` package's own writer."""

from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from converters.gguf import GGUFCheckpoint
from converters.gguf_file import GGUFFile
from jaxllm.errors import CheckpointError

HEADS, KV_HEADS, HEAD_DIM, EMBED = 4, 2, 8, 256
NAME = "model.layers.0.mlp.down_proj.weight"
GGUF_NAME = "blk.0.ffn_down.weight"
PLAIN = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)


def quantizable(tensor_type: GGMLQuantizationType) -> bool:
    try:
        quantize(np.ones((1, GGML_QUANT_SIZES[tensor_type][0]), np.float32), tensor_type)
    except (NotImplementedError, TypeError):
        return False
    return True


def dequantizable(tensor_type: GGMLQuantizationType) -> bool:
    block, size = GGML_QUANT_SIZES[tensor_type]
    try:
        dequantize(np.zeros((1, size), np.uint8), tensor_type)
    except NotImplementedError:
        return False
    return block > 1


QUANTIZED = [t for t in GGMLQuantizationType if dequantizable(t)]


def writer(path: Path, architecture: str = "llama") -> gguf.GGUFWriter:
    out = gguf.GGUFWriter(path, architecture)
    out.add_head_count(HEADS)
    out.add_head_count_kv(KV_HEADS)
    return out


def finish(out: gguf.GGUFWriter) -> None:
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def write_one(path: Path, values: np.ndarray, tensor_type: GGMLQuantizationType | None = None) -> GGUFCheckpoint:
    out = writer(path)
    out.add_tensor(GGUF_NAME, values, raw_dtype=tensor_type)
    finish(out)
    return GGUFCheckpoint(path)


def random_blocks(tensor_type: GGMLQuantizationType, rows: int, columns: int) -> np.ndarray:
    """Rows of bytes that are valid blocks of any type: quantised where the package can, else arbitrary."""
    generator = np.random.default_rng(int(tensor_type))
    if quantizable(tensor_type):
        return quantize(generator.standard_normal((rows, columns), dtype=np.float32), tensor_type)
    block, size = GGML_QUANT_SIZES[tensor_type]
    return generator.integers(0, 256, (rows, columns // block * size), dtype=np.uint8)


@pytest.mark.parametrize("tensor_type", QUANTIZED, ids=lambda t: t.name)
def test_every_quantised_type_reads_as_the_package_dequantises_it(tmp_path, tensor_type):
    columns = 2 * max(256, GGML_QUANT_SIZES[tensor_type][0])
    raw = random_blocks(tensor_type, 12, columns)
    with np.errstate(all="ignore"):
        expected = dequantize(raw, tensor_type)
        checkpoint = write_one(tmp_path / "m.gguf", raw, tensor_type)
        assert checkpoint.shape(NAME) == (12, columns)
        np.testing.assert_array_equal(checkpoint.read(NAME), expected)
        # Columns inside one block, across blocks, and to the end.
        for index in ((slice(3, 7),), (slice(0, 2), slice(5, 9)), (slice(11, 12), slice(250, columns))):
            np.testing.assert_array_equal(checkpoint.read(NAME, index), expected[index])


@pytest.mark.parametrize("tensor_type", [t for t in QUANTIZED if quantizable(t)], ids=lambda t: t.name)
def test_quantised_values_are_close_to_what_was_written(tmp_path, tensor_type):
    values = np.random.default_rng(0).standard_normal((8, 512), dtype=np.float32)
    if tensor_type in (GGMLQuantizationType.TQ1_0, GGMLQuantizationType.TQ2_0):
        values = np.round(np.clip(values, -1, 1))  # made for ternary weights, which they keep exactly
    read = write_one(tmp_path / "m.gguf", quantize(values, tensor_type), tensor_type).read(NAME)
    error = np.sqrt(np.mean((read - values) ** 2))
    assert error < 0.2, error


@pytest.mark.parametrize(
    ("tensor_type", "dtype"), list(zip(PLAIN, (np.float32, np.float16, ml_dtypes.bfloat16), strict=True))
)
def test_plain_types_keep_their_dtype(tmp_path, tensor_type, dtype):
    values = np.random.default_rng(0).standard_normal((6, 10), dtype=np.float32)
    checkpoint = write_one(tmp_path / "m.gguf", quantize(values, tensor_type), tensor_type)
    read = checkpoint.read(NAME, (slice(1, 4), slice(3, 8)))
    assert read.dtype == dtype
    np.testing.assert_array_equal(read, values.astype(dtype)[1:4, 3:8])


def test_quantised_values_come_in_the_dtype_asked_for(tmp_path):
    values = np.random.default_rng(0).standard_normal((8, 64), dtype=np.float32)
    write_one(tmp_path / "m.gguf", quantize(values, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)
    exact = GGUFCheckpoint(tmp_path / "m.gguf").read(NAME)
    narrow = GGUFCheckpoint(tmp_path / "m.gguf", dtype=ml_dtypes.bfloat16).read(NAME)
    assert narrow.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(narrow, exact.astype(ml_dtypes.bfloat16))


def test_a_slice_dequantises_its_rows_only(tmp_path, monkeypatch):
    raw = random_blocks(GGMLQuantizationType.Q4_0, 64, 256)
    checkpoint = write_one(tmp_path / "m.gguf", raw, GGMLQuantizationType.Q4_0)
    seen = []

    def counting(data, tensor_type):
        seen.append(data.shape)
        return dequantize(data, tensor_type)

    monkeypatch.setattr("converters.gguf.dequantize", counting)
    assert checkpoint.read(NAME, (slice(10, 13), slice(32, 64))).shape == (3, 32)
    assert seen == [(3, GGML_QUANT_SIZES[GGMLQuantizationType.Q4_0][1])]


def test_empty_slices_and_wrong_steps(tmp_path):
    checkpoint = write_one(tmp_path / "m.gguf", np.ones((4, 32), np.float32))
    assert checkpoint.read(NAME, (slice(2, 2),)).shape == (0, 32)
    with pytest.raises(ValueError, match="step 1"):
        checkpoint.read(NAME, (slice(0, 4, 2),))
    with pytest.raises(CheckpointError, match="no tensor 'nope'"):
        checkpoint.read("nope")


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of query and key rows: the two halves of a head take turns."""
    out = np.empty_like(weight)
    size = len(weight) // heads
    for head in range(heads):
        for j in range(size // 2):
            out[head * size + 2 * j] = weight[head * size + j]
            out[head * size + 2 * j + 1] = weight[head * size + size // 2 + j]
    return out


@pytest.mark.parametrize(("part", "heads"), [("q", HEADS), ("k", KV_HEADS)])
def test_llama_rows_are_put_back_for_rotary_halves(tmp_path, part, heads):
    weight = np.random.default_rng(0).standard_normal((heads * HEAD_DIM, EMBED), dtype=np.float32)
    bias = np.arange(heads * HEAD_DIM, dtype=np.float32)
    out = writer(tmp_path / "m.gguf")
    out.add_tensor(f"blk.0.attn_{part}.weight", interleave(weight, heads))
    out.add_tensor(f"blk.0.attn_{part}.bias", interleave(bias, heads))
    finish(out)
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    name = f"model.layers.0.self_attn.{part}_proj"
    np.testing.assert_array_equal(checkpoint.read(f"{name}.weight"), weight)
    np.testing.assert_array_equal(checkpoint.read(f"{name}.bias", (slice(3, 11),)), bias[3:11])
    index = (slice(5, 13), slice(100, 200))
    np.testing.assert_array_equal(checkpoint.read(f"{name}.weight", index), weight[index])


def test_qwen2_rows_are_left_alone(tmp_path):
    weight = np.random.default_rng(0).standard_normal((32, 64), dtype=np.float32)
    out = writer(tmp_path / "m.gguf", "qwen2")
    out.add_tensor("blk.0.attn_q.weight", weight)
    finish(out)
    read = GGUFCheckpoint(tmp_path / "m.gguf").read("model.layers.0.self_attn.q_proj.weight")
    np.testing.assert_array_equal(read, weight)


def test_gpt2_weights_are_transposed_back(tmp_path):
    weight = np.random.default_rng(0).standard_normal((96, 32), dtype=np.float32)
    out = writer(tmp_path / "m.gguf", "gpt2")
    out.add_tensor("blk.0.attn_qkv.weight", weight)
    finish(out)
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    name = "transformer.h.0.attn.c_attn.weight"
    assert checkpoint.shape(name) == (32, 96)
    np.testing.assert_array_equal(checkpoint.read(name), weight.T)
    index = (slice(3, 9), slice(40, 90))
    np.testing.assert_array_equal(checkpoint.read(name, index), weight.T[index])


def test_stacked_experts_are_one_tensor_each(tmp_path):
    weight = np.random.default_rng(0).standard_normal((3, 16, 8), dtype=np.float32)
    out = writer(tmp_path / "m.gguf", "qwen3moe")
    out.add_expert_count(3)
    out.add_tensor("blk.1.ffn_gate_exps.weight", weight)
    finish(out)
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    name = "model.layers.1.mlp.experts.2.gate_proj.weight"
    assert len(checkpoint.names()) == 3
    assert checkpoint.shape(name) == (16, 8)
    np.testing.assert_array_equal(checkpoint.read(name, (slice(4, 6),)), weight[2, 4:6])


def test_shards_are_read_as_one_model(tmp_path):
    weight = np.random.default_rng(0).standard_normal((4, 64, 32), dtype=np.float32)
    out = gguf.GGUFWriter(tmp_path / "big.gguf", "llama", split_max_tensors=2)
    for i, values in enumerate(weight):
        out.add_tensor(f"blk.{i}.ffn_down.weight", values)
    finish(out)
    shards = sorted(tmp_path.glob("*.gguf"))
    assert len(shards) == 2
    for given in shards:
        checkpoint = GGUFCheckpoint(given)
        assert checkpoint.path == shards[0]
        for i, values in enumerate(weight):
            np.testing.assert_array_equal(checkpoint.read(f"model.layers.{i}.mlp.down_proj.weight"), values)
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=f"missing beside it: {shards[1].name}"):
        GGUFCheckpoint(shards[0])


def test_a_renamed_shard_says_so(tmp_path):
    out = gguf.GGUFWriter(tmp_path / "big.gguf", "llama", split_max_tensors=1)
    for i in range(2):
        out.add_tensor(f"blk.{i}.ffn_down.weight", np.ones((2, 32), np.float32))
    finish(out)
    first = min(tmp_path.glob("*.gguf")).rename(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match="one of 2 shards and was renamed"):
        GGUFCheckpoint(first)


def test_metadata_of_every_kind(tmp_path):
    path = tmp_path / "m.gguf"
    out = writer(path)
    out.add_uint8("a", 255)
    out.add_int64("b", -(1 << 40))
    out.add_float64("c", 0.1)
    out.add_bool("d", True)
    out.add_string("e", "삼겹살 𠮷")
    out.add_array("f", ["x", "", "ď"])
    out.add_array("g", [1, -2, 3])
    out.add_array("h", [])
    finish(out)
    metadata = GGUFFile(path).metadata
    assert [metadata[k] for k in "abcdefg"] == [
        255,
        -(1 << 40),
        0.1,
        True,
        "삼겹살 𠮷",
        ["x", "", "ď"],
        [1, -2, 3],
    ]


def test_every_cut_of_a_file_is_an_error_that_names_it(tmp_path):
    whole = tmp_path / "whole.gguf"
    write_one(whole, np.ones((4, 32), np.float32))
    data = whole.read_bytes()
    for length in (0, 3, 4, 10, 40, 100, len(data) // 2, len(data) - 1):
        path = tmp_path / f"cut{length}.gguf"
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=f"cut{length}.gguf.* (is cut short|is not a GGUF file)"):
            GGUFCheckpoint(path)


@pytest.mark.parametrize(
    ("offset", "replacement", "message"),
    [
        (0, b"GGML", "is not a GGUF file: it starts with b'GGML'"),
        (4, (9).to_bytes(4, "little"), "has GGUF version 9"),
        (4, (3).to_bytes(4, "big"), "big-endian"),
        (8, (1 << 62).to_bytes(8, "little"), "cut short|dimensions"),
        (16, (1 << 62).to_bytes(8, "little"), "cut short|damaged"),
        (24, (1 << 62).to_bytes(8, "little"), "cut short"),
    ],
)
def test_damaged_headers(tmp_path, offset, replacement, message):
    path = tmp_path / "m.gguf"
    write_one(path, np.ones((4, 32), np.float32))
    data = bytearray(path.read_bytes())
    data[offset : offset + len(replacement)] = replacement
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        GGUFFile(path)


def test_a_missing_file(tmp_path):
    with pytest.raises(CheckpointError, match="no such file"):
        GGUFFile(tmp_path / "none.gguf")


def test_unknown_architecture_lists_the_known(tmp_path):
    out = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    out.add_tensor("token_embd.weight", np.ones((2, 32), np.float32))
    finish(out)
    with pytest.raises(CheckpointError, match=r"'mamba' is not supported; supported: .*gemma3.*llama"):
        GGUFCheckpoint(tmp_path / "m.gguf").names()


def test_unknown_tensors_are_named(tmp_path):
    out = writer(tmp_path / "m.gguf")
    out.add_tensor("blk.0.ssm_conv1d.weight", np.ones((2, 32), np.float32))
    finish(out)
    with pytest.raises(CheckpointError, match=r"1 tensors are unknown .* blk\.0\.ssm_conv1d\.weight"):
        GGUFCheckpoint(tmp_path / "m.gguf").names()


def test_types_without_dequantisation_are_refused(tmp_path):
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType.Q8_K]
    raw = np.zeros((2, size), np.uint8)
    checkpoint = write_one(tmp_path / "m.gguf", raw, GGMLQuantizationType.Q8_K)
    assert checkpoint.shape(NAME) == (2, block)
    with pytest.raises(CheckpointError, match="stored as Q8_K, which cannot be dequantised"):
        checkpoint.read(NAME)
