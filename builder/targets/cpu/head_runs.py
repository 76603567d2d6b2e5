"""Runs of neighbouring KV heads that share pools: each has calls of the KV kernels of its own."""

from dataclasses import dataclass

from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.targets.cpu.plan import PackedWeight, Pool, View, WeightFrom
from llmbuild.runtime.manifest import KVLayout

KV_CPP_TYPES = {  # of a pool's items (plugins/common/kv_pool.h)
    "fp32": "float",
    "bf16": "bf16",
    "int8": "int8_t",
    "int8-static": "int8_static",
    "int4": "int4x2",
}


@dataclass(frozen=True)
class HeadRun:
    """Some KV heads of a layer, and the query heads that read them."""

    template: tuple[str | int, ...]  # how the KV kernels' templates begin
    pools: tuple[Pool, Pool]  # of K and V
    first: int
    num_heads: int
    group: int  # query heads of a KV head
    head_dim: int

    def queries(self, view: View) -> View:
        """The run's columns of a view of all query heads."""
        return self._columns(view, self.group)

    def keys(self, view: View) -> View:
        """The run's columns of a view of all KV heads."""
        return self._columns(view, 1)

    def _columns(self, view: View, group: int) -> View:
        width = group * self.head_dim
        return View(view.buffer, view.column + self.first * width, self.num_heads * width)

    def query_heads(self, weight: PackedWeight | None) -> PackedWeight | WeightFrom | None:
        """A weight with an item for each query head, from the run's first on."""
        return _from(weight, self.first * self.group)

    def channels(self, weight: PackedWeight | None) -> PackedWeight | WeightFrom | None:
        """A weight with an item for each element of a KV head, from the run's first on."""
        return _from(weight, self.first * self.head_dim)


def head_runs(config: DecoderConfig, kv: KVLayout, layer: int) -> list[HeadRun]:
    """The runs of a layer, first heads first."""
    group = config.num_heads // config.num_kv_heads
    runs: list[HeadRun] = []
    first = 0
    for index, heads in enumerate(kv.layers[layer].heads):
        template = (
            *(KV_CPP_TYPES[heads.k_dtype], KV_CPP_TYPES[heads.v_dtype]),
            *(group * heads.num_heads, heads.num_heads, kv.head_dim, kv.block_size),
        )
        pools = (Pool(layer, index, "k"), Pool(layer, index, "v"))
        runs.append(HeadRun(template, pools, first, heads.num_heads, group, kv.head_dim))
        first += heads.num_heads
    return runs


def _from(weight: PackedWeight | None, item: int) -> PackedWeight | WeightFrom | None:
    return WeightFrom(weight, item) if weight is not None and item else weight
