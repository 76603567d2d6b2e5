"""Tensors as the plan wants them: as stored, without loss, or rounded."""

import numpy as np
import pytest
from numpy.typing import NDArray

from llmbuild.quant.grid import QuantisedMatrix, WeightGrid
from llmbuild.quant.plan import QuantPlan
from llmbuild.quant.reader import planned_reader
from llmbuild.quant.rtn import round_to_nearest

Q4_0 = WeightGrid(4, 32, True)


class Stored:
    """Two matrices, of which `codes` is stored on Q4_0; `calls` notes how they are read."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.matrix = QuantisedMatrix(
            Q4_0,
            rng.integers(0, 16, (3, 64), dtype=np.uint8),
            rng.normal(0, 0.1, (3, 2)).astype(np.float16),
        )
        self.plain = rng.standard_normal((5, 64), np.float32)
        self.calls: list[tuple[str, str]] = []

    def read(self, name: str) -> NDArray[np.generic]:
        self.calls.append(("read", name))
        return self.plain if name == "plain" else self.matrix.dequantised()

    def stored_grid(self, name: str) -> WeightGrid | None:
        return Q4_0 if name == "codes" else None

    def read_codes(self, name: str, rows: tuple[int, int] | None = None) -> QuantisedMatrix:
        assert rows is None
        self.calls.append(("read_codes", name))
        assert name == "codes"
        return self.matrix


def test_tensors_outside_the_plan_are_read_as_they_are() -> None:
    stored = Stored()
    assert planned_reader(stored, QuantPlan({"codes": Q4_0}))("plain") is stored.plain


def test_codes_stored_on_the_planned_grid_are_passed_on() -> None:
    stored = Stored()
    assert planned_reader(stored, QuantPlan({"codes": Q4_0}))("codes") is stored.matrix
    assert stored.calls == [("read_codes", "codes")]  # and never dequantised


@pytest.mark.parametrize("grid", [WeightGrid(4, 64, True), WeightGrid(8, 32, True)])
@pytest.mark.parametrize("name", ["codes", "plain"])
def test_all_else_is_rounded_to_the_planned_grid(name: str, grid: WeightGrid) -> None:
    stored = Stored()
    matrix = planned_reader(stored, QuantPlan({name: grid}))(name)
    assert isinstance(matrix, QuantisedMatrix)
    expected = round_to_nearest(Stored().read(name), grid)
    assert matrix.grid == grid
    np.testing.assert_array_equal(matrix.codes, expected.codes)
    np.testing.assert_array_equal(matrix.scales, expected.scales)
