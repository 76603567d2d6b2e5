"""The decoder in torch: written once for every family, from the config record alone.

Every activation is fp32 [T, features] over the step's T tokens; a head is a run of head_dim
columns. Parameter names are the canonical weight names; values come by load_state_dict.
"""

from dataclasses import dataclass

import torch
from torch import nn

from llmbuild.builder.models.config import NO_ROPE, DecoderConfig, MoeConfig, NormConfig
from llmbuild.builder.models.rope import RotaryTable
from llmbuild.plugins.gated_activation.op import activation
from llmbuild.plugins.layer_norm.op import layer_norm
from llmbuild.plugins.linear.op import linear
from llmbuild.plugins.moe.op import moe_experts, moe_route
from llmbuild.plugins.paged_attention.op import paged_attention
from llmbuild.plugins.rms_norm.op import rms_norm
from llmbuild.plugins.rope_kv_write.op import kv_write, rotary


class Linear(nn.Module):
    """A projection: weight [out, in] in the weight dtype, bias fp32 [out] or none."""

    def __init__(self, in_size: int, out_size: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_size, in_size, dtype=dtype), False)
        self.bias = nn.Parameter(torch.empty(out_size), False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


class Norm(nn.Module):
    """RMSNorm over each run of `size` columns, or LayerNorm; weight and bias fp32 [size]."""

    def __init__(self, size: int, config: NormConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), False)
        self.bias = nn.Parameter(torch.empty(size), False) if config.bias else None
        self.config = config

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.config.kind == "layer":
            return layer_norm(x, self.weight, self.bias, self.config.eps)
        return rms_norm(x, self.weight, self.config.eps)


@dataclass(frozen=True)
class Ragged:
    """What every layer's attention shares of a step's inputs, and the step's rotary tables."""

    positions: torch.Tensor
    query_start: torch.Tensor
    kv_lengths: torch.Tensor
    block_tables: torch.Tensor
    ropes: list[torch.Tensor]


