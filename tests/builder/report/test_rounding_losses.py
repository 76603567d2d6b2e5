"""The loss of matrices that are rounded without calibration, against a sum in float64."""

import numpy as np
import pytest
from numpy.typing import NDArray

from llmbuild.builder.report.rounding_losses import rounding_losses
from llmbuild.quant.grid import QuantisedMatrix, WeightGrid
from llmbuild.quant.plan import QuantPlan
from llmbuild.quant.reader import planned_reader

GRID = WeightGrid(4, 32, False)


class Model:
    """Tensors of which "stored" lies on the grid, and "whole" can't be read in parts. most_rows:
    read at a time of others."""

    def __init__(self, tensors: dict[str, NDArray[np.generic]]) -> None:
        self.tensors, self.was_read = tensors, list[str]()
        self.most_rows = 0

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def has_rows(self, name: str) -> bool:
        return name != "whole"

    def read(self, name: str) -> NDArray[np.generic]:
        self.was_read.append(name)
        return self.tensors[name]

    def read_rows(self, name: str, begin: int, end: int) -> NDArray[np.generic]:
        self.most_rows = max(self.most_rows, end - begin)
        return self.tensors[name][begin:end]

    def stored_grid(self, name: str) -> WeightGrid | None:
        return GRID if name == "stored" else None

    def read_codes(self, name: str, rows: tuple[int, int] | None = None) -> QuantisedMatrix:
        raise AssertionError("codes that are kept lose nothing, so they needn't be read")


def test_loss_is_the_squared_error_of_the_weights_relative_to_them() -> None:
    rng = np.random.default_rng(3)
    values = rng.standard_normal((37, 96)).astype(np.float32)
    model = Model({"a": values, "zero": np.zeros((1, 32), np.float32)})
    plan = QuantPlan({"a": GRID, "zero": GRID})
    read = planned_reader(model, plan)
    matrix = read("a")
    assert isinstance(matrix, QuantisedMatrix)
    exact = values.astype(np.float64)
    rounded = np.empty_like(exact)
    for row in range(37):
        for column in range(96):
            assert matrix.minima is not None
            scale, minimum = matrix.scales[row, column // 32], matrix.minima[row, column // 32]
            rounded[row, column] = float(scale) * matrix.codes[row, column] + float(minimum)
    losses = rounding_losses(model, plan, read)
    expected = ((rounded - exact) ** 2).sum() / (exact**2).sum()
    assert losses == {"a": pytest.approx(expected, rel=1e-5), "zero": 0.0}
    assert 1e-4 < losses["a"] < 1e-1


def test_all_rows_of_a_matrix_count_that_is_gone_through_in_parts() -> None:
    """Whole numbers from -8 to 7 lie on the grid exactly, and 3.25 in half of the rows does not."""
    rng = np.random.default_rng(4)
    values = rng.integers(-8, 8, (40_000, 32)).astype(np.float32)
    values[:, :2] = -8, 7
    values[:20_000, 2] = 3.25
    model, plan = Model({"a": values, "whole": values}), QuantPlan({"a": GRID, "whole": GRID})
    assert values.size > 1 << 20
    expected = 20_000 * 0.25**2 / np.square(values, dtype=np.float64).sum()
    losses = rounding_losses(model, plan, planned_reader(model, plan))
    assert losses == {name: pytest.approx(expected, rel=1e-6) for name in ("a", "whole")}
    assert set(model.was_read) == {"whole"}
    assert model.most_rows < 40_000


def test_stored_codes_lose_nothing_and_calibrated_matrices_are_left_out() -> None:
    model = Model({})
    plan = QuantPlan({"stored": GRID, "calibrated": GRID}, methods={"calibrated": "gptq"})
    assert rounding_losses(model, plan, planned_reader(model, plan)) == {"stored": 0.0}
    assert model.was_read == []
