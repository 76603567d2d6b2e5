"""The plugin of gated_activation, launched as TensorRT would, against the torch reference."""

import pytest
import torch
from plugin_contract import run

from llmbuild.plugins.gated_activation.op import gated_activation as reference
from llmbuild.plugins.gated_activation.tensorrt import gated_activation


@pytest.mark.parametrize("is_merged", [False, True])
@pytest.mark.parametrize(("count", "width"), [(1, 1025), (3, 1024), (2, 17)])  # 1024 a program
def test_gate_and_up_may_lie_in_one_tensor(count: int, width: int, is_merged: bool) -> None:
    torch.manual_seed(width)
    gate, up = torch.randn(2, count, width).half()
    plugin = gated_activation(80, "fp16", "gelu_tanh", width, is_merged)
    inputs = {"gate": torch.cat((gate, up), dim=1)} if is_merged else {"gate": gate, "up": up}
    (y,) = run(plugin, **inputs)
    expected = reference(gate.float(), up.float(), "gelu_tanh")
    torch.testing.assert_close(y.float(), expected, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize(("width", "is_promised"), [(64, True), (17, False)])
def test_a_width_is_promised_to_be_a_multiple_of_16_only_if_it_is(
    width: int, is_promised: bool
) -> None:
    plugin = gated_activation(80, "fp16", "silu", width, is_merged=True)
    assert ("N" in plugin.tactics[0].variant.divisible_by_16) is is_promised
