"""What a plan with our plugins is built for, and the inputs of its network."""

from dataclasses import dataclass

from llmbuild.builder.targets.tensorrt.limits import (
    HIDDEN,
    KV_LENGTHS,
    LOGIT_ROWS,
    POSITIONS,
    TOKEN_IDS,
    Limits,
)
from llmbuild.runtime.manifest import KVLayout

# The network's inputs are the step graph's, int32, with `hidden` in the activations' dtype, and for
# each tensor of a KV pool its address, int64 [1], at a multiple of 16 bytes; its name is the
# manifest's pool_name. A pool's tensors are those of plugins/common/kv_triton.py: items, and scales
# and minima where its dtype has them.
# Tokens past query_start's last entry are padding, and so are sequences of length 0.
QUERY_START = "query_start"
BLOCK_TABLES = "block_tables"

# Those sizes that may change, in front of others.
INPUT_SIZES: dict[str, tuple[str, ...]] = {
    TOKEN_IDS: ("T",),
    POSITIONS: ("T",),
    QUERY_START: ("S + 1",),
    KV_LENGTHS: ("S",),
    BLOCK_TABLES: ("S", "B"),
    LOGIT_ROWS: ("R",),
    HIDDEN: ("T",),
}


@dataclass(frozen=True)
class PagedLimits:
    """sequences, tokens: of a step. blocks: of a sequence, at most. sm: that kernels are for, 89
    for compute capability 8.9."""

    sequences: int
    tokens: int
    blocks: int
    kv: KVLayout
    sm: int

    @property
    def capacity(self) -> int:
        """Tokens that a sequence may have."""
        return self.blocks * self.kv.block_size

    @property
    def plain(self) -> Limits:
        """What both targets know."""
        return Limits(self.sequences, self.tokens, self.capacity)
