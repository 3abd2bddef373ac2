"""One GGUF file: its header is checked against the file's size, its tensors are memory mapped.

Layout (GGUF specification, versions 2 and 3, little endian): magic, version, counts, key/value metadata,
tensor table, then tensor data at offsets that are multiples of `general.alignment`. Dimensions are written
innermost first; everything here speaks row-major shapes, outermost first.
"""

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGUF_MAGIC,
    GGMLQuantizationType,
    GGUFValueType,
)

from jaxllm.errors import CheckpointError

VERSIONS = (2, 3)
_MAX_DIMS = 4

_SCALARS: dict[GGUFValueType, str] = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies: row-major `shape`, `offset` from the start of the file, sizes in bytes."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    num_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, that is of one run along the innermost axis."""
        block, size = GGML_QUANT_SIZES[self.type]
        return self.shape[-1] // block * size


class GGUFFile:
    """A GGUF file opened for reading.

    Attributes:
        path: the file.
        metadata: key -> int, float, bool, str or list of these.
        tensors: GGUF tensor name -> GGUFTensor, in file order.

    Raises:
        CheckpointError: no such file, not GGUF, an unknown version or tensor type, or a file that ends before
            its metadata or its tensors do.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        if not self.path.is_file():
            raise CheckpointError(f"{self.path}: no such file")
        if not self.path.stat().st_size:
            raise CheckpointError(f"{self.path} is not a GGUF file: it is empty")
        self._bytes = np.memmap(self.path, dtype=np.uint8, mode="r")
        # The header is parsed through `mmap` itself: slices of it are bytes, which decode fast.
        with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            try:
                self._parse(_Cursor(view, self.path))
            except struct.error as error:
                raise CheckpointError(
                    f"{self.path} is cut short: its header goes on past the end of its {len(view)} bytes; "
                    "download it again"
                ) from error
        self._check_size()

    def raw_rows(self, name: str) -> np.ndarray:
        """The bytes of a tensor as uint8 [rows, bytes per row], memory mapped; a vector is one row."""
        tensor = self.tensors[name]
        data = self._bytes[tensor.offset : tensor.offset + tensor.num_bytes]
        return data.reshape(-1, tensor.row_bytes)

    def _parse(self, cursor: "_Cursor") -> None:
        magic, version = cursor.unpack("II")
        if magic != GGUF_MAGIC:
            raise CheckpointError(f"{self.path} is not a GGUF file: it starts with {magic.to_bytes(4, 'little')!r}")
        if version & 0xFFFF == 0:
            raise CheckpointError(f"{self.path} is a big-endian GGUF file; only little-endian ones are read")
        if version not in VERSIONS:
            raise CheckpointError(f"{self.path} has GGUF version {version}; versions {VERSIONS} are read")
        num_tensors, num_keys = cursor.unpack("QQ")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = cursor.string()
            (value_type,) = cursor.unpack("I")
            self.metadata[key] = cursor.value(value_type)
        table = [self._tensor_info(cursor) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise CheckpointError(f"{self.path}: general.alignment must be a power of two, got {alignment!r}")
        start = -(-cursor.position // alignment) * alignment
        self.tensors: dict[str, GGUFTensor] = {}
        for name, shape, tensor_type, offset in table:
            if name in self.tensors:
                raise CheckpointError(f"{self.path} has two tensors named {name!r}")
            self.tensors[name] = self._place(name, shape, tensor_type, start + offset)

    def _tensor_info(self, cursor: "_Cursor") -> tuple[str, tuple[int, ...], int, int]:
        name = cursor.string()
        (num_dims,) = cursor.unpack("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise CheckpointError(f"{self.path}: tensor {name!r} has {num_dims} dimensions; 1 to {_MAX_DIMS} are read")
        dims = cursor.unpack(f"{num_dims}Q")
        if 0 in dims:
            raise CheckpointError(f"{self.path}: tensor {name!r} has an axis of size 0: {tuple(reversed(dims))}")
        tensor_type, offset = cursor.unpack("IQ")
        return name, tuple(reversed(dims)), tensor_type, offset

    def _place(self, name: str, shape: tuple[int, ...], type_number: int, offset: int) -> GGUFTensor:
        try:
            tensor_type = GGMLQuantizationType(type_number)
        except ValueError:
            known = ", ".join(t.name for t in GGMLQuantizationType)
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has type number {type_number}, which is not one of {known}"
            ) from None
        block, size = GGML_QUANT_SIZES[tensor_type]
        if shape[-1] % block:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has rows of {shape[-1]} values, "
                f"not a multiple of the {block} values of a {tensor_type.name} block"
            )
        num_values = 1
        for dim in shape:
            num_values *= dim
        return GGUFTensor(name, shape, tensor_type, offset, num_values // block * size)

    def _check_size(self) -> None:
        needed = max((t.offset + t.num_bytes for t in self.tensors.values()), default=0)
        if needed > len(self._bytes):
            raise CheckpointError(
                f"{self.path} is cut short: its tensors need {needed} bytes, it has {len(self._bytes)}; "
                "download it again"
            )


class _Cursor:
    """A reading position in the header; running past the end raises struct.error."""

    def __init__(self, view: mmap.mmap, path: Path):
        self._view = view
        self._path = path
        self.position = 0

    def unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self._view, self.position)
        self.position += struct.calcsize("<" + layout)
        return values

    def string(self) -> str:
        (length,) = struct.unpack_from("<Q", self._view, self.position)
        start = self.position + 8
        if length > len(self._view) - start:
            raise struct.error("a string goes past the end of the file")
        self.position = start + length
        return self._view[start : self.position].decode("utf-8", errors="replace")

    def value(self, type_number: int) -> Any:
        """One metadata value of the given GGUF value type."""
        kind = self._value_type(type_number)
        if kind is GGUFValueType.STRING:
            return self.string()
        if kind is GGUFValueType.ARRAY:
            return self._array()
        return self.unpack(_SCALARS[kind])[0]

    def _array(self) -> list[Any]:
        item_type, count = self.unpack("IQ")
        kind = self._value_type(item_type)
        # A wrong count must fail here, not after gigabytes of list: the smallest item takes one byte.
        if count > len(self._view) - self.position:
            raise struct.error("an array goes past the end of the file")
        if kind in _SCALARS:
            return list(self.unpack(f"{count}{_SCALARS[kind]}"))
        read: Callable[[], Any] = self.string if kind is GGUFValueType.STRING else self._array
        return [read() for _ in range(count)]

    def _value_type(self, number: int) -> GGUFValueType:
        try:
            return GGUFValueType(number)
        except ValueError:
            raise CheckpointError(
                f"{self._path}: metadata at byte {self.position} has type {number}, "
                "which GGUF does not define; the file is damaged"
            ) from None
