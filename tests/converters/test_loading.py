"""Model folders: whole, sharded, broken in every way that downloads break; nothing is placed before all is checked."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from safetensors.numpy import load_file, save_file

import converters
from converters import loading
from converters.rules import BoundRule
from jaxllm.errors import CheckpointError
from jaxllm.sharding import make_mesh

CONFIG: dict[str, Any] = dict(
    vocab_size=137, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """A llama in one safetensors file."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("original")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """The same in a folder of the test's own, in three files and their index."""
    (tmp_path / "config.json").write_text((original / "config.json").read_text())
    tensors = load_file(original / "model.safetensors")
    weight_map = {}
    for part in range(3):
        name = f"model-{part + 1:05}-of-00003.safetensors"
        mine = dict(list(tensors.items())[part::3])
        save_file(mine, tmp_path / name)
        weight_map |= dict.fromkeys(mine, name)
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tmp_path


def load(folder: Path, shards: int = 1, load_format: str = "auto", **kwargs) -> converters.LoadedModel:
    source = converters.resolve_model(str(folder), load_format=load_format)
    facts = converters.describe_model(source.hf_config, tensor_parallel_size=shards)
    return converters.load_model(
        source, facts, dtype="float32", mesh=make_mesh(shards), load_format=load_format, **kwargs
    )


def weights(loaded: converters.LoadedModel) -> dict[str, np.ndarray]:
    state = nnx.to_flat_state(nnx.state(loaded.model, nnx.Param))
    return {".".join(map(str, path)): np.asarray(variable[...]) for path, variable in state}


def assert_equal(a: converters.LoadedModel, b: converters.LoadedModel) -> None:
    first, second = weights(a), weights(b)
    assert first.keys() == second.keys() and len(first) > 5
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name], err_msg=name)


def refused(folder: Path, monkeypatch, load_format: str = "auto") -> str:
    """The message of the refusal, which must come before anything is on a device."""
    monkeypatch.setattr(loading, "_place", lambda *_: pytest.fail("a parameter was placed"))
    with pytest.raises(CheckpointError) as error:
        load(folder, load_format=load_format)
    return str(error.value)


def test_sharded_files_hold_the_same_model(original, folder):
    assert_equal(load(original), load(folder))


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_pytorch_files_hold_the_same_model(original, tmp_path, legacy):
    tensors = {name: torch.from_numpy(array) for name, array in load_file(original / "model.safetensors").items()}
    (tmp_path / "config.json").write_text((original / "config.json").read_text())
    torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    assert_equal(load(original), load(tmp_path))
    assert_equal(load(original), load(tmp_path, load_format="pt"))


def test_bfloat16_pytorch_files(original, tmp_path):
    tensors = {name: torch.from_numpy(a).bfloat16() for name, a in load_file(original / "model.safetensors").items()}
    (tmp_path / "config.json").write_text((original / "config.json").read_text())
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    for name, array in weights(load(original)).items():
        np.testing.assert_array_equal(weights(load(tmp_path))[name], array.astype("bfloat16").astype("float32"))


