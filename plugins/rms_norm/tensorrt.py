"""rms_norm and add_rms_norm as TensorRT plugins."""

from llmbuild.plugins.common.tensorrt_plugin import Launch, Plugin, Tactic, make_plugin
from llmbuild.plugins.rms_norm.triton import norm_variant


def rms_norm(sm: int, activation: str, width: int, group: int, eps: float) -> Plugin:
    """y of x [T, width] and weight; group: columns that are normalised together."""
    variant = norm_variant(
        sm, activation, width, with_residual=False, group=None if group == width else group, eps=eps
    )
    tactic = Tactic(variant, lambda shapes: Launch((shapes["x"][0],), {}))
    return make_plugin(lambda shapes: {"y": shapes["x"]}, "y", tactic)


def add_rms_norm(sm: int, activation: str, width: int, eps: float) -> Plugin:
    """total and y of x, residual and weight."""
    variant = norm_variant(sm, activation, width, with_residual=True, eps=eps)
    tactic = Tactic(variant, lambda shapes: Launch((shapes["x"][0],), {}))
    return make_plugin(lambda shapes: {"total": shapes["x"], "y": shapes["x"]}, "total y", tactic)
