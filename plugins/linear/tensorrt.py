"""quantised_linear as TensorRT plugins: one that rounds activations, where codes meet codes, and
one that multiplies."""

from dataclasses import replace

from llmbuild.plugins.common.kernel_variant import KernelVariant
from llmbuild.plugins.common.tensorrt_plugin import (
    Launch,
    Plugin,
    Shapes,
    Tactic,
    ceil_div,
    make_plugin,
    with_true_promises,
)
from llmbuild.plugins.common.tuning import tuned
from llmbuild.plugins.common.weight_format import WeightFormat
from llmbuild.plugins.linear.tensorrt_kernels import quantised_gemv_of_many
from llmbuild.plugins.linear.triton import gemm_variant, gemv_variant, quantise_variant


def quantise_rows(sm: int, activation: str, width: int, group: int, is_static: bool) -> Plugin:
    """codes [T, width] and scales [T, width / group] of x and, if scales are static, of those."""
    variant = with_true_promises(quantise_variant(sm, activation, group, is_static), N=width)
    columns = group * int(variant.constants["GROUPS"] or 0)

    def launch(shapes: Shapes) -> Launch:
        rows, size = shapes["x"]
        return Launch((rows, ceil_div(size, columns)), {"N": size})

    def output_shapes(shapes: Shapes) -> Shapes:
        rows, size = shapes["x"]
        return {"codes": (rows, size), "scales": (rows, size // group)}

    return make_plugin(output_shapes, "codes scales", Tactic(variant, launch))


def quantised_linear(
    sm: int,
    weights: WeightFormat,
    activation: str,
    shape: tuple[int, int],
    has_bias: bool,
    activation_group: int = 0,
) -> Plugin:
    """y [T, N] of x [T, K], or its codes and their scales; of the weights' codes [N, K], scales and
    what else they have; and of bias [N]. activation_group: columns of x that share a scale, 0 for
    an x that isn't rounded."""
    features, columns = shape
    tactics = []
    for is_many in (False, True):
        variant = gemm_variant(
            sm,
            weights,
            "i8" if activation_group else activation,
            activation,
            activation_group if activation_group < columns else 0,
            is_many,
            has_bias,
            columns,
        )
        tactics.append(_gemm(with_true_promises(variant, N=features, K=columns)))
    if not activation_group:
        rows = tuned(f"linear.gemv_{weights.bits}bit", sm).rows
        variant = gemv_variant(sm, weights, activation, rows, has_bias)
        tactics.append(_gemv(with_true_promises(variant, N=features), 32 // weights.bits))
    return make_plugin(lambda shapes: {"y": (shapes["x"][0], shapes["codes"][0])}, "y", *tactics)


def _gemm(variant: KernelVariant) -> Tactic:
    tokens, features = (int(variant.constants[name] or 0) for name in ("TOKENS", "FEATURES"))

    def launch(shapes: Shapes) -> Launch:
        rows, columns = shapes["x"]
        size = shapes["codes"][0]
        grid = (ceil_div(size, features), ceil_div(rows, tokens))
        return Launch(grid, {"tokens": rows, "N": size, "K": columns})

    return Tactic(variant, launch)


def _gemv(variant: KernelVariant, codes_a_word: int) -> Tactic:
    tokens, features = (int(variant.constants[name] or 0) for name in ("TOKENS", "FEATURES"))

    def launch(shapes: Shapes) -> Launch:
        rows, columns = shapes["x"]
        size = shapes["codes"][0]
        grid = (ceil_div(size, features), ceil_div(rows, tokens))
        return Launch(grid, {"tokens": rows, "N": size, "W": columns // codes_a_word})

    any_count = replace(variant, name=f"{variant.name}.of_many", kernel=quantised_gemv_of_many)
    return Tactic(any_count, launch)