class Attention(nn.Module):
    """Q, K and V, their norms and rotation, the paged cache, and the output projection."""

    def __init__(self, config: DecoderConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.index, self.config = index, config
        hidden = config.hidden_size
        self.q_proj = Linear(hidden, config.q_size, config.qkv_bias, dtype)
        self.k_proj = Linear(hidden, config.kv_size, config.qkv_bias, dtype)
        self.v_proj = Linear(hidden, config.kv_size, config.qkv_bias, dtype)
        self.o_proj = Linear(config.q_size, hidden, config.o_bias, dtype)
        if config.qk_norm:
            whole = config.qk_norm == "whole"
            self.q_norm = Norm(config.q_size if whole else config.head_dim, config.norm)
            self.k_norm = Norm(config.kv_size if whole else config.head_dim, config.norm)
        sinks = config.attention_sinks
        self.sinks = nn.Parameter(torch.empty(config.num_heads), False) if sinks else None

    def forward(self, x: torch.Tensor, step: Ragged, rows: torch.Tensor | None) -> torch.Tensor:
        config, rope = self.config, self.config.layer_ropes[self.index]
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope != NO_ROPE:
            q = rotary(q, step.ropes[rope], config.head_dim)
            k = rotary(k, step.ropes[rope], config.head_dim)
        where = (step.positions, step.query_start)
        written = kv_write(k, v, *where, step.block_tables, self.index)
        heads = paged_attention(
            *(q, written, *where, step.kv_lengths, step.block_tables, self.sinks),
            layer=self.index,
            scale=config.attention_scale,
            window=config.windows[self.index],
            soft_cap=config.attention_soft_cap,
        )
        return self.o_proj(_chosen(heads, rows))


def _chosen(x: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """The rows named, or all."""
    return x if rows is None else x.index_select(0, rows)


class Mlp(nn.Module):
    """act(gate) * up, or act(up), between two projections."""

    def __init__(self, config: DecoderConfig, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.activation = config.activation
        hidden, bias = config.hidden_size, config.mlp_bias
        self.gate_proj = Linear(hidden, size, bias, dtype) if config.gated_mlp else None
        self.up_proj = Linear(hidden, size, bias, dtype)
        self.down_proj = Linear(size, hidden, bias, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gate_proj is None:
            return self.down_proj(activation(self.up_proj(x), self.activation))
        return self.down_proj(activation(self.gate_proj(x), self.activation) * self.up_proj(x))


class Moe(nn.Module):
    """Routed experts, and an MLP that every token shares besides where the config has one."""

    def __init__(self, config: DecoderConfig, moe: MoeConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.moe, self.activation = moe, config.activation
        hidden, size, count = config.hidden_size, moe.expert_size, moe.num_experts
        self.router = Linear(hidden, count, False, dtype)
        self.experts = nn.Module()
        gate_up, down = torch.empty(count, 2 * size, hidden), torch.empty(count, hidden, size)
        self.experts.gate_up = nn.Parameter(gate_up.to(dtype), False)
        self.experts.down = nn.Parameter(down.to(dtype), False)
        self.shared = Mlp(config, moe.shared_size, dtype) if moe.shared_size else None
        self.shared_gate = Linear(hidden, 1, False, dtype) if moe.shared_gate else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        moe = self.moe
        experts, weights = moe_route(self.router(x), moe.top_k, moe.scoring, int(moe.normalise))
        gate_up, down = self.experts.gate_up, self.experts.down
        routed = moe_experts(x, experts, weights, gate_up, down, self.activation)
        if self.shared is None:
            return routed
        shared = self.shared(x)
        if self.shared_gate is not None:
            shared = shared * torch.sigmoid(self.shared_gate(x))
        return routed + shared


class Layer(nn.Module):
    """One decoder layer: attention and MLP with their norms, added to the residual."""

    def __init__(self, config: DecoderConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        plain = not config.post_norm and config.residual_scale == 1
        assert plain or not config.parallel_residual, "no model has both"
        self.attention = Attention(config, index, dtype)
        if config.moe is not None and config.has_moe(index):
            self.mlp: nn.Module = Moe(config, config.moe, dtype)
        else:
            self.mlp = Mlp(config, config.intermediate_size, dtype)
        if config.pre_norm:
            self.attn_norm = Norm(config.hidden_size, config.norm)
            if not config.shared_norm:
                self.mlp_norm = Norm(config.hidden_size, config.norm)
        if config.post_norm:
            self.attn_post_norm = Norm(config.hidden_size, config.norm)
            self.mlp_post_norm = Norm(config.hidden_size, config.norm)

    def forward(
        self, x: torch.Tensor, step: Ragged, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """rows: int32, the only ones wanted of the result; every row's K and V are written all the
        same. By default all."""
        if self.config.parallel_residual:
            normed = self.attn_norm(x)
            attended, x = self.attention(normed, step, rows), _chosen(x, rows)
            for_mlp = _chosen(normed, rows) if self.config.shared_norm else self.mlp_norm(x)
            return x + attended + self.mlp(for_mlp)
        attended = self.attention(self.attn_norm(x) if self.config.pre_norm else x, step, rows)
        x = _chosen(x, rows)
        x = x + self._scaled(self.attn_post_norm(attended) if self.config.post_norm else attended)
        changed = self.mlp(self.mlp_norm(x) if self.config.pre_norm else x)
        return x + self._scaled(self.mlp_post_norm(changed) if self.config.post_norm else changed)

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.config.residual_scale
        return x if scale == 1 else x * scale


class Decoder(nn.Module):
    """Token ids of a ragged step in, logits of the wanted rows out; the arguments of `forward`
    are the step graph's inputs."""

    def __init__(self, config: DecoderConfig, weight_dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.embed = Linear(hidden, config.vocab_size, False, weight_dtype)
        if config.learned_positions:
            self.position_embed = Linear(hidden, config.max_position, False, weight_dtype)
        self.ropes = nn.ModuleList(RotaryTable(rope) for rope in config.ropes)
        self.layers = nn.ModuleList(
            Layer(config, index, weight_dtype) for index in range(config.num_layers)
        )
        self.final_norm = Norm(hidden, config.norm)
        if not config.tie_embeddings:
            self.lm_head = Linear(hidden, config.vocab_size, config.head_bias, weight_dtype)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        query_start: torch.Tensor,
        kv_lengths: torch.Tensor,
        block_tables: torch.Tensor,
        logit_rows: torch.Tensor,
    ) -> torch.Tensor:
        """int32 [T], [T], [S+1], [S], [S, B], [R] -> fp32 [R, vocab]."""
        ropes = [rope(positions, query_start, kv_lengths) for rope in self.ropes]
        step = Ragged(positions, query_start, kv_lengths, block_tables, ropes)
        x = self.embed.weight.index_select(0, token_ids).float()
        if self.config.learned_positions:
            x = x + self.position_embed.weight.index_select(0, positions).float()
        if self.config.embed_scale != 1:
            x = x * self.config.embed_scale
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            x = layer(x, step, logit_rows if index == last else None)
        head = self.embed if self.config.tie_embeddings else self.lm_head
        logits = head(self.final_norm(x))
        if self.config.logit_scale != 1:
            logits = logits * self.config.logit_scale
        if self.config.logit_soft_cap:
            logits = torch.tanh(logits / self.config.logit_soft_cap) * self.config.logit_soft_cap
        return logits
