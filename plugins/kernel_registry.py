"""Every GPU kernel of the plugins. Needs Triton."""

from collections.abc import Iterator

from llmbuild.plugins.common.kernel_variant import KernelVariant
from llmbuild.plugins.gated_activation import triton as gated_activation
from llmbuild.plugins.gather_rows import triton as gather_rows
from llmbuild.plugins.layer_norm import triton as layer_norm
from llmbuild.plugins.linear import triton as linear
from llmbuild.plugins.paged_attention import triton as paged_attention
from llmbuild.plugins.rms_norm import triton as rms_norm
from llmbuild.plugins.rope_kv_write import triton as rope_kv_write
from llmbuild.plugins.sample import triton as sample

_MODULES = (
    gather_rows,
    rms_norm,
    layer_norm,
    linear,
    rope_kv_write,
    paged_attention,
    gated_activation,
    sample,
)


def variants(sm: int) -> Iterator[KernelVariant]:
    """What is compiled ahead of time for an SM."""
    for module in _MODULES:
        yield from module.variants(sm)
