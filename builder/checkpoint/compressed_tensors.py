"""Checkpoints in the compressed-tensors formats `pack-quantized` and `int-quantized`, of integers.

A linear X has X.weight_scale [out, groups], X.weight_zero_point where it is asymmetric,
X.weight_g_idx [in], the group of each column, where groups follow the activation order, and its
codes, which are signed: in `int-quantized` X.weight, int8 [out, in]; in `pack-quantized`
X.weight_packed, int32 [out, ceil(in * bits / 32)], with X.weight_shape, [out, in]. There codes and
zero points, which are packed along the rows, are stored with 2^(bits - 1) added.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmbuild.builder.checkpoint.quantisation_section import REQUIRED, Section
from llmbuild.builder.checkpoint.safetensors import SafetensorsCheckpoint
from llmbuild.builder.checkpoint.stored_matrix import FLOATS, Parts, StoredMatrix, unpack
from llmbuild.errors import CheckpointError

PACKED = "pack-quantized"
PLAIN = "int-quantized"
_MIXED = "mixed-precision"  # each group states its own
_WEIGHTS = {PACKED: "weight_packed", PLAIN: "weight"}
_INDEX, _ZERO_POINT, _SHAPE = "weight_g_idx", "weight_zero_point", "weight_shape"
# Of activations and of the KV cache, whose precision the recipe chooses.
_UNUSED_PARTS = (
    *("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point"),
    *("q_scale", "k_scale", "v_scale", "q_zero_point", "k_zero_point", "v_zero_point"),
)


@dataclass(frozen=True)
class _Group:
    """One of the config's groups: which modules it is for, and how their weights are stored."""

    targets: list[str]
    format: str
    bits: int
    group_size: int
    symmetric: bool
    per_tensor: bool


def find_compressed(
    checkpoint: SafetensorsCheckpoint, raw: object
) -> tuple[list[StoredMatrix], set[str], list[str]]:
    """The quantised linears of a checkpoint, by its quantization_config; the tensors of it that are
    of no use; and notes of what isn't used."""
    section = Section(raw, "quantization_config")
    form = section.one_of("format", [PACKED, PLAIN, _MIXED])
    section.one_of("quantization_status", ["compressed", "frozen"], default="compressed")
    sparsity = section.take("sparsity_config", {})
    if sparsity and (not isinstance(sparsity, dict) or sparsity.get("format") != "dense"):
        section.refuse("sparsity_config", sparsity, "only one of format 'dense' can be read")
    transform = section.take("transform_config", {})
    if transform and transform != {"config_groups": {}}:
        section.refuse("transform_config", transform, "transformed weights can't be read")
    ignore = _patterns(section, "ignore")
    notes: list[str] = []
    if section.take("kv_cache_scheme"):
        notes.append(
            "the checkpoint's scales of a quantised KV cache aren't used: the recipe's kv_cache "
            "chooses its precision"
        )
    groups = list(_groups(section, form, notes))
    section.finish(("quant_method", "global_compression_ratio", "version"))
    matrices: list[StoredMatrix] = []
    for module in _quantised_modules(checkpoint):
        if any(_rank(target, module) is not None for target in ignore if target != "Linear"):
            raise CheckpointError(
                f"{module} is stored quantised, but quantization_config.ignore names it"
            )
        matrices.append(CompressedMatrix(Parts(checkpoint, module), _group_of(module, groups)))
    unused = {n for n in checkpoint.tensors if n.rpartition(".")[2] in _UNUSED_PARTS}
    return matrices, unused, list(dict.fromkeys(notes))


