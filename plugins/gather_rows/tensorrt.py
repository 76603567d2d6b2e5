"""gather_quantised_rows as a TensorRT plugin. Rows of other tables TensorRT gathers itself."""

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
from llmbuild.plugins.common.weight_format import WeightFormat
from llmbuild.plugins.gather_rows.triton import quantised_gather_variant


def gather_quantised_rows(
    sm: int, weights: WeightFormat, activation: str, width: int, first: int
) -> Plugin:
    """y [R, width] of the table's codes, scales and, where it has them, minima or zeros, and of
    index [R]. first: of the rows of a larger table that this one has."""
    variant = quantised_gather_variant(sm, weights, activation, first)
    variant = with_true_promises(variant, N=width)
    columns = int(variant.constants["COLUMNS"] or 0)
    codes_a_byte = 8 // weights.bits

    def of_row(shapes: Shapes) -> Size:
        return shapes["codes"][1] * codes_a_byte

    def launch(shapes: Shapes) -> Launch:
        size = of_row(shapes)
        grid = (shapes["index"][0], ceil_div(size, columns))
        return Launch(grid, {"rows": shapes["codes"][0], "N": size})

    return make_plugin(
        lambda shapes: {"y": (shapes["index"][0], of_row(shapes))}, "y", Tactic(variant, launch)
    )
