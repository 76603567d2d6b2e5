import numpy as np
import pytest
import torch
from kernel_harness import EACH_LEVEL, KernelCompiler, Library, bits

WIDTHS = [2, 7, 16, 17, 33, 576]
PAD = 3
EPS = 1e-5

SOURCE = '#include "layer_norm/cpu.h"\n' + "".join(
    f"""
extern "C" void layer_norm_{n}(int threads, const float* x, const float* weight, const float* bias,
                               float eps, float* y, int rows) {{
  with_team(threads, [&](const Worker& worker) {{
    layer_norm<{n}, {n + PAD}, {n + PAD}>(worker, x, weight, bias, eps, y, rows);
  }});
}}
"""
    for n in WIDTHS
)


@pytest.fixture(params=EACH_LEVEL)
def library(request: pytest.FixtureRequest, compiler: KernelCompiler) -> Library:
    return compiler.library(SOURCE, request.param)


def run(
    library: Library,
    x: np.ndarray,
    weight: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    threads: int = 2,
) -> np.ndarray:
    n = x.shape[1] - PAD
    y = np.full_like(x, 7.0)
    library.call(f"layer_norm_{n}", threads, x, weight, bias, EPS, y, len(x))
    assert (y[:, n:] == 7.0).all()
    return y[:, :n]


def rows_of(n: int, rows: int, offset: float) -> np.ndarray:
    x = np.random.default_rng(n).standard_normal((rows, n + PAD)).astype(np.float32)
    x[::2] *= 1e-3  # where eps matters
    x += np.float32(offset)
    x[:, n:] = np.nan
    return x


@pytest.mark.parametrize("offset", [0.0, 50.0])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_weight", [False, True])
@pytest.mark.parametrize("n", WIDTHS)
def test_layer_norm_is_within_rounding_of_torch_in_float64(
    library: Library, n: int, with_weight: bool, with_bias: bool, offset: float
) -> None:
    rng = np.random.default_rng(n + 1)
    weight = rng.uniform(0.5, 2, n).astype(np.float32) if with_weight else None
    bias = rng.standard_normal(n).astype(np.float32) if with_bias else None
    for rows in (0, 1, 2, 3, 13):
        x = rows_of(n, rows, offset)
        exact = torch.nn.functional.layer_norm(
            torch.from_numpy(x[:, :n].astype(np.float64)),
            (n,),
            None if weight is None else torch.from_numpy(weight.astype(np.float64)),
            None if bias is None else torch.from_numpy(bias.astype(np.float64)),
            EPS,
        ).numpy()
        # The mean is at most n/16 + 6 roundings of |x| off; it and the scale then meet a value.
        deviation = np.sqrt(x[:, :n].astype(np.float64).var(1) + EPS)[:, None]
        largest = np.abs(x[:, :n]).max(1, initial=0)[:, None] / deviation
        bound = (n / 16 + 8) * 2.0**-24 * (largest * 4 + np.abs(exact) + 4)
        assert (np.abs(run(library, x, weight, bias) - exact) <= bound).all()


def test_a_constant_row_becomes_the_bias(library: Library) -> None:
    x = np.full((2, 17 + PAD), 3.0, np.float32)
    bias = np.arange(17, dtype=np.float32)
    np.testing.assert_array_equal(run(library, x, None, bias), [bias, bias])


@pytest.mark.parametrize("n", WIDTHS)
def test_layer_norm_of_a_row_has_the_same_bits_in_any_batch_and_team(
    library: Library, n: int
) -> None:
    weight, bias = np.random.default_rng(n).standard_normal((2, n)).astype(np.float32)
    x = rows_of(n, 13, 0.0)
    together = run(library, x, weight, bias, 1)
    np.testing.assert_array_equal(bits(run(library, x, weight, bias, 3)), bits(together))
    for row in range(13):
        alone = run(library, x[row : row + 1].copy(), weight, bias)
        np.testing.assert_array_equal(bits(alone), bits(together[row : row + 1]))


def test_output_may_be_the_input(library: Library) -> None:
    x = rows_of(33, 5, 1.0)
    expected = run(library, x)
    library.call("layer_norm_33", 2, x, None, None, EPS, x, 5)
    np.testing.assert_array_equal(bits(x[:, :33]), bits(expected))