def _groups(section: Section, form: str, notes: list[str]) -> Iterator[_Group]:
    raw_groups = section.take("config_groups", REQUIRED)
    if not isinstance(raw_groups, dict):
        section.refuse("config_groups", raw_groups, "it must be an object of groups")
    for name, raw in raw_groups.items():
        group = Section(raw, f"{section.path}.config_groups.{name}")
        targets = _patterns(group, "targets")
        own = group.one_of("format", [PACKED, PLAIN], REQUIRED if form == _MIXED else form)
        for key in ("input_activations", "output_activations"):
            if isinstance(scheme := group.take(key), dict):
                notes.append(_activations_note(key, scheme))
        weights = Section(group.take("weights", REQUIRED), f"{group.path}.weights")
        yield _weights_group(weights, targets, own)
        group.finish()


def _weights_group(weights: Section, targets: list[str], form: str) -> _Group:
    weights.one_of("type", ["int"], default="int")
    weights.one_of("dynamic", [False], default=False)
    bits = weights.one_of("num_bits", [4, 8])
    size = weights.group_size("group_size", default=-1)
    strategy = weights.one_of(
        "strategy", ["tensor", "channel", "group"], default="group" if size else "tensor"
    )
    if strategy == "group" and not size:
        weights.refuse("group_size", None, "strategy 'group' needs a number of columns")
    symmetric = weights.one_of("symmetric", [True, False], default=True)
    weights.one_of("actorder", ["group", "weight", "dynamic", "static", None], default=None)
    weights.finish(("observer", "observer_kwargs", "scale_dtype", "zp_dtype", "block_structure"))
    size = size if strategy == "group" else 0
    return _Group(targets, form, bits, size, symmetric, strategy == "tensor")


def _activations_note(key: str, scheme: dict[str, Any]) -> str:
    kind = f"{scheme.get('type', 'int')}{scheme.get('num_bits', '')}"
    scales = "dynamic" if scheme.get("dynamic") else "static scales, which aren't used"
    return (
        f"the checkpoint was quantised for {key} of {kind} ({scales}); here the recipe's "
        "quantisation.scheme chooses the precision of activations"
    )


def _patterns(section: Section, key: str) -> list[str]:
    """Names of modules and of their class, and regular expressions after `re:`."""
    patterns = section.texts(key)
    for pattern in patterns:
        if pattern.startswith("re:"):
            try:
                re.compile(pattern[3:])
            except re.error as error:
                section.refuse(key, pattern, f"it isn't a regular expression: {error}")
    return patterns


def _quantised_modules(checkpoint: SafetensorsCheckpoint) -> Iterator[str]:
    """Modules with packed weights, or with int8 ones."""
    for name, info in checkpoint.tensors.items():
        module, _, part = name.rpartition(".")
        if part == _WEIGHTS[PACKED] or (part == _WEIGHTS[PLAIN] and info.dtype == "I8"):
            yield module


def _rank(target: str, module: str) -> int | None:
    """How closely a target means a module: by its name, by a pattern, by its class; None if it
    doesn't."""
    if target == module:
        return 0
    if target.startswith("re:"):
        return 1 if re.match(target[3:], module) else None
    return 2 if target == "Linear" else None


def _group_of(module: str, groups: list[_Group]) -> _Group:
    ranked = [
        (rank, number)
        for number, group in enumerate(groups)
        for target in group.targets
        if (rank := _rank(target, module)) is not None
    ]
    if not ranked:
        targets = [target for group in groups for target in group.targets]
        raise CheckpointError(
            f"{module} is stored quantised, but no target of quantization_config.config_groups "
            f"means it: {', '.join(targets) or 'there is none'}"
        )
    return groups[min(ranked)[1]]


