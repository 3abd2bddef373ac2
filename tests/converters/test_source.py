"""Where models come from: folders, files and a hub that stands on this machine."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from huggingface_hub import constants

from converters.hub import is_repo_id, select_gguf
from converters.source import resolve_model
from jaxllm.errors import CheckpointError

# Helper modules beside tests are loaded by path: there are no packages under tests/.
_spec = importlib.util.spec_from_file_location("hub_stand_in", Path(__file__).with_name("hub_stand_in.py"))
assert _spec is not None and _spec.loader is not None
hub_stand_in: Any = importlib.util.module_from_spec(_spec)
sys.modules["hub_stand_in"] = hub_stand_in
_spec.loader.exec_module(hub_stand_in)

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 8}
GENERATION = {"eos_token_id": [2, 3], "temperature": 0.6}


def folder_files(**more: bytes) -> dict[str, bytes]:
    files = {
        "config.json": json.dumps(CONFIG).encode(),
        "generation_config.json": json.dumps(GENERATION).encode(),
        "tokenizer.json": b"{}",
        "model.safetensors": bytes(range(256)) * 400,
        "pytorch_model.bin": b"same weights",
        "consolidated.safetensors": b"same weights",
        "onnx/model.onnx": b"same weights",
        "onnx/config.json": b"{}",
        "README.md": b"words",
    }
    return files | {name.replace("__", "."): data for name, data in more.items()}


def write_gguf(path: Path, name: str = "tiny") -> bytes:
    out = gguf.GGUFWriter(path, "llama")
    out.add_name(name)
    out.add_context_length(64)
    out.add_embedding_length(8)
    out.add_block_count(1)
    out.add_feed_forward_length(16)
    out.add_head_count(2)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_eos_token_id(2)
    out.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path.read_bytes()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The stand-in hub, with this process's hub library turned to it and an empty cache."""
    with hub_stand_in.stand_in_hub() as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        template = running.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield running


def put(hub: Any, repo_id: str, files: dict[str, bytes], token: str | None = None) -> None:
    hub.repositories[repo_id] = hub_stand_in.Repository({"main": files}, token)


# --- on this machine --------------------------------------------------------------------------------------------


def test_a_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    source = resolve_model(str(tmp_path))
    assert (source.path, source.kind, source.tokenizer_path) == (tmp_path, "folder", tmp_path)
    assert (source.hf_config, source.generation_config, source.name) == (CONFIG, {}, str(tmp_path))
    (tmp_path / "generation_config.json").write_text(json.dumps(GENERATION))
    assert resolve_model(str(tmp_path)).generation_config == GENERATION


def test_a_gguf_file_and_a_folder_with_one(tmp_path):
    file = tmp_path / "tiny.Q8_0.gguf"
    write_gguf(file)
    for name in (str(file), str(tmp_path), f"{tmp_path}:q8_0"):
        source = resolve_model(name)
        assert (source.path, source.kind, source.tokenizer_path) == (file, "gguf", file)
        assert source.hf_config["architectures"] == ["LlamaForCausalLM"]
        assert source.generation_config == {"eos_token_id": [2]}
    with pytest.raises(CheckpointError, match=r"no GGUF file with 'Q4_K_M' in its name; it holds tiny.Q8_0.gguf"):
        resolve_model(f"{tmp_path}:Q4_K_M")
    write_gguf(tmp_path / "tiny.F16.gguf")
    with pytest.raises(CheckpointError, match=r"choose one of the GGUF models: tiny\.F16\.gguf, tiny\.Q8_0\.gguf"):
        resolve_model(str(tmp_path))


