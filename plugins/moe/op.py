"""Mixture of experts: the choice of experts for each token, and the chosen experts' gated MLPs.

Shazeer et al., "Outrageously Large Neural Networks", 2017; routing as in Jiang et al., "Mixtral
of Experts", 2024.
"""

import torch

from llmbuild.plugins.gated_activation.op import ACTIVATIONS


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


@torch.library.custom_op("llmbuild::moe_experts", mutates_args=())
def moe_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """Each token's chosen gated MLPs, weighted and added.

    x: fp32 [T, K]. experts, weights: moe_route's. gate_up: fp32 or bf16 [E, 2 I, K], the gate's
    rows first. down: [E, K, I]. activation: a key of ACTIVATIONS. Returns fp32 [T, K].
    """
    out = torch.zeros_like(x)
    for expert in experts.unique().tolist():
        rows, place = (experts == expert).nonzero(as_tuple=True)
        gate, up = torch.nn.functional.linear(x[rows], gate_up[expert].float()).chunk(2, dim=-1)
        hidden = ACTIVATIONS[activation](gate) * up
        result = torch.nn.functional.linear(hidden, down[expert].float())
        out.index_add_(0, rows, weights[rows, place, None] * result)
    return out


@moe_experts.register_fake
def _(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    return torch.empty_like(x)