class CompressedMatrix(StoredMatrix):
    """A linear of the group that means it."""

    scale_part = "weight_scale"

    def __init__(self, parts: Parts, group: _Group) -> None:
        self.parts, self.bits, self.symmetric = parts, group.bits, group.symmetric
        self._packed, self._per_tensor = group.format == PACKED, group.per_tensor
        self._weight = _WEIGHTS[group.format]
        stored = parts.info(self._weight, ["I32" if self._packed else "I8"]).shape
        self.shape = self._packed_shape(stored) if self._packed else (stored[0], stored[1])
        rows, columns = self.shape
        self.group_size = 0 if group.group_size >= columns else group.group_size
        if self._per_tensor:
            parts.check(self.scale_part, FLOATS, (1,), (), (1, 1))
        else:
            vectors = [(rows,)] if self.groups == 1 else []
            parts.check(self.scale_part, FLOATS, (rows, self.groups), *vectors)
        if not self.symmetric or _ZERO_POINT in parts:
            self._check_zero_points()
        if _INDEX in parts:
            parts.check(_INDEX, ["I32", "I64"], (columns,))

    def _packed_shape(self, stored: tuple[int, ...]) -> tuple[int, int]:
        self.parts.check(_SHAPE, ["I64", "I32"], (2,))
        rows, columns = (int(size) for size in self.parts.read(_SHAPE))
        if stored != (rows, -(-columns * self.bits // 32)):
            raise CheckpointError(
                f"{self.parts.name(_SHAPE)} says {rows} rows of {columns} columns, but "
                f"{self.parts.name(self._weight)} is of shape {stored}; with {self.bits} bits it "
                f"must be {(rows, -(-columns * self.bits // 32))}"
            )
        return rows, columns

    def _check_zero_points(self) -> None:
        rows, parts = self.shape[0], self.parts
        if parts.stored_dtype(_ZERO_POINT) == "I32":
            parts.check(_ZERO_POINT, ["I32"], (-(-rows * self.bits // 32), self.groups))
        elif self._per_tensor:
            parts.check(_ZERO_POINT, ["I8"], (1,), (), (1, 1))
        else:
            vectors = [(rows,)] if self.groups == 1 else []
            parts.check(_ZERO_POINT, ["I8"], (rows, self.groups), *vectors)

    def names(self) -> list[str]:
        names = [self._weight, "weight_scale", _ZERO_POINT, _SHAPE, _INDEX]
        return [self.parts.name(part) for part in names if part in self.parts]

    def codes(self) -> NDArray[np.uint8]:
        stored = self.parts.read(self._weight)
        if self._packed:
            return unpack(stored, self.bits, axis=1)[:, : self.shape[1]]
        return self._from_signed(stored, self._weight)

    def scales(self) -> NDArray[Any]:
        return self._for_rows(self.parts.read(self.scale_part))

    def stored_zeros(self) -> NDArray[np.uint8] | None:
        if _ZERO_POINT not in self.parts:
            return None
        stored = self.parts.read(_ZERO_POINT)
        if stored.dtype == np.int32:
            return unpack(stored, self.bits, axis=0)[: self.shape[0]]
        return self._for_rows(self._from_signed(stored, _ZERO_POINT))

    def group_index(self) -> NDArray[np.integer[Any]] | None:
        if _INDEX not in self.parts:
            return None
        index = self.parts.read(_INDEX)
        if (index == -1).any():  # as it is before any order has been found
            return None
        counts = np.bincount(index[(index >= 0) & (index < self.groups)], minlength=self.groups)
        if (counts != np.bincount(self._in_order())).any():
            raise CheckpointError(
                f"{self.parts.name(_INDEX)} must put {self.group_size or self.shape[1]} columns "
                f"into each of {self.groups} groups; it puts {counts.tolist()}"
            )
        return index

    def _for_rows(self, numbers: NDArray[Any]) -> NDArray[Any]:
        """Scales or zero points [rows, groups], of one for each row or for the tensor."""
        numbers = numbers.reshape(-1, self.groups)
        return np.array(np.broadcast_to(numbers, (self.shape[0], self.groups)))

    def _from_signed(self, stored: NDArray[np.int8], part: str) -> NDArray[np.uint8]:
        half = 1 << (self.bits - 1)
        if stored.min() < -half or stored.max() >= half:
            raise CheckpointError(
                f"{self.parts.name(part)} holds {stored.min()} to {stored.max()}; codes of "
                f"{self.bits} bits are from {-half} to {half - 1}"
            )
        return (stored.astype(np.int16) + half).astype(np.uint8)
