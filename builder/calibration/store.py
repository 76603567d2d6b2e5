"""What calibration makes of a model's tensors, on disk, one file each."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from llmbuild.errors import BuildError
from llmbuild.quant.grid import QuantisedMatrix, WeightGrid
from llmbuild.quant.plan import QuantPlan

Matrix = NDArray[np.generic] | QuantisedMatrix

ACTIVATION_SCALES = "activation_scales"  # of a matrix: NAME.activation_scales
_LOSSES = "losses.json"
_DISTILLED = "distilled.json"


@dataclass(frozen=True)
class Distilled:
    """What distillation reached: the KL to the model, nats a token, over the first tenth of its
    steps and over the last."""

    steps: int
    first_kl_nats: float
    last_kl_nats: float


class TensorStore:
    """Tensors by canonical name in a folder: matrices on the plan's grids, and others as fp32.
    Raises BuildError for a file there that is damaged.

    losses: of each rounded matrix, the squared error of its products with the calibration's inputs,
    relative to the products', as it was first rounded. distilled: None where they weren't trained.
    """

    def __init__(self, root: Path, grids: Mapping[str, WeightGrid]) -> None:
        self._root, self._grids = root, grids
        root.mkdir(parents=True, exist_ok=True)
        losses, distilled = root / _LOSSES, root / _DISTILLED
        with _undamaged(root):
            self.losses: dict[str, float] = (
                json.loads(losses.read_text()) if losses.exists() else {}
            )
            self.distilled = (
                Distilled(**json.loads(distilled.read_text())) if distilled.exists() else None
            )

    def __contains__(self, name: str) -> bool:
        return self._path(name).exists()

    def get(self, name: str, rows: tuple[int, int] | None = None) -> Matrix | None:
        """A tensor, or its rows [begin, end), which are read alone; None if it isn't here."""
        if name not in self:
            return None
        wanted = slice(*rows) if rows else slice(None)
        with _undamaged(self._root), safe_open(self._path(name), framework="numpy") as file:
            names = file.keys()
            parts: dict[str, NDArray[Any]] = {n: file.get_slice(n)[wanted] for n in names}
        if "values" in parts:
            return parts["values"]
        return QuantisedMatrix(
            self._grids[name], parts["codes"], parts["scales"], parts.get("minima")
        )

    def put(self, name: str, values: Matrix, loss: float | None = None) -> None:
        """Keep a tensor in place of what was there."""
        if loss is not None:
            self.losses[name] = loss
        if not isinstance(values, QuantisedMatrix):
            save_file({"values": values.astype(np.float32, copy=False)}, self._path(name))
            return
        assert values.grid == self._grids[name]
        parts: dict[str, NDArray[Any]] = {"codes": values.codes, "scales": values.scales}
        if values.minima is not None:
            parts["minima"] = values.minima
        save_file(parts, self._path(name))

    def with_scales(self, plan: QuantPlan) -> QuantPlan:
        """The plan with the static scales of activations that are here."""
        scales = {name: self.get(f"{name}.{ACTIVATION_SCALES}") for name in plan.static}
        found = {
            name: each.astype(np.float32)
            for name, each in scales.items()
            if isinstance(each, np.ndarray)
        }
        return replace(plan, activation_scales=found)

    def divide_rows(
        self, name: str, read: Callable[[str], Matrix], divisors: NDArray[np.float32]
    ) -> None:
        """Divide the rows of a matrix, or the items of a vector, that `read` gives if it isn't
        here."""
        values = self.get(name)
        if values is None:
            values = read(name)
        if not isinstance(values, QuantisedMatrix):
            divisors = divisors.reshape(-1, *[1] * (values.ndim - 1))
            self.put(name, values.astype(np.float32) / divisors)
            return
        scales = (values.scales / divisors[:, None]).astype(values.scales.dtype)
        minima = values.minima
        if minima is not None:
            minima = (minima / divisors[:, None]).astype(np.float16)
        self.put(name, QuantisedMatrix(values.grid, values.codes, scales, minima, values.zeros))

    def finish(self) -> None:
        """Keep the losses, and what distillation reached."""
        (self._root / _LOSSES).write_text(json.dumps(self.losses, indent=1) + "\n")
        if self.distilled is not None:
            (self._root / _DISTILLED).write_text(json.dumps(asdict(self.distilled)) + "\n")

    def _path(self, name: str) -> Path:
        return self._root / f"{name}.safetensors"


@contextmanager
def _undamaged(root: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise BuildError(
            f"what calibration kept in {root} is damaged ({error}); remove that folder, and it "
            "will be made again"
        ) from error
