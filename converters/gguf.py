"""GGUFCheckpoint: a GGUF file, or its shards, under Hugging Face names, dequantised slice by slice."""

import re
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from converters.gguf_file import GGUFFile, GGUFTensor
from converters.gguf_names import TensorOrigin, map_tensors
from jaxllm.errors import CheckpointError

_PLAIN: dict[GGMLQuantizationType, Any] = {
    GGMLQuantizationType.F32: np.float32,
    GGMLQuantizationType.F16: np.float16,
    GGMLQuantizationType.BF16: ml_dtypes.bfloat16,
    GGMLQuantizationType.F64: np.float64,
}
# Values dequantised at a time: bounds the float32 copies numpy makes on the way to a narrower result.
_CHUNK_VALUES = 1 << 22
_SHARD_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class GGUFCheckpoint:
    """The Checkpoint protocol over a GGUF file.

    Names, shapes, row order and norm weights are Hugging Face's: what llama.cpp's converters changed is
    undone. Data stay in the memory-mapped file until asked for, and only the rows and blocks a slice touches
    are dequantised.

    Args:
        path: the file; of a split model, any of its shards.
        dtype: of values that are quantised in the file. F32, F16 and BF16 tensors keep their own.

    Raises:
        CheckpointError: not a whole GGUF file, an unsupported architecture, tensors it does not know.
    """

    def __init__(self, path: Path | str, dtype: Any = np.float32):
        self._files = open_shards(Path(path))
        self._dtype = np.dtype(dtype)
        self._file_of = {name: file for file in self._files for name in file.tensors}

    @property
    def path(self) -> Path:
        """The first file, which holds the metadata."""
        return self._files[0].path

    @property
    def metadata(self) -> dict[str, Any]:
        """GGUF metadata: key -> int, float, bool, str or list of these."""
        return self._files[0].metadata

    @property
    def architecture(self) -> str:
        """`general.architecture`, such as "llama"."""
        architecture = self.metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise CheckpointError(f"{self.path} has no general.architecture; is it a model file?")
        return architecture

    @cached_property
    def _origins(self) -> dict[str, TensorOrigin]:
        num_experts = self.metadata.get(f"{self.architecture}.expert_count", 0)
        try:
            return map_tensors(self.architecture, self._file_of, num_experts)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from None

    def names(self) -> frozenset[str]:
        """The Hugging Face names of all weights."""
        return frozenset(self._origins)

    def shape(self, name: str) -> tuple[int, ...]:
        """The Hugging Face shape of one weight."""
        origin = self._origin(name)
        shape = self._file_of[origin.name].tensors[origin.name].shape
        if origin.expert is not None:
            shape = shape[1:]
        return tuple(reversed(shape)) if origin.transposed else shape

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """A weight or a slice of it.

        Args:
            name: Hugging Face name.
            index: one slice with step 1 per axis, from the first on; axes left out are read whole.

        Returns:
            An array of the slice's shape: float32, float16 or bfloat16 as stored, `dtype` where quantised.
        """
        origin = self._origin(name)
        shape = self.shape(name)
        bounds = [_bounds(name, s, dim) for s, dim in zip(_fill(index, len(shape)), shape, strict=True)]
        if origin.transposed:
            bounds.reverse()
        if origin.permuted and len(shape) == 1:
            values = self._read(TensorOrigin(origin.name), [(0, shape[0])])[self._row_order(origin)]
            return values[slice(*bounds[0])]
        values = self._read(origin, bounds)
        if origin.shift:
            values = (values.astype(np.float32) - origin.shift).astype(values.dtype)
        return values.T if origin.transposed else values

    def read_gguf(self, gguf_name: str) -> np.ndarray:
        """A whole tensor under its GGUF name, as stored: for tables such as `rope_freqs.weight`."""
        tensor = self._tensor(gguf_name)
        return self._read(TensorOrigin(gguf_name), [(0, dim) for dim in tensor.shape])

    def gguf_names(self) -> frozenset[str]:
        """The names of all tensors as the file spells them."""
        return frozenset(self._file_of)

    def _origin(self, name: str) -> TensorOrigin:
        if name not in self._origins:
            raise CheckpointError(f"{self.path} has no tensor {name!r}")
        return self._origins[name]

    def _tensor(self, gguf_name: str) -> GGUFTensor:
        if gguf_name not in self._file_of:
            raise CheckpointError(f"{self.path} has no tensor {gguf_name!r}")
        return self._file_of[gguf_name].tensors[gguf_name]

    def _read(self, origin: TensorOrigin, bounds: list[tuple[int, int]]) -> np.ndarray:
        """The slice of a GGUF tensor in its own axes, rows put back in Hugging Face order."""
        tensor = self._tensor(origin.name)
        rows = self._rows(tensor, origin, bounds)
        raw = self._file_of[origin.name].raw_rows(origin.name)
        # A contiguous run of rows is a view of the mapped file; anything else is gathered.
        contiguous = len(rows) > 0 and rows[-1] - rows[0] + 1 == len(rows) and bool(np.all(np.diff(rows) == 1))
        picked = raw[rows[0] : rows[-1] + 1] if contiguous else raw[rows]
        first, last = bounds[-1]
        values = self._dequantize(tensor, picked, first, last)
        return values.reshape([stop - start for start, stop in bounds])

    def _rows(self, tensor: GGUFTensor, origin: TensorOrigin, bounds: list[tuple[int, int]]) -> np.ndarray:
        outer = tensor.shape[:-1]
        rows = np.arange(int(np.prod(outer, dtype=np.int64))).reshape(outer)
        if origin.expert is not None:
            rows = rows[origin.expert]
        if origin.permuted:
            rows = self._row_order(origin)
        return rows[tuple(slice(start, stop) for start, stop in bounds[:-1])].reshape(-1)

    def _row_order(self, origin: TensorOrigin) -> np.ndarray:
        """Which row of the file is row r of the Hugging Face tensor, for a query or key projection."""
        num_rows = self._tensor(origin.name).shape[0]
        heads = self._num_heads(origin)
        # Pair j of a head lies in the file's rows 2j, 2j+1; Hugging Face has it in rows j, j + head_dim/2.
        return np.arange(num_rows).reshape(heads, num_rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)

    def _num_heads(self, origin: TensorOrigin) -> int:
        key = f"{self.architecture}.attention.head_count"
        heads = self.metadata.get(key)
        if origin.permuted == "k":
            heads = self.metadata.get(key + "_kv", heads)
        if isinstance(heads, list):
            layer = int(origin.name.split(".")[1])
            heads = heads[layer] if layer < len(heads) else None
        rows = self._tensor(origin.name).shape[0]
        if not isinstance(heads, int) or heads < 1 or rows % (2 * heads):
            raise CheckpointError(
                f"{self.path}: {key} is {heads!r}, which does not divide the {rows} rows of {origin.name}"
            )
        return heads

    def _dequantize(self, tensor: GGUFTensor, raw: np.ndarray, first: int, last: int) -> np.ndarray:
        """Columns first..last of rows of bytes, as [rows, last - first]."""
        block, size = GGML_QUANT_SIZES[tensor.type]
        start = first // block
        raw = raw[:, start * size : -(-last // block) * size]
        columns = slice(first - start * block, last - start * block)
        if tensor.type in _PLAIN:
            values = raw.view(_PLAIN[tensor.type])
            return values.astype(np.float32) if values.dtype == np.float64 else np.asarray(values)
        values = np.empty((len(raw), last - first), self._dtype)
        step = max(1, _CHUNK_VALUES // max(1, tensor.shape[-1]))
        for row in range(0, len(raw), step):
            try:
                values[row : row + step] = dequantize(raw[row : row + step], tensor.type)[:, columns]
            except NotImplementedError:
                raise CheckpointError(
                    f"{self.path}: tensor {tensor.name!r} is stored as {tensor.type.name}, which cannot be dequantised"
                ) from None
        return values


def open_shards(path: Path) -> list[GGUFFile]:
    """The files of a model, the one with the metadata first: one, or all shards of a split model.

    Raises:
        CheckpointError: as GGUFFile, and for a shard that is missing, named.
    """
    match = _SHARD_NAME.fullmatch(path.name)
    if match is None:
        first = GGUFFile(path)
        if first.metadata.get("split.count", 1) > 1:
            raise CheckpointError(
                f"{path} is one of {first.metadata['split.count']} shards and was renamed; "
                "shards must be named NAME-00001-of-00003.gguf and so on"
            )
        return [first]
    count = int(match[3])
    paths = [path.with_name(f"{match[1]}-{i:05d}-of-{match[3]}.gguf") for i in range(1, count + 1)]
    missing = [p.name for p in paths if not p.is_file()]
    if missing:
        raise CheckpointError(f"{path} is one of {count} shards; missing beside it: {', '.join(missing)}")
    return [GGUFFile(p) for p in paths]


def _fill(index: tuple[slice, ...] | None, num_axes: int) -> list[slice]:
    given = list(index or ())
    return given + [slice(None)] * (num_axes - len(given))


def _bounds(name: str, index: slice, dim: int) -> tuple[int, int]:
    start, stop, step = index.indices(dim)
    if step != 1:
        raise ValueError(f"slices of {name!r} must have step 1, got {index}")
    return start, max(start, stop)
