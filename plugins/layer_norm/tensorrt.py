"""layer_norm as a TensorRT plugin."""

from llmbuild.plugins.common.tensorrt_plugin import Launch, Plugin, Tactic, make_plugin
from llmbuild.plugins.layer_norm.triton import layer_norm_variant


def layer_norm(sm: int, activation: str, width: int, has_bias: bool, eps: float) -> Plugin:
    """y of x [T, width], weight and, if it has one, bias."""
    variant = layer_norm_variant(sm, activation, width, has_bias, eps)
    tactic = Tactic(variant, lambda shapes: Launch((shapes["x"][0],), {}))
    return make_plugin(lambda shapes: {"y": shapes["x"]}, "y", tactic)
