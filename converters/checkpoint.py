"""Checkpoints: tensors by their Hugging Face names, read slice by slice from where they lie."""

import json
import os
import pickle
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxllm.errors import CheckpointError

_READABLE = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL")
_MAX_HEADER_BYTES = 100 << 20
# What lies under a checkpoint's name when a download went wrong, by its first bytes.
_STRANGERS = {
    b"version ": "a Git LFS pointer, not the file itself: fetch it with `git lfs pull`",
    b"<": "a web page or XML, not weights: download it again",
    b"GGUF": "a GGUF file: name it .gguf and give it as the model",
    b"PK\x03\x04": "a zip file, as PyTorch writes them: name it .bin and load it with load_format='pt'",
}


class Checkpoint(Protocol):
    """What the rules read from."""

    def names(self) -> frozenset[str]:
        """Names of all tensors, in Hugging Face's spelling."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        ...

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """A tensor, or a slice of it (steps of 1), as a numpy array."""
        ...


class SafetensorsCheckpoint:
    """One or several safetensors files; every header is checked before anything is read.

    Raises:
        CheckpointError: a file that is missing, cut short or not safetensors, named with the reason; a
            tensor that two files hold.
    """

    def __init__(self, folder: Path):
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._file_of: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        index = folder / "model.safetensors.index.json"
        files = sorted(folder.glob("*.safetensors"))
        # Files of other layouts may lie beside the model's own.
        files = [file for file in files if file.name == "model.safetensors"] or files
        listed = _read_index(index) if index.exists() else None
        if listed is not None:
            files = _listed_files(index, listed)
        if not files:
            raise CheckpointError(f"{folder} holds no *.safetensors file")
        for file in files:
            self._open[file] = _open_safetensors(file)
            for name in self._open[file].keys():  # noqa: SIM118 (it is no dict)
                if name in self._file_of:
                    raise CheckpointError(f"tensor {name!r} is in two files: {self._file_of[name]} and {file}")
                view = self._open[file].get_slice(name)
                if view.get_dtype() not in _READABLE:
                    raise CheckpointError(_quantised(file, name, view.get_dtype()))
                self._shapes[name] = tuple(view.get_shape())
                self._file_of[name] = file
        absent = sorted(set(listed or ()) - set(self._shapes))
        if absent:
            raise CheckpointError(f"{index} lists tensors that no file holds: {', '.join(absent[:8])}")

    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        view = self._open[self._file_of[name]].get_slice(name)
        return view[index if index is not None else (slice(None),) * len(self._shapes[name])]


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    try:
        weights = json.loads(path.read_text())["weight_map"]
        names = set(weights.values())
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no index of weight files: {error!r}") from None
    for name in names:
        if not isinstance(name, str) or os.path.basename(name) != name:
            raise CheckpointError(f"{path} names {name!r}; files must lie beside the index")
    return weights


def _listed_files(index: Path, weights: dict[str, str]) -> list[Path]:
    files = [index.parent / name for name in sorted(set(weights.values()))]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise CheckpointError(f"{index} lists files that are not there: {', '.join(missing)}")
    return files


def _open_safetensors(file: Path) -> Any:
    """The file, mapped into memory, after its header was checked against its size."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
    _refuse_strangers(file, start)
    # The library's own messages do not tell a download that broke off from a file of another kind.
    length = int.from_bytes(start, "little")
    if size < 8 or 8 + length > size:
        what = f"a header of {length} bytes" if length <= _MAX_HEADER_BYTES else "no length of a header in front"
        raise CheckpointError(f"{file} is cut short or no safetensors file: {size} bytes, {what}")
    try:
        return safe_open(file, framework="numpy")
    except SafetensorError as error:
        raise CheckpointError(f"{file} of {size} bytes is cut short or damaged: {error}") from None


def _refuse_strangers(file: Path, start: bytes, allowed: bytes | None = None) -> None:
    for magic, what in _STRANGERS.items():
        if start.startswith(magic) and magic != allowed:
            raise CheckpointError(f"{file} is {what}")


def _quantised(file: Path, name: str, dtype: str) -> str:
    return (
        f"{file}: tensor {name!r} is of type {dtype}, as in quantised checkpoints, which cannot be loaded yet; "
        "the unquantised original (float32, float16, bfloat16) or a GGUF file of the model would work"
    )


