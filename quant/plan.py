"""The quantisation plan: the one answer to what precision each weight has."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from llmbuild.errors import RecipeError
from llmbuild.quant.grid import GROUP_UNIT, WeightGrid
from llmbuild.quant.schemes import Scheme

WIDEST_ACTIVATION_GROUP = 64

Method = Literal["rtn", "gptq", "awq", "smoothquant"]
METHODS: tuple[Method, ...] = get_args(Method)


@dataclass(frozen=True)
class Rule:
    """What becomes of the matrices whose names a glob matches; scheme None leaves them as they
    are. group_size and symmetric are a grid's, for schemes that don't keep stored codes. method:
    how weights are rounded to it."""

    match: str
    scheme: Scheme | None
    group_size: int = 0
    symmetric: bool = True
    method: Method = "rtn"


@dataclass(frozen=True)
class Candidate:
    """A matrix, or a stack of experts', that may be quantised. stored: the grid that the checkpoint
    keeps it on, if any. is_table: no linear reads it, so only stored codes are worth keeping."""

    name: str
    shape: tuple[int, ...]
    stored: WeightGrid | None
    is_table: bool = False


@dataclass(frozen=True)
class QuantPlan:
    """weights: grid of each quantised tensor by canonical name; all others stay as they are.
    activation_groups: of those that meet rounded activations (FP8 where the grid is, else int8),
    how many columns of a row share the activations' scale; with the others, they stay fp32.
    methods: of those that are rounded with regard to their inputs, which calibration has to show;
    the others go to the nearest. static: those whose activations have the same scales in every row,
    and activation_scales what calibration found them to be: fp32 [columns / activation group]."""

    weights: Mapping[str, WeightGrid] = field(default_factory=dict)
    activation_groups: Mapping[str, int] = field(default_factory=dict)
    methods: Mapping[str, Method] = field(default_factory=dict)
    static: frozenset[str] = frozenset()
    activation_scales: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)

    @property
    def needs_calibration(self) -> bool:
        return bool(self.methods or self.static)


def make_plan(
    rules: Sequence[Rule],
    candidates: Iterable[Candidate],
    widest_activation_group: int | None = WIDEST_ACTIVATION_GROUP,
) -> QuantPlan:
    """The plan for the candidates, each under the first rule that matches it.
    widest_activation_group: columns of a row of int8 activations that may share a scale, None for
    all.

    Raises RecipeError for a rule that matches nothing, for stored codes that aren't there, and for
    a grid that doesn't fit, naming every tensor with the group sizes that would.
    """
    candidates = list(candidates)
    _check_matches(rules, candidates)
    weights: dict[str, WeightGrid] = {}
    activation_groups: dict[str, int] = {}
    methods: dict[str, Method] = {}
    static: set[str] = set()
    misfits: list[str] = []
    for each in candidates:
        rule = next((rule for rule in rules if fnmatchcase(each.name, rule.match)), None)
        grid = None if rule is None else _grid(rule, each)
        if rule is None or rule.scheme is None or grid is None:
            continue
        if not grid.fits(each.shape[-1]):
            misfits.append(_misfit(grid, each))
            continue
        weights[each.name] = grid
        if rule.scheme.rounds_activations:
            widest = None if grid.is_fp8 else widest_activation_group
            activation_groups[each.name] = activation_group(grid, each.shape[-1], widest)
        if rule.method != "rtn" and grid != each.stored:  # what is stored is kept as it is
            methods[each.name] = rule.method
        if rule.scheme.static_activations:
            static.add(each.name)
    if misfits:
        raise RecipeError("\n  ".join(["quantisation: the grid doesn't fit:", *misfits]))
    if not weights and any(rule.scheme and rule.scheme.weight_bits is None for rule in rules):
        raise RecipeError(
            "quantisation.scheme keeps the codes that the checkpoint stores, and it stores no "
            "linear's weights on a grid (Q4_0, Q4_1, Q8_0, GPTQ, AWQ, compressed-tensors), and no "
            "mixture's gate and up on the same one; choose w4a8 or w8a8 to quantise them"
        )
    return QuantPlan(weights, activation_groups, methods, frozenset(static))


def activation_group(
    grid: WeightGrid, columns: int, widest: int | None = WIDEST_ACTIVATION_GROUP
) -> int:
    """Columns of a row of activations that share a scale: as wide as the weight's groups, so that
    both scales meet in one product, but not wider than precision allows, `widest`."""
    widest = min(widest or columns, grid.columns_of(columns))
    return widest if grid.columns_of(columns) % widest == 0 else GROUP_UNIT


def _grid(rule: Rule, candidate: Candidate) -> WeightGrid | None:
    if rule.scheme is None:
        return None
    bits = rule.scheme.weight_bits
    if bits is None:
        return candidate.stored
    if candidate.is_table:
        return None
    return WeightGrid(bits, rule.group_size, rule.symmetric, is_fp8=rule.scheme.is_fp8)


def _check_matches(rules: Sequence[Rule], candidates: Sequence[Candidate]) -> None:
    takes_stored = any(rule.scheme and rule.scheme.weight_bits is None for rule in rules)
    for rule in rules:
        if rule.match == "*":  # for all that others leave
            continue
        changed = [each for each in candidates if _may_change(rule, each, takes_stored)]
        if not any(fnmatchcase(each.name, rule.match) for each in changed):
            shown = [each.name for each in changed if not re.match(r"layers\.[1-9]", each.name)]
            raise RecipeError(
                f"quantisation.overrides: {rule.match!r} matches no matrix that can be quantised; "
                f"those are {', '.join(shown)}, and the same of the other layers"
            )


def _may_change(rule: Rule, candidate: Candidate, takes_stored: bool) -> bool:
    """Whether the rule says anything of the matrix. A table is never rounded; it can have its
    stored codes, or be kept from having them where some rule takes such."""
    if not candidate.is_table:
        return True
    return takes_stored if rule.scheme is None else rule.scheme.weight_bits is None


def _misfit(grid: WeightGrid, candidate: Candidate) -> str:
    columns = candidate.shape[-1]
    sizes = [n for n in range(GROUP_UNIT, columns + 1, GROUP_UNIT) if columns % n == 0]
    none = f"{GROUP_UNIT} doesn't divide; give it the scheme none"
    legal = f"allow group sizes {', '.join(map(str, sizes))}" if sizes else none
    return f"{candidate.name}: {grid.describe()} on rows of {columns} columns, which {legal}"
