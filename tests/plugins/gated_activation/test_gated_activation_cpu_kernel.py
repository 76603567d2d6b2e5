import numpy as np
import pytest
import torch
from int8_rows import encode, quantise, quantise_static
from kernel_harness import EACH_LEVEL, KernelCompiler, Library, bits

WIDTHS = [1, 7, 17, 33, 576]
OTHERS = ["Gelu", "GeluTanh", "Relu", "Relu2", "Sigmoid", "Tanh"]  # than Silu, at one width
INT8 = [(32, 32), (96, 32), (576, 64), (160, 160)]  # (N, columns of an activation group)

# gate and up are the two halves of one buffer, as a merged gate/up projection leaves them.
SOURCE = '#include "gated_activation/cpu.h"\n' + "".join(
    f"""
extern "C" void silu_{n}(int threads, const float* both, float* y, int rows) {{
  with_team(threads, [&](const Worker& worker) {{
    gated_activation<{n}, {2 * n}, {2 * n}, {n + 3}, Silu>(worker, both, both + {n}, y, rows);
  }});
}}
"""
    for n in WIDTHS
)
SOURCE += "".join(
    f"""
extern "C" void gated_{activation}(int threads, const float* both, float* y, int rows) {{
  with_team(threads, [&](const Worker& worker) {{
    gated_activation<33, 66, 66, 36, {activation}>(worker, both, both + 33, y, rows);
  }});
}}
"""
    for activation in OTHERS
)
SOURCE += "".join(
    f"""
extern "C" void plain_{n}_{a}(int threads, const float* both, float* y, int rows) {{
  with_team(threads, [&](const Worker& worker) {{
    gated_activation<{n}, {2 * n + 3}, {2 * n + 3}, {n}, {activation}>(worker, both, both + {n}, y,
                                                                       rows);
  }});
}}
extern "C" void int8_{n}_{a}(int threads, const float* both, uint8_t* y, int rows) {{
  with_team(threads, [&](const Worker& worker) {{
    gated_activation_int8<{n}, {2 * n + 3}, {2 * n + 3}, {a}, {activation}>(
        worker, both, both + {n}, y, rows);
  }});
}}
extern "C" void static_{n}_{a}(int threads, const float* both, uint8_t* y, int rows,
                               const float* scales) {{
  with_team(threads, [&](const Worker& worker) {{
    gated_activation_int8<{n}, {2 * n + 3}, {2 * n + 3}, {a}, {activation}, true>(
        worker, both, both + {n}, y, rows, scales);
  }});
}}
"""
    for (n, a), activation in zip(INT8, ["Silu", "Silu", "GeluTanh", "Relu2"], strict=True)
)


@pytest.fixture(params=EACH_LEVEL)
def library(request: pytest.FixtureRequest, compiler: KernelCompiler) -> Library:
    return compiler.library(SOURCE, request.param)


def run(
    library: Library, both: np.ndarray, threads: int, activation: str | None = None
) -> np.ndarray:
    rows, n = len(both), both.shape[1] // 2
    y = np.full((rows, n + 3), 7.0, np.float32)
    name = f"gated_{activation}" if activation else f"silu_{n}"
    library.call(name, threads, both, y, rows)
    assert (y[:, n:] == 7.0).all()
    return y[:, :n]


@pytest.mark.parametrize("n", WIDTHS)
def test_silu_times_up_is_within_rounding_of_float64(library: Library, n: int) -> None:
    for rows in (0, 1, 2, 13):
        both = np.random.default_rng(n).standard_normal((rows, 2 * n)).astype(np.float32)
        both[:, :n] *= 20
        gate, up = both[:, :n].astype(np.float64), both[:, n:].astype(np.float64)
        expected = gate / (1 + np.exp(-gate)) * up
        np.testing.assert_allclose(run(library, both, 2), expected, rtol=6 * 2.0**-23, atol=1e-37)


def test_silu_of_extreme_gates_has_the_right_limits(library: Library) -> None:
    gate = np.array([-np.inf, -1e30, -200, -88, -0.0, 0, 88, 200, 1e30, np.nan], np.float32)
    both = np.ones((len(gate), 2), np.float32)
    both[:, 0] = gate
    y = run(library, both, 1)[:, 0]
    np.testing.assert_array_equal(y[[1, 2, 4, 5, 6, 7, 8]], [-0.0, -0.0, -0.0, 0, 88, 200, gate[8]])
    assert abs(y[3] + 88 * np.exp(-88.0)) <= 1e-5 * 88 * np.exp(-88.0)
    assert np.isnan(y[[0, 9]]).all()  # -inf * 0, as the formula has it