class TorchCheckpoint:
    """`pytorch_model*.bin` or `*.pt`: unpickled weights-only and memory-mapped by torch.

    Raises:
        CheckpointError: torch is not installed, or a file that it cannot read.
    """

    def __init__(self, folder: Path):
        try:
            import torch  # heavy, and only these files need it
        except ImportError:
            raise CheckpointError(f"{folder} holds PyTorch files, which need torch: pip install torch") from None
        self._torch = torch
        index = folder / "pytorch_model.bin.index.json"
        if index.exists():
            files = _listed_files(index, _read_index(index))
        else:
            files = sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")])
            files = [file for file in files if file.name not in ("training_args.bin", "optimizer.pt", "scheduler.pt")]
            files = [file for file in files if file.name == "pytorch_model.bin"] or files
        if not files:
            raise CheckpointError(f"{folder} holds no *.bin, *.pt or *.pth file")
        self._tensors: dict[str, Any] = {}
        for file in files:
            for name, tensor in self._load(file).items():
                if not isinstance(tensor, torch.Tensor):
                    continue
                if name in self._tensors:
                    raise CheckpointError(f"tensor {name!r} is in two files; one of them is {file}")
                if (tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point) or tensor.is_quantized:
                    raise CheckpointError(_quantised(file, name, str(tensor.dtype)))
                self._tensors[name] = tensor.detach()

    def _load(self, file: Path) -> Mapping[str, Any]:
        with file.open("rb") as stream:
            start = stream.read(8)
        zipped = b"PK\x03\x04"
        _refuse_strangers(file, start, allowed=zipped)
        try:
            # Files of before torch 1.6 are no zip and cannot be mapped into memory.
            with warnings.catch_warnings(action="ignore"):
                loaded = self._torch.load(
                    file, map_location="cpu", weights_only=True, mmap=True if start.startswith(zipped) else None
                )
        except pickle.UnpicklingError as error:
            # torch goes on to advise weights_only=False, which would run whatever the file says.
            found = re.search(r"(?:GLOBAL|class|function) ([\w.]+)", str(error))
            what = f"names {found[1]}, which is no tensor" if found else "cannot be read as tensors alone"
            raise CheckpointError(f"{file} is refused, for it may run code when loaded: its pickle {what}") from None
        except Exception as error:  # torch raises many kinds for a file that is cut short or no pickle
            raise CheckpointError(f"{file} is cut short or damaged; torch says: {error}") from None
        if not isinstance(loaded, Mapping):
            raise CheckpointError(f"{file} holds a {type(loaded).__name__}, not a table of tensors")
        return loaded

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        tensor = self._tensors[name]
        part = (tensor if index is None else tensor[index]).contiguous()
        if part.dtype == self._torch.bfloat16:
            return part.view(self._torch.int16).numpy().view(ml_dtypes.bfloat16)
        return part.numpy()


class SplitCheckpoint:
    """A checkpoint in which some tensors are cut into named parts along one axis.

    Args:
        inner: the checkpoint.
        parts: name -> (axis, {part: size}); the part `p` of tensor `t` is called `t[p]`.

    Raises:
        CheckpointError: sizes that do not add up to the tensor's.
    """

    def __init__(self, inner: Checkpoint, parts: Mapping[str, tuple[int, Mapping[str, int]]]):
        self._inner = inner
        self._parts: dict[str, tuple[str, int, int, int]] = {}
        for name, (axis, sizes) in parts.items():
            shape = inner.shape(name)
            if axis >= len(shape) or sum(sizes.values()) != shape[axis]:
                raise CheckpointError(f"tensor {name!r} has shape {shape}; its parts on axis {axis} are {dict(sizes)}")
            start = 0
            for part, size in sizes.items():
                self._parts[f"{name}[{part}]"] = (name, axis, start, size)
                start += size
        self._names = (inner.names() - set(parts)) | set(self._parts)

    def names(self) -> frozenset[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._parts:
            return self._inner.shape(name)
        whole, axis, _, size = self._parts[name]
        shape = list(self._inner.shape(whole))
        shape[axis] = size
        return tuple(shape)

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        if name not in self._parts:
            return self._inner.read(name, index)
        whole, axis, start, size = self._parts[name]
        full: Sequence[slice] = index if index is not None else [slice(None)] * len(self.shape(name))
        wanted = list(full)
        first, last, _ = wanted[axis].indices(size)
        wanted[axis] = slice(start + first, start + last)
        return self._inner.read(whole, tuple(wanted))


class RenamedCheckpoint:
    """A checkpoint whose names get a prefix: some save the inner model alone, without the outer name."""

    def __init__(self, inner: Checkpoint, prefix: str):
        self._inner = inner
        self._name_of = {prefix + name: name for name in inner.names()}

    def names(self) -> frozenset[str]:
        return frozenset(self._name_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._inner.shape(self._name_of[name])

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        return self._inner.read(self._name_of[name], index)