@pytest.mark.parametrize("shards", [2, 4])
def test_no_read_is_larger_than_a_shard(original, monkeypatch, shards):
    """Neither host nor first device ever holds a whole copy of what is cut."""
    largest: dict[str, int] = {}
    inner = BoundRule.fill

    def fill(self, checkpoint, shape, index, out):
        largest[self.target] = max(largest.get(self.target, 0), out.size)
        inner(self, checkpoint, shape, index, out)

    monkeypatch.setattr(BoundRule, "fill", fill)
    sharded = load(original, shards)
    arrays = {".".join(map(str, p)): v[...] for p, v in nnx.to_flat_state(nnx.state(sharded.model, nnx.Param))}
    assert all(len(array.sharding.device_set) == shards for array in arrays.values())
    cut = {name: array.size // shards for name, array in arrays.items() if not name.endswith("norm.weight")}
    assert {"layers.0.attention.qkv.weight", "embedding.weight"} <= cut.keys()
    assert {name: largest[name] for name in cut} == cut


def test_progress_reaches_the_end(folder):
    seen: list[tuple[str, int, int]] = []
    load(folder, progress=lambda *step: seen.append(step))
    assert [done for _, done, _ in seen] == sorted({done for _, done, _ in seen})
    assert seen[-1][1] == seen[-1][2] and {what for what, _, _ in seen} == {"loading weights"}


def test_dummy_weights_need_no_file_and_do_not_depend_on_shards(original, tmp_path):
    (tmp_path / "config.json").write_text((original / "config.json").read_text())
    one, two = load(tmp_path, load_format="dummy"), load(tmp_path, 2, load_format="dummy")
    assert_equal(one, two)
    assert any(not np.array_equal(a, b) for a, b in zip(
        weights(one).values(), weights(load(tmp_path, load_format="dummy", seed=1)).values(), strict=True))  # fmt: skip


def drop_a_shard(folder: Path) -> None:
    (folder / "model-00002-of-00003.safetensors").unlink()


def drop_the_index_and_a_shard(folder: Path) -> None:
    (folder / INDEX).unlink()
    drop_a_shard(folder)


def truncate(folder: Path) -> None:
    file = folder / "model-00003-of-00003.safetensors"
    os.truncate(file, file.stat().st_size // 2)


def truncate_the_header(folder: Path) -> None:
    os.truncate(folder / "model-00003-of-00003.safetensors", 20)


def empty(folder: Path) -> None:
    os.truncate(folder / "model-00001-of-00003.safetensors", 0)


def lfs_pointer(folder: Path) -> None:
    (folder / "model-00001-of-00003.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0")


def web_page(folder: Path) -> None:
    (folder / "model-00001-of-00003.safetensors").write_text("<!DOCTYPE html><title>404</title>")


def broken_index(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": ')


def index_outside(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": {"x": "../model.safetensors"}}')


def listed_tensor_absent(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.layers.9.x"] = "model-00001-of-00003.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


def edit(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    file = folder / "model-00001-of-00003.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    (folder / INDEX).unlink()


def stray_tensor(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"model.layers.0.extra.weight": np.zeros(3, np.float32)}))


def tensor_twice(folder: Path) -> None:
    second = load_file(folder / "model-00002-of-00003.safetensors")
    edit(folder, lambda tensors: tensors.update(dict(list(second.items())[:1])))


def wrong_shape(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({next(iter(tensors)): np.zeros((3, 5), np.float32)}))


def no_weights(folder: Path) -> None:
    for file in folder.glob("model*"):
        file.unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (drop_a_shard, ["lists files that are not there", "model-00002-of-00003.safetensors"]),
        (drop_the_index_and_a_shard, ["tensors that are missing"]),
        (truncate, ["model-00003-of-00003.safetensors", "cut short"]),
        (truncate_the_header, ["model-00003-of-00003.safetensors", "cut short"]),
        (empty, ["model-00001-of-00003.safetensors", "cut short"]),
        (lfs_pointer, ["Git LFS pointer", "git lfs pull"]),
        (web_page, ["a web page"]),
        (broken_index, [INDEX, "no index of weight files"]),
        (index_outside, ["must lie beside the index"]),
        (listed_tensor_absent, ["model.layers.9.x"]),
        (stray_tensor, ["tensors that nothing uses", "model.layers.0.extra.weight"]),
        (tensor_twice, ["is in two files"]),
        (wrong_shape, ["has shape (3, 5)", "needs"]),
        (no_weights, ["holds no weights", "config.json"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_damage_is_named_before_the_device_is_touched(folder, monkeypatch, damage, words):
    damage(folder)
    message = refused(folder, monkeypatch)
    assert all(word in message for word in words), message


def test_a_pickle_that_runs_code_is_refused(folder, monkeypatch):
    no_weights(folder)

    class Evil:
        def __reduce__(self):
            return pytest.fail, ("code ran",)

    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"x": Evil()}, protocol=2))
    message = refused(folder, monkeypatch)
    assert "pytorch_model.bin" in message and "refused" in message


def test_integer_weights_are_refused(folder):
    edit(folder, lambda tensors: tensors.update({name: a.astype(np.int8) for name, a in tensors.items()}))
    with pytest.raises(CheckpointError, match="holds int8 where weights are floats"):
        load(folder)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"architectures": ["MysteryForCausalLM"]}, ["MysteryForCausalLM", "LlamaForCausalLM", "Gemma3ForCausalLM"]),
        ({"architectures": None}, ["architectures"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantised (gptq)"]),
        ({"hidden_act": "swishy"}, ["swishy", "silu"]),
        ({"num_attention_heads": "four"}, ["num_attention_heads"]),
        ({"rope_parameters": {"rope_type": "spiral"}}, ["spiral"]),
    ],
)
def test_a_configuration_that_cannot_be_served(folder, monkeypatch, values, words):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))
    message = refused(folder, monkeypatch)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": 100}, 100),
        ({"max_position_embeddings": 100, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 200),
        ({"max_position_embeddings": 100, "rope_scaling": {"type": "dynamic", "factor": 4.0}}, 400),
        ({"max_position_embeddings": 100, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 100),
        (
            {
                "max_position_embeddings": 400,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100},
            },
            400,
        ),
        # Gemma 3 states the stretched length.
        (
            {
                "model_type": "gemma3_text",
                "max_position_embeddings": 800,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            800,
        ),
        ({"n_positions": 1024}, 1024),
    ],
)
def test_max_positions(config, expected):
    assert converters.max_positions(config) == expected


def test_too_many_shards_are_refused(folder):
    source = converters.resolve_model(str(folder))
    with pytest.raises(CheckpointError, match="tensor_parallel_size 3 does not divide"):
        converters.describe_model(source.hf_config, tensor_parallel_size=3)
    assert len(jax.devices()) >= 4
