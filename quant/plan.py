"""The quantisation plan: the one answer to what precision each weight has."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from llmbuild.errors import RecipeError
from llmbuild.quant.grid import GROUP_UNIT, WeightGrid
from llmbuild.quant.schemes import Scheme


@dataclass(frozen=True)
class Candidate:
    """A matrix that may be quantised. stored: the grid that the checkpoint keeps it on, if any."""

    name: str
    shape: tuple[int, ...]
    stored: WeightGrid | None


@dataclass(frozen=True)
class QuantPlan:
    """weights: grid of each quantised tensor by canonical name; all others stay as they are.
    activation_group: columns of a row that share a scale where activations meet a quantised
    weight in int8; 0 where they stay fp32."""

    weights: Mapping[str, WeightGrid] = field(default_factory=dict)
    activation_group: int = 0


def make_plan(
    scheme: Scheme, group_size: int, symmetric: bool, candidates: Iterable[Candidate]
) -> QuantPlan:
    """The plan of a scheme over the matrices that linears read.

    Raises RecipeError that names every tensor on which the grid doesn't fit, with the group sizes
    that would.
    """
    candidates = list(candidates)
    if scheme.weight_bits is None:
        weights = {each.name: each.stored for each in candidates if each.stored is not None}
        if not weights:
            raise RecipeError(
                "quantisation.scheme keeps the codes that the checkpoint stores, and it stores no "
                "linear's weights as Q4_0, Q4_1 or Q8_0; choose w4a8 or w8a8 to quantise them"
            )
    else:
        grid = WeightGrid(scheme.weight_bits, group_size, symmetric)
        misfits = [each for each in candidates if not grid.fits(each.shape[1])]
        if misfits:
            raise RecipeError(_misfits(grid, misfits))
        weights = dict.fromkeys((each.name for each in candidates), grid)
    return QuantPlan(weights, GROUP_UNIT if scheme.int8_activations else 0)


def _misfits(grid: WeightGrid, misfits: list[Candidate]) -> str:
    lines = [f"quantisation: {grid.describe()} doesn't fit every linear; by tensor:"]
    for each in misfits:
        columns = each.shape[1]
        sizes = [n for n in range(GROUP_UNIT, columns + 1, GROUP_UNIT) if columns % n == 0]
        legal = f"group sizes {', '.join(map(str, sizes))}" if sizes else "none, so leave it out"
        lines.append(f"  {each.name}: rows of {columns} columns, which allow {legal}")
    return "\n".join(lines)
