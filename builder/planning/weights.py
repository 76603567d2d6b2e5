"""Chooses a scheme for each layer's attention and MLP, and for the head.

What rounding does is measured with weights rounded to nearest, whatever the recipe's method is:
a method that regards the inputs does less harm, but where, it doesn't change much.
"""

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

from llmbuild.builder.calibration.sensitivity import WeightChange
from llmbuild.builder.graph.passes.rewrite import linears_of
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.builder.graph.trace import trace
from llmbuild.builder.models.canonical import EMBEDDING, HEAD
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.planning.part import Aim, Bench, Part
from llmbuild.builder.quantisation import plan_quantisation, untie_head
from llmbuild.builder.recipe.quantisation import UNQUANTISED, Override, Quantisation
from llmbuild.builder.recipe.target import SCHEMES
from llmbuild.errors import RecipeError
from llmbuild.quant.grid import WeightGrid
from llmbuild.quant.plan import QuantPlan
from llmbuild.quant.reader import planned_reader, value_reader
from llmbuild.quant.sensitivity import Choice, Option, matrix_bytes
from llmbuild.runtime.target import CPU

_ITEM_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class _Planned:
    """A step graph and its plan. items: names of matrices by the glob that overrides match them
    with, those alone that the recipe's own overrides leave open."""

    config: DecoderConfig
    step: StepGraph
    plan: QuantPlan
    items: dict[str, list[str]]

    def bytes_of(self, names: list[str], item_bytes: int) -> int:
        """What a decode step reads of them as the plan has them."""
        return sum(self._bytes(name, self.plan.weights.get(name), item_bytes) for name in names)

    def full_bytes_of(self, names: list[str], item_bytes: int) -> int:
        """The same without quantisation."""
        return sum(self._bytes(name, None, item_bytes) for name in names)

    def _bytes(self, name: str, grid: WeightGrid | None, item_bytes: int) -> int:
        shape = self.step.weights[name].shape
        return self.config.read_by_token(shape, matrix_bytes(shape, grid, item_bytes))


def check_has_scheme(quantisation: Quantisation) -> None:
    """Raises RecipeError for a recipe whose weights have no scheme to depart from."""
    if quantisation.scheme == UNQUANTISED:
        allowed = ", ".join(scheme for scheme in SCHEMES[CPU] if scheme != UNQUANTISED)
        raise RecipeError(
            "--weight-ratio and --weight-max-kl choose between the recipe's scheme and better "
            f"ones; quantisation.scheme: given {UNQUANTISED}; allowed: {allowed}"
        )


def weights_part(bench: Bench, aim: Aim) -> Part:
    """Measure all that the recipe's own overrides leave open, in its scheme and, where that has 4
    bits, in the one of 8, and choose."""
    own, item_bytes = bench.resolved.quantisation, _ITEM_BYTES[bench.recipe.precision]
    planned = _planned(bench, own)
    linears = _linears(planned.step)
    opened = {name for names in planned.items.values() for name in names}
    fixed_bytes = planned.bytes_of([n for n in linears if n not in opened], item_bytes)
    full_bytes = planned.full_bytes_of(linears, item_bytes)
    by_scheme = {
        scheme: planned if scheme == own.scheme else _planned(bench, _with_scheme(own, scheme))
        for scheme in _candidates(own.scheme)
    }
    sizes = {
        match: {UNQUANTISED: planned.full_bytes_of(names, item_bytes)}
        | {scheme: its.bytes_of(its.items[match], item_bytes) for scheme, its in by_scheme.items()}
        for match, names in planned.items.items()
    }
    aim.check(sizes, fixed_bytes, full_bytes)
    items = {match: [Option(UNQUANTISED, sizes[match][UNQUANTISED], 0.0)] for match in sizes}
    for scheme, its in by_scheme.items():
        changes = [_change(bench, its, its.items[match]) for match in sizes]
        for match, kl_nats in zip(sizes, bench.measure(scheme, its.step, changes), strict=True):
            items[match].append(Option(scheme, sizes[match][scheme], kl_nats))
    choice = aim.choose(items, fixed_bytes, full_bytes)
    return Part(
        name="weights",
        unit="step",
        items=items,
        choice=choice,
        fixed_bytes=fixed_bytes,
        full_bytes=full_bytes,
        full_dtype=bench.recipe.precision,
        per=1,
        together_kl_nats=_measure_together(bench, choice),
    )


def weight_overrides(choice: Choice, scheme: str) -> list[Override]:
    """What a recipe of this scheme has to say: where another one was chosen."""
    return [
        Override(match=match, scheme=option.precision)
        for match, option in choice.items()
        if option.precision != scheme
    ]


def _candidates(scheme: str) -> list[str]:
    """The scheme, and the one with the same activations and weights of 8 bits where it has 4."""
    wider = scheme.replace("w4", "w8")
    return [*dict.fromkeys((wider, scheme))]


def _with_scheme(own: Quantisation, scheme: str) -> Quantisation:
    other = Quantisation(scheme=scheme, overrides=own.overrides)
    return Quantisation.model_validate(other.resolved())


def _planned(bench: Bench, quantisation: Quantisation) -> _Planned:
    config = bench.model.config
    step = trace(config, "fp32")
    plan = plan_quantisation(quantisation, step, bench.model.weights)
    untie_head(step, plan)
    items: dict[str, list[str]] = {}
    for name in _linears(step):
        known_as = EMBEDDING if name == HEAD and config.tie_embeddings else name
        own = bench.recipe.quantisation.overrides
        if name in plan.weights and not any(fnmatchcase(known_as, each.match) for each in own):
            items.setdefault(_match(known_as), []).append(name)
    return _Planned(config, step, plan, items)


def _match(name: str) -> str:
    block = re.match(r"layers\.\d+\.(attention|mlp)\.", name)
    return f"{block[0]}*" if block else name


def _linears(step: StepGraph) -> list[str]:
    """Matrices that a decode step reads, each once."""
    values = (node.inputs[1] for node in linears_of(step.graph))
    return [*dict.fromkeys(str(value.name) for value in values if value is not None)]


def _change(bench: Bench, planned: _Planned, names: list[str]) -> WeightChange:
    groups = planned.plan.activation_groups
    plan = QuantPlan(
        {name: planned.plan.weights[name] for name in names},
        {name: groups[name] for name in names if name in groups},
    )
    return WeightChange(plan, value_reader(planned_reader(bench.model.weights, plan)))


def _measure_together(bench: Bench, choice: Choice) -> float:
    own = bench.resolved.quantisation
    overrides = own.overrides + tuple(weight_overrides(choice, own.scheme))
    chosen = own.model_copy(update={"overrides": overrides}).resolved()
    planned = _planned(bench, Quantisation.model_validate(chosen))
    names = [name for names in planned.items.values() for name in names]
    if not names:
        return 0.0
    change = _change(bench, planned, names)
    return bench.measure("weights as chosen", planned.step, [change])[0]
