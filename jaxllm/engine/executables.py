"""Compiled programs kept on disk: the second start loads them and neither traces nor compiles.

The folder holds pickled executables and must be writable by its owner only: loading one runs it.
"""

import hashlib
import logging
import os
import pickle
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

logger = logging.getLogger(__name__)

_SOURCES = (
    *(f"jaxllm/{name}" for name in ("cache", "engine", "layers", "models", "ops", "sampling")),
    *("kernels_pallas", "kernels_triton"),
)


def fingerprint(*parts: object) -> str:
    """A name for what programs depend on: our code, the libraries, the device and the given parts."""
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parents[2]
    sources = [path for folder in _SOURCES for path in (root / folder).rglob("*.py")]
    for source in sorted([*sources, root / "jaxllm/batch.py", root / "jaxllm/sharding.py"]):
        digest.update(source.read_bytes())
    device = jax.devices()[0]
    facts = (
        jax.__version__,
        version("jaxlib"),
        device.platform,
        device.device_kind,
        len(jax.devices()),
        device.client.platform_version,
        os.environ.get("XLA_FLAGS", ""),
        *map(repr, parts),
    )
    for fact in facts:
        digest.update(repr(fact).encode())
    return digest.hexdigest()[:24]


def program_name(bucket: object) -> str:
    """Under which the step of a bucket is kept."""
    return f"step-{bucket}"


class ExecutableStore:
    """Executables by name in one folder; None as folder keeps nothing."""

    def __init__(self, folder: Path | None):
        self._folder = folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022:
                logger.warning("not using the compile cache %s: other users may write to it", folder)
                self._folder = None
        self._coming: dict[str, Future[Any]] = {}

    def holds(self, name: str) -> bool:
        """Whether a program of this name is kept; it may still turn out not to load."""
        return self._folder is not None and (self._folder / name).is_file()

    def prefetch(self, names: Iterable[str]) -> None:
        """Begin to load what is kept of these in the background, in this order; `load` then waits for it."""
        pool = ThreadPoolExecutor(1, thread_name_prefix="load-programs")
        self._coming = {name: pool.submit(self._read, name) for name in names if self.holds(name)}
        pool.shutdown(wait=False)

    def load(self, name: str) -> Any | None:
        """The executable, or None when it is absent or no longer loads (it is then made again)."""
        coming = self._coming.pop(name, None)
        return coming.result() if coming is not None else self._read(name)

    def _read(self, name: str) -> Any | None:
        if self._folder is None:
            return None
        path = self._folder / name
        try:
            return serialize_executable.deserialize_and_load(*pickle.loads(path.read_bytes()))
        except FileNotFoundError:
            return None
        except Exception as error:  # a file cut short or of another build: whatever it raises, compile again
            logger.warning("compiling %s again: the kept program does not load (%s)", name, error)
            path.unlink(missing_ok=True)
            return None

    def save(self, name: str, executable: Any) -> None:
        """Keep an executable; a full disk or a platform that cannot serialise is not an error."""
        if self._folder is None:
            return
        try:
            data = pickle.dumps(serialize_executable.serialize(executable))
            part = self._folder / f"{name}.{os.getpid()}.part"
            part.write_bytes(data)
            part.replace(self._folder / name)
        except Exception as error:
            logger.warning("cannot keep the compiled program %s: %s", name, error)
