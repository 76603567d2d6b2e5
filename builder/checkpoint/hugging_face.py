"""Hugging Face directories, quantised ones too: their linears' parts become matrices again."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmbuild.builder.checkpoint.awq import find_awq
from llmbuild.builder.checkpoint.base import Checkpoint, TensorInfo
from llmbuild.builder.checkpoint.compressed_tensors import find_compressed
from llmbuild.builder.checkpoint.gptq import find_gptq
from llmbuild.builder.checkpoint.quantisation_section import Section
from llmbuild.builder.checkpoint.safetensors import SafetensorsCheckpoint
from llmbuild.builder.checkpoint.stored_matrix import StoredMatrix
from llmbuild.errors import CheckpointError
from llmbuild.quant.grid import QuantisedMatrix, WeightGrid

SECTION = "quantization_config"
_METHODS = ("gptq", "awq", "compressed-tensors")


def open_hugging_face(directory: Path) -> Checkpoint:
    """The checkpoint in a directory, as it is or with its quantised linears as matrices.

    Raises CheckpointError as SafetensorsCheckpoint does, for a quantization_config that can't be
    read, and for parts of a quantised linear that are missing or don't fit.
    """
    stored = SafetensorsCheckpoint(directory)
    section = stored.config.get(SECTION)
    try:
        if stored.config.get("compression_config") is not None:
            raise CheckpointError(
                "compression_config is of an early version of compressed-tensors, which can't be "
                f"read; save the model with one that writes {SECTION}"
            )
        if section is None:
            _refuse_orphans(stored)
            return stored
        return QuantisedCheckpoint(stored, *_find(stored, section))
    except CheckpointError as error:
        raise CheckpointError(f"{directory}: {error}") from error


class QuantisedCheckpoint:
    """A checkpoint whose quantised linear X has one tensor X.weight, [out, in] as float32, in place
    of its parts. It has a grid where one of ours holds it; `notes` says which don't, and why.
    """

    format = "safetensors"

    def __init__(
        self,
        stored: SafetensorsCheckpoint,
        matrices: Sequence[StoredMatrix],
        unused: set[str],
        notes: Sequence[str],
    ) -> None:
        self.config: dict[str, Any] = {k: v for k, v in stored.config.items() if k != SECTION}
        self._stored = stored
        self._matrices = {matrix.parts.name("weight"): matrix for matrix in matrices}
        hidden = unused.union(*(matrix.names() for matrix in matrices))
        plain = {name: info for name, info in stored.tensors.items() if name not in hidden}
        twice = sorted(plain.keys() & self._matrices.keys())
        if twice:
            raise CheckpointError(f"stored both quantised and not: {', '.join(twice)}")
        grids = {name: matrix.grid() for name, matrix in self._matrices.items()}
        self.notes = (*notes, *_lost_codes(grids))
        quantised = {
            name: TensorInfo(matrix.shape, f"int{matrix.bits}", grids[name][0], by_rows=False)
            for name, matrix in self._matrices.items()
        }
        self.tensors: Mapping[str, TensorInfo] = plain | quantised

    def read(self, name: str) -> NDArray[Any]:
        matrix = self._matrices.get(name)
        return self._stored.read(name) if matrix is None else matrix.values()

    def read_rows(self, name: str, begin: int, end: int) -> NDArray[Any]:
        matrix = self._matrices.get(name)
        if matrix is None:
            return self._stored.read_rows(name, begin, end)
        return matrix.values()[begin:end].copy()

    def read_codes(self, name: str, rows: tuple[int, int] | None = None) -> QuantisedMatrix:
        grid = self.tensors[name].grid
        assert grid is not None
        matrix = self._matrices[name].matrix(grid)
        return matrix.take_rows(np.arange(*rows)) if rows else matrix


def _find(
    stored: SafetensorsCheckpoint, section: object
) -> tuple[list[StoredMatrix], set[str], list[str]]:
    """Quantised linears, tensors of no use, and notes."""
    method = Section(section, SECTION).take("quant_method")
    match method:
        case "gptq":
            return find_gptq(stored, section), set(), []
        case "awq":
            return find_awq(stored, section), set(), []
        case "compressed-tensors":
            return find_compressed(stored, section)
    raise CheckpointError(
        f"{SECTION} has quant_method {method!r}; {', '.join(_METHODS)} can be read. Give a "
        "checkpoint of one of these, the unquantised model, or a GGUF file"
    )


def _refuse_orphans(stored: SafetensorsCheckpoint) -> None:
    for name in stored.tensors:
        if name.endswith((".qweight", ".weight_packed")):
            raise CheckpointError(
                f"config.json has no {SECTION}, but {name} is stored quantised; add the "
                f"{SECTION} that the model was quantised with (older checkpoints have it in "
                "quantize_config.json or quant_config.json)"
            )


def _lost_codes(grids: Mapping[str, tuple[WeightGrid | None, str]]) -> list[str]:
    """A line for each reason why matrices are read as their values alone."""
    kinds: dict[str, Counter[str]] = {}
    for name, (grid, reason) in grids.items():
        if grid is None:
            kinds.setdefault(reason, Counter())[name.split(".")[-2]] += 1
    return [
        f"{counts.total()} of {len(grids)} quantised weights can't keep their codes, and are read "
        f"as the values that these stand for, because {reason}: "
        + ", ".join(f"{count} {kind}" for kind, count in counts.items())
        for reason, counts in kinds.items()
    ]
