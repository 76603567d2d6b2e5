"""AWQ checkpoints in AutoAWQ's layout `gemm`.

A linear X is X.qweight, int32 [in, out / 8], X.qzeros, int32 [groups, out / 8], and X.scales
[groups, out]. The eight codes of a word lie in the order of _ORDER.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmbuild.builder.checkpoint.quantisation_section import Section
from llmbuild.builder.checkpoint.safetensors import SafetensorsCheckpoint
from llmbuild.builder.checkpoint.stored_matrix import (
    FLOATS,
    Parts,
    StoredMatrix,
    transposed,
    unpack,
)
from llmbuild.errors import CheckpointError

WEIGHT = "qweight"
_BITS = 4
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_CARRY_NOTHING = frozenset(
    {
        *("quant_method", "method", "meta", "lm_head", "modules_to_not_convert", "do_fuse"),
        *("modules_to_fuse", "fuse_max_seq_len", "exllama_config", "desc_act", "damp_percent"),
    }
)


def find_awq(checkpoint: SafetensorsCheckpoint, raw: object) -> list[StoredMatrix]:
    """The quantised linears of a checkpoint, by its quantization_config."""
    section = Section(raw, "quantization_config")
    section.one_of("bits" if "bits" in section else "w_bit", [_BITS])
    group_size = section.group_size("group_size" if "group_size" in section else "q_group_size")
    section.one_of("zero_point", [True], default=True)
    section.one_of("version", ["gemm", "GEMM"], default="gemm")
    for key in ("format", "checkpoint_format"):
        section.one_of(key, ["gemm"], default="gemm")
    section.one_of("backend", ["autoawq"], default="autoawq")
    section.one_of("sym", [False], default=False)
    section.one_of("pack_dtype", ["int32"], default="int32")
    section.finish(_CARRY_NOTHING)
    modules = [n.removesuffix(f".{WEIGHT}") for n in checkpoint.tensors if n.endswith(f".{WEIGHT}")]
    return [AwqMatrix(Parts(checkpoint, module), group_size) for module in modules]


class AwqMatrix(StoredMatrix):
    """Groups are of neighbouring columns, and whole."""

    scale_part = "scales"
    bits = _BITS
    symmetric = False

    def __init__(self, parts: Parts, group_size: int) -> None:
        self.parts = parts
        columns, words = parts.info(WEIGHT, ["I32"]).shape
        self.shape = (words * 8, columns)
        self.group_size = 0 if group_size == columns else group_size
        if self.group_size and columns % self.group_size:
            raise CheckpointError(
                f"{parts.name(WEIGHT)} has {columns} columns, which groups of {self.group_size} "
                "(quantization_config.group_size) must divide"
            )
        parts.check("scales", FLOATS, (self.groups, self.shape[0]))
        parts.check("qzeros", ["I32"], (self.groups, words))

    def names(self) -> list[str]:
        return [self.parts.name(part) for part in (WEIGHT, "scales", "qzeros")]

    def codes(self) -> NDArray[np.uint8]:
        return transposed(unpack(self.parts.read(WEIGHT), self.bits, axis=1, order=_ORDER))

    def scales(self) -> NDArray[Any]:
        return transposed(self.parts.read(self.scale_part))

    def stored_zeros(self) -> NDArray[np.uint8]:
        return transposed(unpack(self.parts.read("qzeros"), self.bits, axis=1, order=_ORDER))

    def group_index(self) -> None:
        return None
