"""From a recipe's precisions to the plans over a model's weights and KV cache."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TypeVar

import onnx_ir as ir

from llmbuild.builder.graph.passes.rewrite import linears_of, nodes_of, users
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.builder.models.canonical import EMBEDDING, HEAD
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.recipe.quantisation import ROW, UNQUANTISED, Precisions, Quantisation
from llmbuild.builder.recipe.recipe import ResolvedRecipe
from llmbuild.errors import RecipeError
from llmbuild.quant.grid import WeightGrid
from llmbuild.quant.plan import (
    WIDEST_ACTIVATION_GROUP,
    Candidate,
    QuantPlan,
    Rule,
    make_plan,
)
from llmbuild.quant.reader import Tensors
from llmbuild.quant.schemes import SCHEMES
from llmbuild.runtime.manifest import KVLayer, KVLayout
from llmbuild.runtime.target import CPU, TENSORRT_RTX

Choice = TypeVar("Choice")


def plan_quantisation(
    quantisation: Quantisation, step: StepGraph, weights: Tensors, target: str = CPU
) -> QuantPlan:
    """The plan for a step graph that no pass has changed yet; the recipe is a resolved one.
    target: the kernels of tensorrt-rtx have one scale for all of a linear's activations.

    Every linear is quantised but a mixture's router, whose logits choose experts. Tables (an
    embedding that isn't the head as well) change only where their stored codes are kept. Where a
    shared one is rounded for the head's inputs, or to FP8, the head gets a name of its own: see
    untie_head. Raises RecipeError, naming the tensors, when the grid doesn't fit.
    """
    rules = [_rule(override.match, override) for override in quantisation.overrides]
    if quantisation.scheme != UNQUANTISED:
        rules.append(_rule("*", quantisation))
    linears, tables = dict.fromkeys(_linear_weights(step)), _tables(step)
    candidates = [
        Candidate(name, step.weights[name].shape, weights.stored_grid(name), name not in linears)
        for name in dict.fromkeys([*linears, *tables])
    ]
    widest = None if target == TENSORRT_RTX else WIDEST_ACTIVATION_GROUP
    plan = make_plan(rules, candidates, widest)
    shared = [name for name in tables if name in linears and _is_for_products(name, plan)]
    return _with_own_head(plan, weights.stored_grid(shared[0])) if shared else plan


def untie_head(step: StepGraph, plan: QuantPlan) -> None:
    """Give a head that the plan names apart from the embedding, and that reads the embedding as
    traced, a weight of its own."""
    embedding = step.graph.initializers.get(EMBEDDING)
    heads = [node for node in nodes_of(step.graph, "linear") if node.inputs[1] is embedding]
    if embedding is None or HEAD not in plan.weights or not heads:
        return
    head = ir.Value(name=HEAD, shape=embedding.shape, type=embedding.type)
    step.graph.initializers[HEAD] = head
    step.weights[HEAD] = replace(step.weights[EMBEDDING], sources=(HEAD,))
    for node in heads:
        node.replace_input_with(1, head)
    if not embedding.uses():  # the last of several stages takes no rows of it
        del step.graph.initializers[EMBEDDING], step.weights[EMBEDDING]


def kv_layout(resolved: ResolvedRecipe, config: DecoderConfig) -> KVLayout:
    """The KV cache that a recipe asks for. Raises RecipeError for an override of nothing."""
    chosen = resolved.kv_cache
    layers, heads = range(config.num_layers), range(config.num_kv_heads)
    names = [f"layers.{layer}.{part}.{head}" for layer in layers for part in "kv" for head in heads]
    for override in chosen.overrides:
        if not any(fnmatchcase(name, override.match) for name in names):
            raise RecipeError(
                f"kv_cache.overrides: {override.match!r} matches no part of the KV cache; those "
                f"are {names[0]} to {names[-1]}: layer, k or v, KV head"
            )

    def dtype(name: str) -> str:
        matching = (each.dtype for each in chosen.overrides if fnmatchcase(name, each.match))
        return next(matching, chosen.dtype)

    return KVLayout(
        block_size=chosen.block_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        layers=[
            KVLayer.of_heads(
                (dtype(f"layers.{layer}.k.{head}"), dtype(f"layers.{layer}.v.{head}"))
                for head in heads
            )
            for layer in layers
        ],
    )


def _is_for_products(name: str, plan: QuantPlan) -> bool:
    """Whether a matrix is rounded to what suits a linear alone: for its inputs, or to FP8, whose
    three bits are few for rows that are read as they are."""
    return name in plan.methods or (name in plan.weights and plan.weights[name].is_fp8)


def _with_own_head(plan: QuantPlan, stored: WeightGrid | None) -> QuantPlan:
    """The plan when the embedding is the head as well, and is rounded for products: that isn't what
    its rows need, so they stay as the checkpoint has them."""

    def moved(choices: Mapping[str, Choice]) -> dict[str, Choice]:
        return {HEAD if name == EMBEDDING else name: choice for name, choice in choices.items()}

    weights = moved(plan.weights)
    if stored is not None:
        weights[EMBEDDING] = stored
    return replace(
        plan,
        weights=weights,
        activation_groups=moved(plan.activation_groups),
        methods=moved(plan.methods),
        static=frozenset(HEAD if name == EMBEDDING else name for name in plan.static),
    )


def _rule(match: str, choice: Precisions) -> Rule:
    scheme = None if choice.scheme == UNQUANTISED else SCHEMES[choice.scheme]
    group_size = 0 if choice.group_size in (ROW, None) else int(choice.group_size)
    method = choice.method or "rtn"
    return Rule(match, scheme, group_size, choice.symmetric is not False, method)


def _linear_weights(step: StepGraph) -> Iterator[str]:
    for node in linears_of(step.graph):
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
