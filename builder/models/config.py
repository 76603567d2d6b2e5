"""The decoder's config record: what every family's config is translated to."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: how inverse frequencies follow from theta.

    kind: "default" | "linear" | "llama3" | "factors" ("factors": one divisor per frequency,
    as GGUF files store a llama3 scaling).
    """

    kind: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    factors: tuple[float, ...] = ()


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
    norm_eps: float
    rope: RopeConfig
    max_position: int  # positions that the checkpoint says it was made for
    tie_embeddings: bool
    qk_norm: bool  # RMSNorm over each head of Q and K before the rotation
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    windows: tuple[int, ...]  # per layer: tokens that attention looks back over, 0 for all

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim
