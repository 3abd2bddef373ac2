"""Rules: which checkpoint tensor fills which part of which parameter, a line each.

A rule's layout is read like einops: `"(K G H) D -> D K G H"` splits the tensor's first axis and moves
the rest. Sizes come from the parameter, so that a shard of the parameter asks the checkpoint only for
the slice that it is made of.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from converters.checkpoint import Checkpoint
from jaxllm.errors import CheckpointError

Index = tuple[slice, ...]


@dataclass(frozen=True)
class Rule:
    """One line of a family's table.

    Attributes:
        source: name of the checkpoint tensor; `{i}` stands for the layer.
        target: path of the parameter, with the same `{i}`.
        layout: from the tensor's axes to the parameter's. An axis named K is the KV heads (repeated
            when the parameter has more), V the vocabulary (zeros beyond the tensor's rows).
        part: (axis of the parameter, index): the rule fills only this index or slice of that axis,
            which its layout leaves out (an index) or keeps (a slice).
    """

    source: str
    target: str
    layout: str
    part: tuple[int, int | slice] | None = None


@dataclass(frozen=True)
class BoundRule:
    """A rule of one layer, with the layout taken apart."""

    source: str
    target: str
    inputs: tuple[tuple[str, ...], ...]
    outputs: tuple[str, ...]
    part: tuple[int, int | slice] | None

    def _target_names(self) -> tuple[str | None, ...]:
        """The name of each axis of the parameter; None for one that `part` picks an index of."""
        names: list[str | None] = list(self.outputs)
        if self.part is not None and isinstance(self.part[1], int):
            names.insert(self.part[0], None)
        return tuple(names)

    def _sizes(self, shape: Sequence[int]) -> dict[str, int]:
        """Axis name -> size in the parameter."""
        sizes = {}
        for axis, (name, size) in enumerate(zip(self._target_names(), shape, strict=True)):
            if name is None:
                continue
            if self.part is not None and axis == self.part[0] and isinstance(self.part[1], slice):
                size = len(range(*self.part[1].indices(size)))
            sizes[name] = size
        return sizes

    def part_indices(self, shape: Sequence[int]) -> range:
        """What the rule fills of the axis that `part` names (of axis 0 without a part)."""
        axis, part = self.part or (0, slice(None))
        return range(*part.indices(shape[axis])) if isinstance(part, slice) else range(shape[axis])[part:][:1]

    def check(self, source_shape: tuple[int, ...], shape: Sequence[int], stored: Mapping[str, int]) -> None:
        """Raise CheckpointError unless the tensor has the shape that fills the parameter's.

        Args:
            source_shape: of the tensor.
            shape: of the parameter.
            stored: sizes of the axes that the checkpoint has smaller: see `check_rules`.
        """
        sizes = self._sizes(shape)
        wanted = []
        for group in self.inputs:
            # Query heads are as many whether or not KV heads are repeated.
            own = sizes if "G" in group else {**sizes, **stored}
            wanted.append(prod(own[name] for name in group))
        if list(source_shape) != wanted:
            raise CheckpointError(
                f"tensor {self.source!r} has shape {source_shape}; {self.target!r} needs {tuple(wanted)}"
            )

    def fill(self, checkpoint: Checkpoint, shape: Sequence[int], index: Index, out: np.ndarray) -> None:
        """Write this rule's share of the parameter's slice `index` into `out`, which has its shape."""
        ranges: dict[str, range] = {}
        place: list[int | slice] = []
        for axis, (name, size, wanted) in enumerate(zip(self._target_names(), shape, index, strict=True)):
            inside = range(*wanted.indices(size))
            if name is not None and not (self.part is not None and axis == self.part[0]):
                ranges[name] = inside
                place.append(slice(None))
                continue
            assert self.part is not None
            if isinstance(self.part[1], int):
                picked = self.part[1] % size  # negative ones count from the end
                if picked not in inside:
                    return
                place.append(picked - inside.start)
            else:
                own = range(*self.part[1].indices(size))
                start, stop = max(own.start, inside.start), min(own.stop, inside.stop)
                if start >= stop:
                    return
                ranges[name or ""] = range(start - own.start, stop - own.start)
                place.append(slice(start - inside.start, stop - inside.start))
        out[tuple(place)] = self._read(checkpoint, self._sizes(shape), ranges)

    def _read(self, checkpoint: Checkpoint, sizes: dict[str, int], ranges: dict[str, range]) -> np.ndarray:
        source_shape = checkpoint.shape(self.source)
        index, split, later = [], [], []
        repeats = 1
        for group, actual in zip(self.inputs, source_shape, strict=True):
            first, inner = group[0], prod(sizes[name] for name in group[1:])
            if "K" in group and "G" not in group:
                repeats = prod(sizes[name] for name in group) // actual
            outer = ranges[first]
            if first == "K" and repeats > 1:
                outer = range(outer.start // repeats, -(-outer.stop // repeats))
            stop = min(outer.stop * inner, actual)
            index.append(slice(min(outer.start * inner, stop), stop))
            split.append(stop // inner - min(outer.start, stop // inner))
            split += [sizes[name] for name in group[1:]]
            later += [name for name in group[1:]]
        if 0 in split:  # rows of padding only
            values = np.empty(split, np.float32)
        else:
            values = checkpoint.read(self.source, tuple(index)).reshape(split)
            if values.dtype.kind in "iub":
                raise CheckpointError(f"tensor {self.source!r} holds {values.dtype} where weights are floats")
        names = [name for group in self.inputs for name in group]
        values = values.transpose([names.index(name) for name in self.outputs])
        for axis, name in enumerate(self.outputs):
            if name == "K" and repeats > 1:
                values = np.repeat(values, repeats, axis)
                skip = ranges["K"].start % repeats
                values = np.take(values, range(skip, skip + len(ranges["K"])), axis)
            elif name == "V" and values.shape[axis] < len(ranges["V"]):
                missing = [(0, 0)] * values.ndim
                missing[axis] = (0, len(ranges["V"]) - values.shape[axis])
                values = np.pad(values, missing)
            elif name in later and len(ranges[name]) != values.shape[axis]:
                values = np.take(values, ranges[name], axis)
        return values


def _parse(layout: str) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
    left, right = layout.split("->")
    groups = re.findall(r"\(([^)]*)\)|(\S+)", left)
    return tuple(tuple((many or one).split()) for many, one in groups), tuple(right.split())


def bind_rules(rules: Iterable[Rule], num_layers: int) -> list[BoundRule]:
    """Write the rules out for every layer."""
    bound = []
    for rule in rules:
        inputs, outputs = _parse(rule.layout)
        for i in range(num_layers if "{i}" in rule.source else 1):
            source, target = (text.replace("{i}", str(i)) for text in (rule.source, rule.target))
            bound.append(BoundRule(source, target, inputs, outputs, rule.part))
    return bound


def check_rules(
    bound: Sequence[BoundRule],
    shapes: Mapping[str, tuple[int, ...]],
    checkpoint: Checkpoint,
    ignored: Sequence[str],
    stored: Mapping[str, int],
) -> dict[str, list[BoundRule]]:
    """The rules of each parameter; every tensor is used and every parameter filled, or an error says what is not.

    Args:
        bound: rules of all layers.
        shapes: of the parameters, by path.
        checkpoint: to be read.
        ignored: patterns (for `re.fullmatch`) of tensors that need not be used.
        stored: what the checkpoint has of the axes that a parameter may have more of: K, its KV heads,
            and V, its vocabulary.

    Raises:
        CheckpointError: leftovers on either side, or shapes that do not fit.
    """
    names = checkpoint.names()
    by_target: dict[str, list[BoundRule]] = {}
    missing = []
    for rule in bound:
        if rule.target not in shapes:
            continue
        if rule.source not in names:
            missing.append(rule.source)
            continue
        rule.check(checkpoint.shape(rule.source), shapes[rule.target], stored)
        by_target.setdefault(rule.target, []).append(rule)
    used = {rule.source for rules in by_target.values() for rule in rules}
    left = sorted(name for name in names - used if not any(re.fullmatch(pattern, name) for pattern in ignored))
    empty = sorted(set(shapes) - {rule.target for rule in bound})
    problems = [
        f"{what}: {_some(items)}"
        for what, items in (
            ("tensors that are missing", sorted(missing)),
            ("tensors that nothing uses", left),
            ("parameters that nothing fills", empty),
        )
        if items
    ]
    if problems:
        raise CheckpointError("the checkpoint does not fit the model; " + "; ".join(problems))
    return by_target


def _some(items: Sequence[str], limit: int = 8) -> str:
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more
