"""The decoder in torch: written once for every family, from the config record alone.

Every activation is fp32 [T, features] over the step's T tokens; a head is a run of head_dim
columns. Parameter names are the canonical weight names; values come by load_state_dict.

A decoder may be one rank's shard of a model. Its layers then have fewer heads and columns, and
`all_reduce` stands where the ranks' results are parts of a sum: after the embedding, attention and
MLP. (Shoeybi et al., "Megatron-LM", 2019.)
"""

from dataclasses import dataclass

import torch
from torch import nn

from llmbuild.builder.models.config import NO_ROPE, DecoderConfig, MoeConfig, NormConfig
from llmbuild.builder.models.rope import RotaryTable
from llmbuild.builder.shard.shard import Shard, whole_model
from llmbuild.plugins.all_reduce.op import all_reduce
from llmbuild.plugins.gated_activation.op import activation
from llmbuild.plugins.gather_rows.op import gather_rows
from llmbuild.plugins.layer_norm.op import layer_norm
from llmbuild.plugins.linear.op import linear
from llmbuild.plugins.moe.op import moe_combine, moe_gather, moe_linear, moe_route, moe_sort
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

    def __init__(self, config: DecoderConfig, index: int, dtype: torch.dtype, shard: Shard) -> None:
        super().__init__()
        self.index, self.config = index, config
        hidden, o_bias = config.hidden_size, config.o_bias and shard.adds_biases
        self.q_proj = Linear(hidden, config.q_size, config.qkv_bias, dtype)
        self.k_proj = Linear(hidden, config.kv_size, config.qkv_bias, dtype)
        self.v_proj = Linear(hidden, config.kv_size, config.qkv_bias, dtype)
        self.o_proj = Linear(config.q_size, hidden, o_bias, dtype)
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

    def __init__(self, config: DecoderConfig, size: int, dtype: torch.dtype, shard: Shard) -> None:
        super().__init__()
        self.activation = config.activation
        hidden, bias = config.hidden_size, config.mlp_bias
        self.gate_proj = Linear(hidden, size, bias, dtype) if config.gated_mlp else None
        self.up_proj = Linear(hidden, size, bias, dtype)
        self.down_proj = Linear(size, hidden, bias and shard.adds_biases, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gate_proj is None:
            return self.down_proj(activation(self.up_proj(x), self.activation))
        return self.down_proj(activation(self.gate_proj(x), self.activation) * self.up_proj(x))


class Moe(nn.Module):
    """Routed experts, and an MLP that every token shares besides where the config has one."""

    def __init__(
        self, config: DecoderConfig, moe: MoeConfig, dtype: torch.dtype, shard: Shard
    ) -> None:
        super().__init__()
        self.moe, self.activation = moe, config.activation
        hidden, size, count = config.hidden_size, moe.expert_size, moe.num_experts
        self.router = Linear(hidden, count, False, dtype)
        self.experts = nn.Module()
        gate_up, down = torch.empty(count, 2 * size, hidden), torch.empty(count, hidden, size)
        self.experts.gate_up = nn.Parameter(gate_up.to(dtype), False)
        self.experts.down = nn.Parameter(down.to(dtype), False)
        self.shared = Mlp(config, moe.shared_size, dtype, shard) if moe.shared_size else None
        self.shared_gate = Linear(hidden, 1, False, dtype) if moe.shared_gate else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        moe = self.moe
        experts, weights = moe_route(self.router(x), moe.top_k, moe.scoring, int(moe.normalise))
        starts, rows_of, slot_of = moe_sort(experts, moe.num_experts)
        both = moe_linear(moe_gather(x, rows_of), self.experts.gate_up, starts)
        gate, up = both.split([moe.expert_size, moe.expert_size], dim=-1)
        hidden = activation(gate, self.activation) * up
        routed = moe_combine(moe_linear(hidden, self.experts.down, starts), slot_of, weights)
        if self.shared is None:
            return routed
        shared = self.shared(x)
        if self.shared_gate is not None:
            shared = shared * torch.sigmoid(self.shared_gate(x))
        return routed + shared


class Layer(nn.Module):
    """One decoder layer: attention and MLP with their norms, added to the residual."""

    def __init__(self, config: DecoderConfig, index: int, dtype: torch.dtype, shard: Shard) -> None:
        super().__init__()
        self.config, self.is_split = config, shard.is_split
        plain = not config.post_norm and config.residual_scale == 1
        assert plain or not config.parallel_residual, "no model has both"
        self.attention = Attention(config, index, dtype, shard)
        if config.moe is not None and config.has_moe(index):
            self.mlp: nn.Module = Moe(config, config.moe, dtype, shard)
        else:
            self.mlp = Mlp(config, config.intermediate_size, dtype, shard)
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
            return x + self._summed(attended + self.mlp(for_mlp))
        attended = self.attention(self.attn_norm(x) if self.config.pre_norm else x, step, rows)
        attended, x = self._summed(attended), _chosen(x, rows)
        x = x + self._scaled(self.attn_post_norm(attended) if self.config.post_norm else attended)
        changed = self._summed(self.mlp(self.mlp_norm(x) if self.config.pre_norm else x))
        return x + self._scaled(self.mlp_post_norm(changed) if self.config.post_norm else changed)

    def _summed(self, x: torch.Tensor) -> torch.Tensor:
        """Over the ranks that have parts of this layer."""
        return all_reduce(x) if self.is_split else x

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.config.residual_scale
        return x if scale == 1 else x * scale


class Decoder(nn.Module):
    """Token ids of a ragged step in, logits of the wanted rows out; the arguments of `forward`
    are the step graph's inputs.

    shard: a rank's part of the model, by default all. Logits are those of its tokens. A stage that
    isn't the first reads the one before's activations, and one that isn't the last gives its own
    in place of logits.
    """

    def __init__(
        self, config: DecoderConfig, weight_dtype: torch.dtype, shard: Shard | None = None
    ) -> None:
        super().__init__()
        self.shard = shard = shard or whole_model(config)
        self.config = config = shard.config(config)
        hidden, num_tokens = config.hidden_size, len(shard.tokens)
        if shard.is_first_stage or (shard.is_last_stage and config.tie_embeddings):
            self.embed = Linear(hidden, num_tokens, False, weight_dtype)
        if config.learned_positions and shard.is_first_stage:
            self.position_embed = Linear(hidden, config.max_position, False, weight_dtype)
        self.ropes = nn.ModuleList(RotaryTable(rope) for rope in config.ropes)
        self.layers = nn.ModuleDict(
            {
                str(number): Layer(config, index, weight_dtype, shard)
                for index, number in enumerate(shard.layers)
            }
        )
        if shard.is_last_stage:
            self.final_norm = Norm(hidden, config.norm)
            if not config.tie_embeddings:
                self.lm_head = Linear(hidden, num_tokens, config.head_bias, weight_dtype)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        query_start: torch.Tensor,
        kv_lengths: torch.Tensor,
        block_tables: torch.Tensor,
        logit_rows: torch.Tensor,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """int32 [T], [T], [S+1], [S], [S, B], [R] and, of the stage before, fp32 [T, hidden] ->
        fp32 [R, tokens], or [T, hidden] for the next stage."""
        ropes = [rope(positions, query_start, kv_lengths) for rope in self.ropes]
        step = Ragged(positions, query_start, kv_lengths, block_tables, ropes)
        x = self._embedded(token_ids, positions) if hidden is None else hidden
        is_last_stage, last = self.shard.is_last_stage, len(self.layers) - 1
        for index, layer in enumerate(self.layers.values()):
            x = layer(x, step, logit_rows if is_last_stage and index == last else None)
        return self._logits(x) if is_last_stage else x

    def _embedded(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if self.shard.is_split:  # each token's row is on one rank, and zero on the others
            x = all_reduce(gather_rows(self.embed.weight, token_ids, self.shard.tokens.start))
        else:
            x = self.embed.weight.index_select(0, token_ids).float()
        if self.config.learned_positions:
            x = x + self.position_embed.weight.index_select(0, positions).float()
        return x if self.config.embed_scale == 1 else x * self.config.embed_scale

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        head = self.embed if self.config.tie_embeddings else self.lm_head
        logits = head(self.final_norm(x))
        if self.config.logit_scale != 1:
            logits = logits * self.config.logit_scale
        if self.config.logit_soft_cap:
            logits = torch.tanh(logits / self.config.logit_soft_cap) * self.config.logit_soft_cap
        return logits
