"""The plugin of layer_norm, launched as TensorRT would, against the torch reference."""

import pytest
import torch
from plugin_contract import run

from llmbuild.plugins.layer_norm.op import layer_norm as reference
from llmbuild.plugins.layer_norm.tensorrt import layer_norm


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("count", "width"), [(1, 65), (5, 24)])
def test_every_row_is_normalised(count: int, width: int, has_bias: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(count, width).half(), torch.randn(width)
    bias = torch.randn(width) if has_bias else None
    plugin = layer_norm(80, "fp16", width, has_bias, 1e-5)
    (y,) = run(plugin, x=x, weight=weight, bias=bias)
    expected = reference(x.float(), weight, bias, 1e-5)
    torch.testing.assert_close(y.float(), expected, atol=4e-3, rtol=4e-3)
