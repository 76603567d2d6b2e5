"""gated_activation as a TensorRT plugin."""

from llmbuild.plugins.common.tensorrt_plugin import (
    Launch,
    Plugin,
    Shapes,
    Size,
    Tactic,
    ceil_div,
    make_plugin,
    with_true_promises,
)
from llmbuild.plugins.gated_activation.triton import gated_variant


def gated_activation(sm: int, activation: str, kind: str, width: int, is_merged: bool) -> Plugin:
    """y [T, width] of gate and up; of gate alone, [T, 2 width] with up behind it, if they are
    merged."""
    variant = with_true_promises(gated_variant(sm, activation, kind, is_merged), N=width)
    columns = int(variant.constants["COLUMNS"] or 0)

    def of_row(shapes: Shapes) -> Size:
        size = shapes["gate"][1]
        return size // 2 if is_merged else size

    def launch(shapes: Shapes) -> Launch:
        size = of_row(shapes)
        return Launch((shapes["gate"][0], ceil_div(size, columns)), {"N": size})

    return make_plugin(
        lambda shapes: {"y": (shapes["gate"][0], of_row(shapes))}, "y", Tactic(variant, launch)
    )