def test_a_folder_with_both_prefers_its_config_unless_gguf_is_asked_for(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_gguf(tmp_path / "tiny.gguf")
    assert resolve_model(str(tmp_path)).kind == "folder"
    assert resolve_model(str(tmp_path), load_format="gguf").kind == "gguf"


def test_a_tokenizer_of_its_own(tmp_path):
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    (tmp_path / "tokenizer").mkdir()
    source = resolve_model(str(file), tokenizer=str(tmp_path / "tokenizer"))
    assert (source.path, source.tokenizer_path) == (file, tmp_path / "tokenizer")
    with pytest.raises(CheckpointError, match=r"tokenizer ./nowhere: no such folder or file"):
        resolve_model(str(file), tokenizer="./nowhere")


@pytest.mark.parametrize("name", ["/no/such/place", "./nothing", "~/nothing/here", "missing.gguf", "dir/missing.gguf"])
def test_local_names_that_do_not_exist(name):
    with pytest.raises(CheckpointError, match=f"{name}: no such folder or file"):
        resolve_model(name)


@pytest.mark.parametrize("name", ["two words", "a/b/c", "org/..", "-x", "a//b"])
def test_names_that_cannot_be_a_repository(name):
    with pytest.raises(CheckpointError, match="neither a folder or file here nor a repository id"):
        resolve_model(name)


def test_an_empty_name():
    with pytest.raises(CheckpointError, match="name is empty"):
        resolve_model("")


def test_a_folder_without_config_says_what_it_holds(tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "params.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"has no config\.json; it holds params\.json, weights/$"):
        resolve_model(str(tmp_path))
    empty = tmp_path / "weights"
    with pytest.raises(CheckpointError, match="it holds nothing"):
        resolve_model(str(empty))
    for i in range(20):
        (empty / f"{i:02d}").touch()
    with pytest.raises(CheckpointError, match="10, 11 and 8 more"):
        resolve_model(str(empty))


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not valid JSON"), ("[1]", "must hold a JSON object, got list")]
)
def test_a_damaged_config(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=f"config.json {message}"):
        resolve_model(str(tmp_path))


def test_files_that_are_not_models(tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("some words")
    with pytest.raises(CheckpointError, match=r"notes.txt is not a GGUF file: it starts with b'some'"):
        resolve_model(str(text))
    whole = write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "tiny.gguf").write_bytes(whole[:-10])
    with pytest.raises(CheckpointError, match=r"tiny.gguf is cut short: its tensors need .* download it again"):
        resolve_model(str(tmp_path / "tiny.gguf"))


def test_unknown_load_format(tmp_path):
    with pytest.raises(ValueError, match="load_format must be one of auto, safetensors, pt, gguf, dummy, got 'tape'"):
        resolve_model(str(tmp_path), load_format="tape")


# --- from the hub -----------------------------------------------------------------------------------------------


def test_a_repository_is_downloaded_once_and_only_what_is_needed(hub, tmp_path):
    put(hub, "org/tiny", folder_files())
    source = resolve_model("org/tiny")
    assert (source.kind, source.name, source.hf_config) == ("folder", "org/tiny", CONFIG)
    assert source.generation_config == GENERATION
    assert source.path.is_relative_to(tmp_path / "cache")
    expected = {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors"}
    assert {p.name for p in source.path.iterdir()} == expected
    assert (source.path / "model.safetensors").read_bytes() == folder_files()["model.safetensors"]
    hub.requests.clear()
    assert resolve_model("org/tiny").path == source.path
    assert hub.downloads() == set()


@pytest.mark.parametrize(
    ("load_format", "weights"),
    [("pt", {"pytorch_model.bin"}), ("dummy", set()), ("safetensors", {"model.safetensors"})],
)
def test_load_format_chooses_the_weights(hub, load_format, weights):
    put(hub, "org/tiny", folder_files())
    found = {p.name for p in resolve_model("org/tiny", load_format=load_format).path.iterdir()}
    assert found - {"config.json", "generation_config.json", "tokenizer.json"} == weights


def test_auto_takes_pt_where_there_is_nothing_better(hub):
    files = folder_files()
    del files["model.safetensors"], files["consolidated.safetensors"]
    put(hub, "org/old", files)
    assert (resolve_model("org/old").path / "pytorch_model.bin").exists()


def test_revision(hub):
    newer = json.dumps(CONFIG | {"vocab_size": 99}).encode()
    revisions = {"main": folder_files(), "v2": folder_files(config__json=newer)}
    hub.repositories["org/tiny"] = hub_stand_in.Repository(revisions)
    assert resolve_model("org/tiny").hf_config["vocab_size"] == 8
    assert resolve_model("org/tiny", revision="v2").hf_config["vocab_size"] == 99
    commit = hub.repositories["org/tiny"].commit("v2")
    assert resolve_model("org/tiny", revision=commit).hf_config["vocab_size"] == 99
    with pytest.raises(CheckpointError, match="model 'org/tiny' has no revision 'v3'"):
        resolve_model("org/tiny", revision="v3")


def test_download_dir_and_offline(hub, tmp_path):
    put(hub, "org/tiny", folder_files())
    directory = str(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"not .wholly. in the cache .*elsewhere and offline mode is on"):
        resolve_model("org/tiny", download_dir=directory, offline=True)
    source = resolve_model("org/tiny", download_dir=directory)
    assert source.path.is_relative_to(directory)
    hub.requests.clear()
    assert resolve_model("org/tiny", download_dir=directory, offline=True).path == source.path
    assert hub.requests == []


def test_the_hub_librarys_own_offline_mode(hub, monkeypatch):
    put(hub, "org/tiny", folder_files())
    source = resolve_model("org/tiny")
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_model("org/tiny").path == source.path
    assert hub.requests == []


def test_no_network(hub, monkeypatch, caplog):
    put(hub, "org/tiny", folder_files())
    source = resolve_model("org/tiny")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{unused.getsockname()[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", nowhere)
    assert resolve_model("org/tiny").path == source.path
    assert "the model hub is not reachable" in caplog.text
    with pytest.raises(CheckpointError, match=r"'org/other' is not .wholly. in the cache .* hub is not reachable"):
        resolve_model("org/other")


def test_gated_repositories_and_tokens(hub):
    put(hub, "org/gated", folder_files(), token="sesame")
    with pytest.raises(CheckpointError, match=r"'org/gated' is gated: ask for access .*no token was given"):
        resolve_model("org/gated")
    with pytest.raises(CheckpointError, match=r"'org/gated' is gated: .*the token given has no access"):
        resolve_model("org/gated", token="wrong")
    assert resolve_model("org/gated", token="sesame").hf_config == CONFIG


def test_no_such_repository(hub):
    with pytest.raises(
        CheckpointError, match="'org/nope' is neither a folder or file here nor a repository on the hub"
    ):
        resolve_model("org/nope")


def test_a_broken_download_is_taken_up_again(hub):
    put(hub, "org/tiny", folder_files())
    hub.cut.add("model.safetensors")
    source = resolve_model("org/tiny")
    assert (source.path / "model.safetensors").read_bytes() == folder_files()["model.safetensors"]


def test_a_partial_snapshot_is_not_taken_for_a_whole_one(hub):
    put(hub, "org/tiny", folder_files())
    source = resolve_model("org/tiny")
    (source.path / "model.safetensors").unlink()
    message = "no config.json with weights, nor a GGUF file in the cache, and there is no connection; it holds config"
    with pytest.raises(CheckpointError, match=message):
        resolve_model("org/tiny", offline=True)
    for path in source.path.iterdir():
        if path.name == "tokenizer.json":
            path.unlink()
    with pytest.raises(CheckpointError, match=r"not .wholly. in the cache"):
        resolve_model("org/tiny", offline=True, load_format="dummy")
    assert (resolve_model("org/tiny").path / "model.safetensors").exists()


def test_a_repository_without_anything_to_load(hub):
    put(hub, "org/words", {"README.md": b"words"})
    with pytest.raises(CheckpointError, match=r"has no config.json with weights, nor a GGUF file; it holds README.md"):
        resolve_model("org/words")


def test_gguf_of_a_repository(hub, tmp_path):
    data = write_gguf(tmp_path / "tiny.gguf")
    put(hub, "org/quants", {"tiny-Q4_K_M.gguf": data, "sub/tiny-Q8_0.gguf": data, "mmproj-F16.gguf": data})
    by_quantization = resolve_model("org/quants:q4_k_m")
    assert (by_quantization.path.name, by_quantization.kind) == ("tiny-Q4_K_M.gguf", "gguf")
    assert hub.downloads() == {"tiny-Q4_K_M.gguf"}
    assert resolve_model("org/quants/sub/tiny-Q8_0.gguf").path.parts[-2:] == ("sub", "tiny-Q8_0.gguf")
    with pytest.raises(CheckpointError, match=r"choose one of the GGUF models: sub/tiny-Q8_0\.gguf, tiny-Q4_K_M\.gguf"):
        resolve_model("org/quants")
    with pytest.raises(CheckpointError, match=r"it holds mmproj-F16\.gguf, sub/tiny-Q8_0\.gguf, tiny-Q4_K_M\.gguf"):
        resolve_model("org/quants:Q2_K")


def test_a_repository_with_config_and_gguf(hub, tmp_path):
    data = write_gguf(tmp_path / "tiny.gguf")
    put(hub, "org/both", folder_files(tiny__gguf=data))
    assert resolve_model("org/both").kind == "folder"
    assert resolve_model("org/both", load_format="gguf").kind == "gguf"


def test_a_tokenizer_from_the_hub_brings_no_weights(hub, tmp_path):
    write_gguf(tmp_path / "tiny.gguf")
    put(hub, "org/tiny", folder_files())
    source = resolve_model(str(tmp_path / "tiny.gguf"), tokenizer="org/tiny")
    assert (source.tokenizer_path / "tokenizer.json").exists()
    assert "model.safetensors" not in hub.downloads()


def test_the_endpoint_variable_of_the_hub_library(hub, tmp_path):
    put(hub, "org/tiny", folder_files())
    program = "from converters.source import resolve_model; print(resolve_model('org/tiny').hf_config['vocab_size'])"
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env=environment,
        check=False,
    )
    assert (result.returncode, result.stdout.strip()) == (0, "8"), result.stderr


# --- choosing ---------------------------------------------------------------------------------------------------


def test_choosing_gguf_files():
    shards = ["big-Q8_0-00001-of-00002.gguf", "big-Q8_0-00002-of-00002.gguf"]
    files = [*shards, "big.Q4_0.gguf", "Q4_K_S/big.gguf", "big-IQ4_K.gguf", "README.md"]
    assert select_gguf(files, "Q8_0") == shards
    assert select_gguf(files, "q4_0") == ["big.Q4_0.gguf"]
    assert select_gguf(files, "Q4_K_S") == ["Q4_K_S/big.gguf"]
    assert select_gguf(files, "Q4_K") == []
    assert select_gguf(["README.md"], None) == []


def test_repository_ids():
    assert all(map(is_repo_id, ["org/name", "gpt2", "a.b/c_d-e"]))
    assert not any(map(is_repo_id, ["a/b/c", "", "/a", "a/", "a b", "a/b.gguf", "../x"]))
