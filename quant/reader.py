"""A model's tensors as the quantisation plan wants them: each quantised when it is read."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llmbuild.quant.grid import QuantisedMatrix, WeightGrid
from llmbuild.quant.plan import QuantPlan
from llmbuild.quant.rtn import round_to_nearest


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


def planned_reader(
    tensors: Tensors, plan: QuantPlan
) -> Callable[[str], NDArray[np.generic] | QuantisedMatrix]:
    """Gives tensors by name; those of the plan as matrices on its grids: without loss where the
    checkpoint stores them on this very grid, else rounded to nearest."""

    def read(name: str) -> NDArray[np.generic] | QuantisedMatrix:
        grid = plan.weights.get(name)
        if grid is None:
            return tensors.read(name)
        if tensors.stored_grid(name) == grid:
            return tensors.read_codes(name)
        return round_to_nearest(tensors.read(name), grid)

    return read
