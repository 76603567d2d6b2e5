"""The decoder's config record: what every family's config is translated to.

A feature is a field here, declared by the family that has it; the decoder never asks which family
it runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

NO_ROPE = -1  # in DecoderConfig.layer_ropes: the layer turns nothing


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: how inverse frequencies follow from theta.

    kind: a key of rope.KINDS ("factors": one divisor per frequency, as GGUF files store a llama3
    scaling). rotary_dim: elements of a head that turn, the first ones. attention_factor: scales
    cosines and sines. The other fields are what the kind at hand reads; positions in tokens.
    """

    kind: str
    theta: float
    rotary_dim: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True)
class NormConfig:
    """kind: "rms" or "layer". plus_one: checkpoints store w, and 1 + w is applied."""

    eps: float
    kind: str = "rms"
    bias: bool = False
    plus_one: bool = False


@dataclass(frozen=True)
class MoeConfig:
    """A mixture of experts in place of a layer's MLP. scoring and normalise: moe_route's.

    shared_size: width of an MLP that every token goes through besides, 0 for none; shared_gate:
    a sigmoid of its own weighs it.
    """

    num_experts: int
    top_k: int
    expert_size: int
    scoring: str = "softmax"
    normalise: bool = False
    shared_size: int = 0
    shared_gate: bool = False


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only transformer, free of any family's spelling. Sizes are in elements."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int  # positions that the checkpoint says it was made for
    tie_embeddings: bool
    norm: NormConfig
    ropes: tuple[RopeConfig, ...]
    layer_ropes: tuple[int, ...]  # per layer: index into ropes, or NO_ROPE
    windows: tuple[int, ...]  # per layer: tokens that attention looks back over, 0 for all
    attention_scale: float
    activation: str = "silu"
    gated_mlp: bool = True
    qk_norm: str = ""  # "head": over each head of Q and K; "whole": over all of them; "": none
    pre_norm: bool = True  # a norm before attention and MLP
    post_norm: bool = False  # a norm after each, before the residual add
    parallel_residual: bool = False  # attention and MLP both read the layer's input
    shared_norm: bool = False  # with parallel_residual: one norm serves both
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    learned_positions: bool = False  # an embedding of max_position rows is added to the tokens'
    attention_sinks: bool = False  # a learned logit per head joins the softmax
    attention_soft_cap: float = 0.0  # 0 for none
    logit_soft_cap: float = 0.0
    embed_scale: float = 1.0
    residual_scale: float = 1.0  # on what attention and MLP add
    logit_scale: float = 1.0
    rope_interleaved: bool = False  # checkpoints turn neighbours; rows are reordered when read
    moe: MoeConfig | None = None
    moe_layers: tuple[bool, ...] = ()  # per layer, where moe is given

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def has_moe(self, layer: int) -> bool:
        return self.moe is not None and self.moe_layers[layer]

    def read_by_token(self, shape: Sequence[int], size: int) -> int:
        """What a token reads of a matrix, the whole, or of a stack of experts, those that it is
        routed to. size: the whole's, in any unit."""
        if len(shape) < 3:
            return size
        assert self.moe is not None
        return size * self.moe.top_k // self.moe.num_experts
