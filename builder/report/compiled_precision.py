"""Holds an executable to the precisions that its manifest states."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from llmbuild.builder.graph.step_graph import CODES, StepGraph
from llmbuild.errors import InternalError
from llmbuild.quant.grid import WeightGrid
from llmbuild.runtime.manifest import KVLayout, Manifest

WeightPrecision = WeightGrid | str  # a grid, or the dtype of one that isn't quantised


@dataclass(frozen=True)
class Activations:
    """What a linear makes of its inputs. group: columns that are rounded to int8 with one scale, 0
    where they stay fp32. static: those scales are the same for every row."""

    group: int = 0
    static: bool = False

    def describe(self) -> str:
        if not self.group:
            return "fp32"
        return f"int8, groups of {self.group}, {'static' if self.static else 'dynamic'} scales"


@dataclass(frozen=True)
class CompiledPrecision:
    """All precisions that an executable has of the same thing: more than one is a fault.

    weights, and activations of those that linears read: by canonical name of the matrix; a group as
    wide as the row has size 0. kv: by item, as kv_dtypes names them.
    """

    weights: Mapping[str, set[WeightPrecision]]
    activations: Mapping[str, set[Activations]]
    kv: Mapping[str, set[str]]


Precision = TypeVar("Precision", bound=WeightPrecision | Activations)


def kv_dtypes(kv: KVLayout) -> dict[str, str]:
    """The dtype of each part of the KV cache: layers.{layer}.{k or v}.{KV head}."""
    return {
        f"layers.{index}.{kind}.{head}": dtype
        for index, layer in enumerate(kv.layers)
        for kind, dtypes in (("k", layer.k_dtypes), ("v", layer.v_dtypes))
        for head, dtype in enumerate(dtypes)
    }


def require_planned(
    compiled: CompiledPrecision, manifest: Manifest, step: StepGraph, kv: KVLayout
) -> None:
    """Raises InternalError, naming every tensor and part of the KV cache of which the executable
    has another precision than the manifest. step, kv: the graph that was lowered, and what its rank
    has of the KV cache; a rank of several stages has only its own layers' tensors."""
    widths = matrix_widths(step)
    is_whole = step.shard is None
    quantised = {n: each for n, each in manifest.quantised.items() if is_whole or n in widths}
    weights: dict[str, WeightPrecision] = dict.fromkeys([*widths, *quantised], manifest.precision)
    activations = dict.fromkeys(compiled.activations, Activations())
    for name, each in quantised.items():
        grid = WeightGrid(each.bits, each.group_size, each.symmetric, each.zero_points, each.is_fp8)
        weights[name] = row_grid(grid, widths.get(name, 0))
        if name in activations:  # otherwise only rows of it are taken
            activations[name] = Activations(each.activation_group, each.static_activations)
    faults = [
        *_differences("weights", weights, compiled.weights),
        *_differences("activations", activations, compiled.activations),
        *_differences("KV cache", kv_dtypes(kv), compiled.kv),
    ]
    if faults:
        raise InternalError(
            "the executable hasn't the precisions that were planned:" + "".join(faults)
        )


def matrix_widths(step: StepGraph) -> dict[str, int]:
    """Columns of each canonical matrix of a step graph."""
    return {
        source: weight.shape[-1]
        for weight in step.weights.values()
        if len(weight.shape) > 1 and weight.part in ("", CODES)
        for source in weight.sources
    }


def row_grid(grid: WeightGrid, width: int) -> WeightGrid:
    """The same grid, with size 0 for groups as wide as the row."""
    return replace(grid, group_size=0 if grid.group_size == width else grid.group_size)


def in_words(precision: WeightPrecision | Activations) -> str:
    """A precision for readers."""
    return precision if isinstance(precision, str) else precision.describe()


def _differences(
    what: str, planned: Mapping[str, Precision], compiled: Mapping[str, set[Precision]]
) -> list[str]:
    faults = []
    for name in dict.fromkeys([*planned, *compiled]):
        found = compiled.get(name, set())
        if name in planned and found == {planned[name]}:
            continue
        wanted = in_words(planned[name]) if name in planned else "not at all"
        had = " and ".join(sorted(in_words(each) for each in found)) or "not at all"
        faults.append(f"\n  {name}: {what} planned {wanted}, compiled {had}")
    return faults
