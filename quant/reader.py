"""A model's tensors as the quantisation plan wants them: each quantised when it is read."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llmbuild.quant.grid import QuantisedMatrix, WeightGrid
from llmbuild.quant.plan import QuantPlan
from llmbuild.quant.rtn import round_to_nearest

Tensor = NDArray[np.generic] | QuantisedMatrix


class Tensors(Protocol):
    """A model's tensors by canonical name."""

    def read(self, name: str) -> NDArray[np.generic]:
        """The values, row-major."""
        ...

    def stored_grid(self, name: str) -> WeightGrid | None:
        """The grid that the checkpoint has a matrix on, None for any other tensor."""
        ...

    def read_codes(self, name: str) -> QuantisedMatrix:
        """A matrix that has a stored grid, as it is stored."""
        ...


class Calibrated(Protocol):
    """What calibration made of a model's tensors."""

    def get(self, name: str) -> Tensor | None:
        """A tensor that it changed, None for any other."""
        ...


def planned_reader(
    tensors: Tensors, plan: QuantPlan, calibrated: Calibrated | None = None
) -> Callable[[str], Tensor]:
    """Gives tensors by name; those of the plan as matrices on its grids: as calibration made them,
    without loss where the checkpoint stores them on this very grid, else rounded to nearest.

    Without `calibrated`, those that the plan rounds for their inputs come as they are.
    """

    def read(name: str) -> Tensor:
        found = None if calibrated is None else calibrated.get(name)
        if found is not None:
            return found
        grid = plan.weights.get(name)
        if grid is None or name in plan.methods:
            return tensors.read(name)
        if tensors.stored_grid(name) == grid:
            return tensors.read_codes(name)
        return round_to_nearest(tensors.read(name), grid)

    return read


def value_reader(read: Callable[[str], Tensor]) -> Callable[[str], NDArray[np.generic]]:
    """The same tensors as values: quantised ones dequantised."""

    def read_values(name: str) -> NDArray[np.generic]:
        tensor = read(name)
        return tensor.dequantised() if isinstance(tensor, QuantisedMatrix) else tensor

    return read_values