@pytest.mark.parametrize("n", WIDTHS)
def test_activation_has_the_same_bits_in_any_batch_and_team(library: Library, n: int) -> None:
    both = np.random.default_rng(n).standard_normal((13, 2 * n)).astype(np.float32) * 5
    together = run(library, both, 1)
    np.testing.assert_array_equal(bits(run(library, both, 3)), bits(together))
    for row in range(13):
        alone = run(library, both[row : row + 1].copy(), 2)
        np.testing.assert_array_equal(bits(alone), bits(together[row : row + 1]))


def activated(name: str, gate: torch.Tensor) -> torch.Tensor:
    functional = torch.nn.functional
    match name:
        case "Gelu":
            return functional.gelu(gate)
        case "GeluTanh":
            return functional.gelu(gate, approximate="tanh")
        case "Relu":
            return functional.relu(gate)
        case "Relu2":
            return functional.relu(gate) ** 2
        case "Sigmoid":
            return torch.sigmoid(gate)
    assert name == "Tanh"
    return torch.tanh(gate)


@pytest.mark.parametrize("activation", OTHERS)
def test_every_other_activation_times_up_is_within_rounding_of_float64(
    library: Library, activation: str
) -> None:
    both = np.random.default_rng(3).standard_normal((257, 66)).astype(np.float32)
    both[:, :33] *= np.geomspace(1e-3, 30, 257)[:, None].astype(np.float32)
    gate, up = both[:, :33].astype(np.float64), both[:, 33:].astype(np.float64)
    expected = activated(activation, torch.from_numpy(gate)).numpy() * up
    # GELU adds one to a function near -1, which leaves that one's rounding: 2^-24 |x| / 2 a step.
    # GeluTanh's inner term, up to 9 there, is a few ulp off, which tanh turns into less than that.
    atol = np.abs(gate * up) * 2.0**-23 if activation.startswith("Gelu") else 1e-37
    result = run(library, both, 2, activation)
    assert (np.abs(result - expected) <= 6 * 2.0**-23 * np.abs(expected) + atol).all()


@pytest.mark.parametrize("activation", OTHERS)
def test_other_activations_have_the_same_bits_in_any_batch_and_team(
    library: Library, activation: str
) -> None:
    both = np.random.default_rng(4).standard_normal((13, 66)).astype(np.float32) * 3
    together = run(library, both, 1, activation)
    np.testing.assert_array_equal(bits(run(library, both, 3, activation)), bits(together))
    alone = run(library, both[5:6].copy(), 2, activation)
    np.testing.assert_array_equal(bits(alone), bits(together[5:6]))


@pytest.mark.parametrize("activation", OTHERS)
def test_a_nan_gate_stays_nan(library: Library, activation: str) -> None:
    both = np.ones((1, 66), np.float32)
    both[0, 20] = np.nan
    y = run(library, both, 1, activation)
    np.testing.assert_array_equal(np.isnan(y[0]), np.arange(33) == 20)


@pytest.mark.parametrize("is_static", [False, True])
@pytest.mark.parametrize(("n", "group"), INT8)
def test_int8_rows_are_the_rounded_result_in_any_batch_and_team(
    library: Library, n: int, group: int, is_static: bool
) -> None:
    """Of the fp32 kernel, rounded by numpy. A group is a thread's, so a row may be several's."""
    scales = np.random.default_rng(n).uniform(0.02, 0.1, n // group).astype(np.float32)
    kernel, given = ("static", (scales,)) if is_static else ("int8", ())
    for rows in (0, 1, 2, 13):
        both = np.full((rows, 2 * n + 3), np.nan, np.float32)
        both[:, : 2 * n] = np.random.default_rng(n).standard_normal((rows, 2 * n)) * 5
        result = np.zeros((rows, n), np.float32)
        library.call(f"plain_{n}_{group}", 1, both, result, rows)
        rounded = quantise_static(result, scales) if is_static else quantise(result, group)
        expected = encode(*rounded)
        for threads in (1, 2, 3):
            y = np.zeros((rows + 1, expected.shape[1]), np.uint8)
            y[rows] = 7
            library.call(f"{kernel}_{n}_{group}", threads, both, y, rows, *given)
            np.testing.assert_array_equal(y[:rows], expected)
            assert (y[rows] == 7).all()
        if rows:
            alone = np.zeros_like(y[:1])
            library.call(f"{kernel}_{n}_{group}", 3, both[rows - 1 :].copy(), alone, 1, *given)
            np.testing.assert_array_equal(alone, expected[rows - 1 :])
