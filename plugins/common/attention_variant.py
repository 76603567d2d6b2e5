"""What variants of the attention kernels are made of: shapes of attention and types of KV pools."""

from collections.abc import Iterator
from dataclasses import dataclass

_RANGE_BYTES = {None: 0, "*fp32": 4, "*bf16": 2}


@dataclass(frozen=True)
class AttentionShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def padded(self) -> int:
        """head_dim, rounded up to a power of two."""
        return 1 << (self.head_dim - 1).bit_length()

    @property
    def constants(self) -> dict[str, int]:
        """Constants that kernels of a pool have in common."""
        return {
            "NUM_KV_HEADS": self.num_kv_heads,
            "HEAD_DIM": self.head_dim,
            "BLOCK_SIZE": self.block_size,
            "PADDED": self.padded,
        }

    def name(self, kernel: str, activation: str, k_dtype: str, v_dtype: str) -> str:
        """Of a variant, such as "rope_kv_write.fp16.kv_int8.h9x3.d64.b16"."""
        kv = k_dtype if k_dtype == v_dtype else f"{k_dtype}_{v_dtype}"
        heads = f"h{self.num_heads}x{self.num_kv_heads}"
        return f"{kernel}.{activation}.kv_{kv}.{heads}.d{self.head_dim}.b{self.block_size}"


SMOLLM2 = AttentionShape(num_heads=9, num_kv_heads=3, head_dim=64, block_size=16)
LLAMA_8B = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, block_size=16)


def worth_building() -> Iterator[tuple[AttentionShape, str, tuple[str, str]]]:
    """Shapes with the dtypes of activations, and of K and V."""
    yield SMOLLM2, "fp16", ("fp16", "fp16")
    for shape in (SMOLLM2, LLAMA_8B):
        for dtype in ("bf16", "int8", "int4"):
            yield shape, "bf16", (dtype, dtype)
    yield SMOLLM2, "bf16", ("int8", "int4")  # recipes/smollm2-135m-kv-mixed.yaml
    yield LLAMA_8B, "bf16", ("int8-static", "int8-static")
    yield LLAMA_8B, "bf16", ("fp8", "fp8")


@dataclass(frozen=True)
class PoolType:
    """The tensors of a pool (plugins/common/kv_triton.py) as a kernel's signature has them."""

    items: str
    scales: str | None = None
    minima: str | None = None
    item_bits: int = 8

    def arguments(self, of: str) -> dict[str, str | None]:
        """The types of K's or V's tensors; `of` is "k" or "v"."""
        return {f"{of}_items": self.items, f"{of}_scales": self.scales, f"{of}_minima": self.minima}

    def row_bytes(self, head_dim: int) -> int:
        """Of a token and head."""
        ranges = _RANGE_BYTES[self.scales] + _RANGE_BYTES[self.minima]
        return head_dim * self.item_bits // 8 + ranges


def pool_type(dtype: str, sm: int) -> PoolType:
    """Of a KV dtype; fp8 is decoded by the kernel where an SM has no such conversion."""
    types = {
        "fp16": PoolType("*fp16", item_bits=16),
        "bf16": PoolType("*bf16", item_bits=16),
        "int8": PoolType("*i8", "*fp32"),
        "int8-static": PoolType("*i8"),
        "fp8": PoolType("*fp8e4nv" if sm >= 89 else "*u8"),
        "int4": PoolType("*u8", "*bf16", "*bf16", item_bits=4),
    }
    return types[dtype]
