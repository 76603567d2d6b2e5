"""Mixture of experts: the choice of experts for each token, and linears of which each expert has
its own.

A (token, chosen expert) pair is a slot; slots are numbered by expert, then token. So an expert's
linear multiplies a run of rows. Shazeer et al., "Outrageously Large Neural Networks", 2017; routing
as in Jiang et al., "Mixtral of Experts", 2024.
"""

from collections.abc import Callable

import torch

from llmbuild.plugins.common.quantised import INT8, dequantise, round_to


@torch.library.custom_op("llmbuild::moe_route", mutates_args=())
def moe_route(
    logits: torch.Tensor, top_k: int, scoring: str, normalise: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The top_k experts of each token and their weights, best first.

    logits: fp32 [T, E]. scoring: "softmax" takes the softmax over all experts, "top_k_softmax"
    over the chosen ones. normalise: 1 divides the weights by their sum. Returns int32 [T, top_k]
    and fp32 [T, top_k].
    """
    scores = logits.softmax(-1) if scoring == "softmax" else logits
    weights, experts = scores.topk(top_k, dim=-1)
    if scoring == "top_k_softmax":
        weights = weights.softmax(-1)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return experts.int(), weights


@moe_route.register_fake
def _(
    logits: torch.Tensor, top_k: int, scoring: str, normalise: int
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape)


@torch.library.custom_op("llmbuild::moe_sort", mutates_args=())
def moe_sort(
    experts: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The slots of the chosen experts.

    experts: int32 [T, top_k]. Returns int32: starts [E + 1], expert e having slots [starts[e],
    starts[e + 1]) in the order of its tokens; rows_of [T top_k], the token of a slot; slot_of [T,
    top_k].
    """
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    starts = torch.zeros(num_experts + 1, dtype=torch.int32)
    starts[1:] = flat.bincount(minlength=num_experts).cumsum(0)
    slot_of = torch.empty_like(flat)
    slot_of[order] = torch.arange(len(flat), dtype=torch.int32)
    return starts, (order // experts.shape[1]).int(), slot_of.view_as(experts)


@moe_sort.register_fake
def _(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    slots = experts.shape[0] * experts.shape[1]
    starts, rows_of = experts.new_empty((num_experts + 1,)), experts.new_empty((slots,))
    return starts, rows_of, torch.empty_like(experts)


@torch.library.custom_op("llmbuild::moe_gather", mutates_args=())
def moe_gather(x: torch.Tensor, rows_of: torch.Tensor) -> torch.Tensor:
    """Each slot's token. x: fp32 [T, K]. rows_of: moe_sort's. Returns fp32 [T top_k, K]."""
    return x.index_select(0, rows_of)


@moe_gather.register_fake
def _(x: torch.Tensor, rows_of: torch.Tensor) -> torch.Tensor:
    return x.new_empty((rows_of.shape[0], x.shape[1]))


@torch.library.custom_op("llmbuild::moe_linear", mutates_args=())
def moe_linear(x: torch.Tensor, weight: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Each slot times its expert's weights.

    x: fp32 [slots, K]. weight: fp32 or bf16 [E, N, K]. starts: moe_sort's. Returns fp32 [slots, N].
    """
    return _by_expert(x, starts, lambda expert: weight[expert].float())


@moe_linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[1]))


@torch.library.custom_op("llmbuild::quantised_moe_linear", mutates_args=())
def quantised_moe_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    minima: torch.Tensor | None,
    starts: torch.Tensor,
    zero: int,
    activation_group: int,
    zeros: torch.Tensor | None = None,
    activation_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """moe_linear with weights on a grid: the operands are those of quantised_linear, with an axis
    of experts before the others where they are the weights'. Codes are whole numbers."""
    if activation_group:
        x = round_to(INT8, x, activation_group, activation_scales)

    def weight(expert: int) -> torch.Tensor:
        own = [None if part is None else part[expert] for part in (minima, zeros)]
        return dequantise(codes[expert], scales[expert], own[0], zero, own[1])

    return _by_expert(x, starts, weight)


@quantised_moe_linear.register_fake
def _(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    minima: torch.Tensor | None,
    starts: torch.Tensor,
    zero: int,
    activation_group: int,
    zeros: torch.Tensor | None = None,
    activation_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    return x.new_empty((x.shape[0], codes.shape[1]))


@torch.library.custom_op("llmbuild::moe_combine", mutates_args=())
def moe_combine(
    outputs: torch.Tensor, slot_of: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """What a token's slots give, weighted and added. outputs: fp32 [slots, N]. slot_of: moe_sort's.
    weights: moe_route's. Returns fp32 [T, N]."""
    return (outputs[slot_of.long()] * weights[..., None]).sum(1)


@moe_combine.register_fake
def _(outputs: torch.Tensor, slot_of: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return outputs.new_empty((slot_of.shape[0], outputs.shape[1]))


def _by_expert(
    x: torch.Tensor, starts: torch.Tensor, weight: Callable[[int], torch.Tensor]
) -> torch.Tensor:
    """Every expert's run of rows times its weights, which are asked for where it has any."""
    runs = x.split(starts.diff().tolist())
    return torch.cat(
        [
            torch.nn.functional.linear(run, weight(expert))
            for expert, run in enumerate(runs)
            if len(run)
        ]
    )
