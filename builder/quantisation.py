"""From a recipe's quantisation to the plan over a model's weights."""

from collections.abc import Iterator

import onnx_ir as ir

from llmbuild.builder.graph.passes.rewrite import nodes_of, users
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.builder.models.weights import ModelWeights
from llmbuild.builder.recipe_quantisation import ROW, UNQUANTISED, Precisions, Quantisation
from llmbuild.quant.plan import Candidate, QuantPlan, Rule, make_plan
from llmbuild.quant.schemes import SCHEMES


def plan_quantisation(
    quantisation: Quantisation, step: StepGraph, weights: ModelWeights
) -> QuantPlan:
    """The plan for a step graph that no pass has changed yet; the recipe is a resolved one.

    Every linear is quantised but a mixture's router, whose logits choose experts. Tables (an
    embedding that isn't the head as well) change only where their stored codes are kept.
    Raises RecipeError, naming the tensors, when the grid doesn't fit.
    """
    rules = [_rule(override.match, override) for override in quantisation.overrides]
    if quantisation.scheme != UNQUANTISED:
        rules.append(_rule("*", quantisation))
    linears = dict.fromkeys(_linear_weights(step))
    candidates = [
        Candidate(name, step.weights[name].shape, weights.stored_grid(name), name not in linears)
        for name in dict.fromkeys([*linears, *_tables(step)])
    ]
    return make_plan(rules, candidates)


def _rule(match: str, choice: Precisions) -> Rule:
    scheme = None if choice.scheme == UNQUANTISED else SCHEMES[choice.scheme]
    group_size = 0 if choice.group_size in (ROW, None) else int(choice.group_size)
    return Rule(match, scheme, group_size, choice.symmetric is not False)


def _linear_weights(step: StepGraph) -> Iterator[str]:
    for node in nodes_of(step.graph, "linear"):
        if all(user.op_type != "moe_route" for user in users(node.outputs[0])):
            yield _weight_name(node, 1)


def _tables(step: StepGraph) -> list[str]:
    gathers = nodes_of(step.graph, "Gather", "")
    names = [_weight_name(node, 0) for node in gathers]
    return [name for name in names if name in step.weights and len(step.weights[name].shape) == 2]


def _weight_name(node: ir.Node, slot: int) -> str:
    value = node.inputs[slot]
    assert value is not None
    return str(value.name)
