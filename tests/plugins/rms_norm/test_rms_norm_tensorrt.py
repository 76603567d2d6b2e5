"""The plugins of rms_norm, launched as TensorRT would, against the torch references."""

import pytest
import torch
from plugin_contract import run

from llmbuild.plugins.rms_norm import op
from llmbuild.plugins.rms_norm.tensorrt import add_rms_norm, rms_norm

SM, EPS = 80, 1e-5
TOLERANCE = 4e-3


def rows(count: int, width: int, seed: int) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).half()


@pytest.mark.parametrize(("count", "width", "group"), [(1, 64, 64), (7, 63, 63), (3, 65, 13)])
def test_every_row_is_normalised(count: int, width: int, group: int) -> None:
    x, weight = rows(count, width, 0), rows(1, group, 1)[0].float()
    plugin = rms_norm(SM, "fp16", width, group, EPS)
    (y,) = run(plugin, x=x, weight=weight)
    torch.testing.assert_close(
        y.float(), op.rms_norm(x.float(), weight, EPS), atol=TOLERANCE, rtol=TOLERANCE
    )


@pytest.mark.parametrize(("count", "width"), [(1, 17), (5, 64)])
def test_sum_and_norm_are_two_outputs(count: int, width: int) -> None:
    x, residual, weight = rows(count, width, 0), rows(count, width, 1), rows(1, width, 2)[0].float()
    plugin = add_rms_norm(SM, "fp16", width, EPS)
    total, y = run(plugin, x=x, residual=residual, weight=weight)
    expected_total, expected = op.add_rms_norm(x.float(), residual.float(), weight, EPS)
    assert torch.equal(total, expected_total.half())
    torch.testing.assert_close(y.float(), expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_plugins_of_two_constants_have_two_names() -> None:
    one, two = (rms_norm(SM, "fp16", 64, 64, eps) for eps in (1e-5, 1e-6))
    assert one.name != two.name
    assert one.name == rms_norm(SM, "fp16", 64, 64, 1e-5).name
