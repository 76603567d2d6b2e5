"""The canonical weights of a decoder: every name with its shape, from the config alone.

The names are those of the torch Decoder's parameters.
"""

from collections.abc import Iterator
from enum import Enum

from llmbuild.builder.models.config import DecoderConfig

Shape = tuple[int, ...]

EMBEDDING, HEAD, HEAD_BIAS = "embed.weight", "lm_head.weight", "lm_head.bias"


class Split(Enum):
    """What tensor-parallel ranks divide along an axis of a tensor."""

    HEADS = "query heads"
    KV_HEADS = "KV heads"
    MLP = "columns of the MLP"
    SHARED_MLP = "columns of a mixture's shared MLP"
    EXPERT_MLP = "columns of every expert"
    EXPERT_GATE_UP = "columns of every expert, of the gate and then of up"
    TOKENS = "tokens of the vocabulary"
    ADDED_ONCE = "nothing: one rank has the whole and adds it to what the others sum up"


Splits = tuple[Split | None, ...]  # of each axis; None: every rank has all of it
Tensor = tuple[str, Shape, Splits]


def expected_tensors(config: DecoderConfig) -> dict[str, Shape]:
    """Canonical name -> shape ([out, in]) of every weight of the model, in the model's order."""
    return {name: shape for name, shape, _ in _tensors(config)}


def tensor_splits(config: DecoderConfig) -> dict[str, Splits]:
    """Canonical name -> how tensor-parallel ranks divide its axes."""
    splits = {name: split for name, _, split in _tensors(config)}
    return splits | {HEAD: splits[EMBEDDING]}  # a tied head may get a matrix of its own


def _tensors(config: DecoderConfig) -> Iterator[Tensor]:
    table = (config.vocab_size, config.hidden_size)
    yield EMBEDDING, table, (Split.TOKENS, None)
    if config.learned_positions:
        yield "position_embed.weight", (config.max_position, config.hidden_size), (None, None)
    for layer in range(config.num_layers):
        for name, shape, splits in _layer(config, layer):
            yield f"layers.{layer}.{name}", shape, splits
    yield from _norm("final_norm", config.hidden_size, config)
    if not config.tie_embeddings:
        yield HEAD, table, (Split.TOKENS, None)
        if config.head_bias:
            yield HEAD_BIAS, (config.vocab_size,), (Split.TOKENS,)


def _layer(config: DecoderConfig, layer: int) -> Iterator[Tensor]:
    hidden, q_size, kv_size = config.hidden_size, config.q_size, config.kv_size
    if config.pre_norm:
        yield from _norm("attn_norm", hidden, config)
        if not config.shared_norm:
            yield from _norm("mlp_norm", hidden, config)
    if config.post_norm:
        yield from _norm("attn_post_norm", hidden, config)
        yield from _norm("mlp_post_norm", hidden, config)
    if config.qk_norm == "whole":
        yield from _norm("attention.q_norm", q_size, config, Split.HEADS)
        yield from _norm("attention.k_norm", kv_size, config, Split.KV_HEADS)
    elif config.qk_norm:
        yield from _norm("attention.q_norm", config.head_dim, config)
        yield from _norm("attention.k_norm", config.head_dim, config)
    yield from _column("attention.q_proj", q_size, hidden, config.qkv_bias, Split.HEADS)
    yield from _column("attention.k_proj", kv_size, hidden, config.qkv_bias, Split.KV_HEADS)
    yield from _column("attention.v_proj", kv_size, hidden, config.qkv_bias, Split.KV_HEADS)
    yield from _row("attention.o_proj", hidden, q_size, config.o_bias, Split.HEADS)
    if config.attention_sinks:
        yield "attention.sinks", (config.num_heads,), (Split.HEADS,)
    if config.has_moe(layer):
        yield from _moe(config)
    else:
        yield from _mlp("mlp", config, config.intermediate_size, Split.MLP)


def _moe(config: DecoderConfig) -> Iterator[Tensor]:
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None
    count, size = moe.num_experts, moe.expert_size
    yield "mlp.router.weight", (count, hidden), (None, None)
    yield "mlp.experts.gate_up", (count, 2 * size, hidden), (None, Split.EXPERT_GATE_UP, None)
    yield "mlp.experts.down", (count, hidden, size), (None, None, Split.EXPERT_MLP)
    if moe.shared_size:
        yield from _mlp("mlp.shared", config, moe.shared_size, Split.SHARED_MLP)
    if moe.shared_gate:
        yield "mlp.shared_gate.weight", (1, hidden), (None, None)


def _mlp(name: str, config: DecoderConfig, size: int, split: Split) -> Iterator[Tensor]:
    hidden, bias = config.hidden_size, config.mlp_bias
    if config.gated_mlp:
        yield from _column(f"{name}.gate_proj", size, hidden, bias, split)
    yield from _column(f"{name}.up_proj", size, hidden, bias, split)
    yield from _row(f"{name}.down_proj", hidden, size, bias, split)


def _column(name: str, out_size: int, in_size: int, bias: bool, split: Split) -> Iterator[Tensor]:
    """A linear whose outputs ranks divide."""
    yield f"{name}.weight", (out_size, in_size), (split, None)
    if bias:
        yield f"{name}.bias", (out_size,), (split,)


def _row(name: str, out_size: int, in_size: int, bias: bool, split: Split) -> Iterator[Tensor]:
    """A linear whose inputs ranks divide, so that their results have to be added."""
    yield f"{name}.weight", (out_size, in_size), (None, split)
    if bias:
        yield f"{name}.bias", (out_size,), (Split.ADDED_ONCE,)


def _norm(
    name: str, size: int, config: DecoderConfig, split: Split | None = None
) -> Iterator[Tensor]:
    yield f"{name}.weight", (size,), (split,)
    if config.norm.bias:
        yield f"{name}.bias", (size,), (split,)
