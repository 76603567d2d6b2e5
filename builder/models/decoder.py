"""The decoder in torch: written once for every family, from the config record alone.

Every activation is fp32 [T, features] over the step's T tokens; a head is a run of head_dim
columns. Parameter names are the canonical weight names; values come by load_state_dict, the
buffer inv_freq from rope.inverse_frequencies.
"""

from dataclasses import dataclass

import torch
from torch import nn

from llmbuild.builder.models.config import DecoderConfig
from llmbuild.plugins.linear.op import linear
from llmbuild.plugins.paged_attention.op import paged_attention
from llmbuild.plugins.rms_norm.op import rms_norm
from llmbuild.plugins.rope_kv_write.op import kv_write, rotary
from llmbuild.plugins.rope_table.op import rope_table


class Linear(nn.Module):
    """A projection: weight [out, in] in the weight dtype, bias fp32 [out] or none."""

    def __init__(self, in_size: int, out_size: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_size, in_size, dtype=dtype), False)
        self.bias = nn.Parameter(torch.empty(out_size), False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


class Norm(nn.Module):
    """RMSNorm over each run of `size` columns; weight fp32 [size]."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True)
class Ragged:
    """What every layer's attention shares of a step's inputs, and the step's rotary table."""

    positions: torch.Tensor
    query_start: torch.Tensor
    kv_lengths: torch.Tensor
    block_tables: torch.Tensor
    rope: torch.Tensor


class Layer(nn.Module):
    """One decoder layer: attention and gated MLP, each behind an RMSNorm and a residual."""

    def __init__(self, config: DecoderConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.index = index
        self.scale = config.head_dim**-0.5
        self.window = config.windows[index]
        hidden, eps = config.hidden_size, config.norm_eps
        self.attn_norm = Norm(hidden, eps)
        self.q_proj = Linear(hidden, config.q_size, config.qkv_bias, dtype)
        self.k_proj = Linear(hidden, config.kv_size, config.qkv_bias, dtype)
        self.v_proj = Linear(hidden, config.kv_size, config.qkv_bias, dtype)
        self.q_norm = Norm(config.head_dim, eps) if config.qk_norm else nn.Identity()
        self.k_norm = Norm(config.head_dim, eps) if config.qk_norm else nn.Identity()
        self.o_proj = Linear(config.q_size, hidden, config.o_bias, dtype)
        self.mlp_norm = Norm(hidden, eps)
        self.gate_proj = Linear(hidden, config.intermediate_size, config.mlp_bias, dtype)
        self.up_proj = Linear(hidden, config.intermediate_size, config.mlp_bias, dtype)
        self.down_proj = Linear(config.intermediate_size, hidden, config.mlp_bias, dtype)

    def forward(self, x: torch.Tensor, step: Ragged) -> torch.Tensor:
        x = x + self.attention(self.attn_norm(x), step)
        return x + self.mlp(self.mlp_norm(x))

    def attention(self, x: torch.Tensor, step: Ragged) -> torch.Tensor:
        q = rotary(self.q_norm(self.q_proj(x)), step.rope)
        k = rotary(self.k_norm(self.k_proj(x)), step.rope)
        where = (step.positions, step.query_start)
        written = kv_write(k, self.v_proj(x), *where, step.block_tables, self.index)
        lengths_and_blocks = (step.kv_lengths, step.block_tables)
        heads = paged_attention(
            q, written, *where, *lengths_and_blocks, self.index, self.scale, self.window
        )
        return self.o_proj(heads)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Decoder(nn.Module):
    """Token ids of a ragged step in, logits of the wanted rows out; the arguments of `forward`
    are the step graph's inputs."""

    def __init__(self, config: DecoderConfig, weight_dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.embed = Linear(config.hidden_size, config.vocab_size, False, weight_dtype)
        self.layers = nn.ModuleList(
            Layer(config, index, weight_dtype) for index in range(config.num_layers)
        )
        self.final_norm = Norm(config.hidden_size, config.norm_eps)
        if not config.tie_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, False, weight_dtype)
        self.register_buffer("inv_freq", torch.empty(config.head_dim // 2))

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
        rope = rope_table(positions, self.inv_freq, 1.0)
        step = Ragged(positions, query_start, kv_lengths, block_tables, rope)
        x = self.embed.weight.index_select(0, token_ids).float()
        for layer in self.layers:
            x = layer(x, step)
        head = self.embed if self.config.tie_embeddings else self.lm_head
        return head(self.final_norm(x).index_select(0, logit_rows))
