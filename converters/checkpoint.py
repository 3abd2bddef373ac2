"""Checkpoints: tensors by their Hugging Face names, read slice by slice from where they lie."""

import json
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from safetensors import safe_open

from jaxllm.errors import CheckpointError

_SAFETENSORS_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "U32": 4, "U64": 8,
}  # fmt: skip
_MAX_HEADER_BYTES = 100 << 20


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
        CheckpointError: a file that is missing, cut short or not safetensors, named with the reason.
    """

    def __init__(self, folder: Path):
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._file_of: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        index = folder / "model.safetensors.index.json"
        listed: dict[str, str] | None = None
        if index.exists():
            listed = _read_index(index)
            files = sorted({folder / name for name in listed.values()})
        else:
            files = sorted(folder.glob("*.safetensors"))
            # Files of other layouts may lie beside the model's own.
            files = [f for f in files if f.name == "model.safetensors"] or files
        missing = [file.name for file in files if not file.exists()]
        if missing:
            raise CheckpointError(f"{index} lists files that are not there: {', '.join(missing)}")
        if not files:
            raise CheckpointError(f"{folder} holds no *.safetensors file")
        for file in files:
            for name, shape in _check_header(file).items():
                self._shapes[name] = shape
                self._file_of[name] = file
        if listed is not None:
            absent = sorted(set(listed) - set(self._shapes))
            if absent:
                raise CheckpointError(f"{index} lists tensors that no file holds: {', '.join(absent[:8])}")

    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        file = self._file_of[name]
        if file not in self._open:
            self._open[file] = safe_open(file, framework="numpy")
        view = self._open[file].get_slice(name)
        return view[index if index is not None else (slice(None),) * len(self._shapes[name])]


def _read_index(path: Path) -> dict[str, str]:
    try:
        weights = json.loads(path.read_text())["weight_map"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is no index of safetensors files: {error!r}") from None
    for name in weights.values():
        if os.path.basename(name) != name:
            raise CheckpointError(f"{path} names {name!r}; files must lie beside the index")
    return weights


def _check_header(file: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the file's tensors, after checking that the file has all the bytes that it promises."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= _MAX_HEADER_BYTES:
            raise CheckpointError(f"{file} is not a safetensors file (header of {length} bytes, file of {size})")
        if length + 8 > size:
            raise CheckpointError(f"{file} is cut short: its header has {length} bytes, the file {size}")
        try:
            header = json.loads(stream.read(length))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{file} is not a safetensors file: its header is no JSON ({error})") from None
    shapes, end = {}, 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        shape, (first, last), dtype = tuple(entry["shape"]), entry["data_offsets"], entry["dtype"]
        expected = int(np.prod(shape, dtype=np.int64)) * _SAFETENSORS_BYTES.get(dtype, 0)
        if dtype in _SAFETENSORS_BYTES and last - first != expected:
            raise CheckpointError(f"{file}: tensor {name!r} of {dtype} {shape} has {last - first} bytes")
        shapes[name] = shape
        end = max(end, last)
    if length + 8 + end > size:
        raise CheckpointError(f"{file} is cut short: it needs {length + 8 + end} bytes and has {size}")
    return shapes


class TorchCheckpoint:
    """`pytorch_model*.bin` or `*.pt`: unpickled weights-only and memory-mapped by torch.

    Raises:
        CheckpointError: torch is not installed, or a file that it cannot read.
    """

    def __init__(self, folder: Path):
        try:
            import torch  # heavy, and only these files need it
        except ImportError:
            raise CheckpointError(
                f"{folder} holds PyTorch files, which need torch: pip install 'jaxllm[convert]'"
            ) from None
        self._torch = torch
        index = folder / "pytorch_model.bin.index.json"
        if index.exists():
            files = sorted({folder / name for name in _read_index(index).values()})
        else:
            files = sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")])
            files = [file for file in files if file.name not in ("training_args.bin", "optimizer.pt", "scheduler.pt")]
        missing = [file.name for file in files if not file.exists()]
        if missing:
            raise CheckpointError(f"{index} lists files that are not there: {', '.join(missing)}")
        if not files:
            raise CheckpointError(f"{folder} holds no *.bin or *.pt file")
        self._tensors: dict[str, Any] = {}
        for file in files:
            try:
                loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            except Exception as error:  # torch raises many kinds for a file that is cut short or no pickle
                raise CheckpointError(f"{file} cannot be read by torch: {error}") from None
            if not isinstance(loaded, Mapping):
                raise CheckpointError(f"{file} holds a {type(loaded).__name__}, not a table of tensors")
            self._tensors |= {name: t for name, t in loaded.items() if isinstance(t, torch.Tensor)}

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
            total = inner.shape(name)[axis]
            if sum(sizes.values()) != total:
                raise CheckpointError(f"tensor {name!r} has {total} on axis {axis}; its parts are {dict(sizes)}")
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
