"""A part of the model, its KV cache or its weights, whose items get a precision each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmbuild.builder.assemble import Model
from llmbuild.builder.calibration.sensitivity import Change, Read, measure_changes
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.builder.recipe.recipe import Recipe, ResolvedRecipe
from llmbuild.builder.stages import Stages
from llmbuild.errors import BuildError
from llmbuild.quant.sensitivity import (
    Choice,
    Items,
    least_bytes,
    least_kl,
    total_bytes,
    total_kl,
)

Sizes = Mapping[str, Mapping[str, int]]  # bytes, by item and precision


@dataclass(frozen=True)
class Aim:
    """What a part may take of its full bytes, or what KL may be expected of it: one of both.
    option: of the command line, without the ending."""

    option: str
    max_ratio: float | None = None
    max_kl_nats: float | None = None

    def check(self, sizes: Sizes, fixed_bytes: int, full_bytes: int) -> None:
        """Raises BuildError where there is nothing to choose, or no choice is small enough."""
        if not sizes:
            raise BuildError(
                f"--{self.option}-ratio and --{self.option}-max-kl leave nothing to choose: the "
                "recipe's own overrides decide everything; remove some of them"
            )
        fewest = fixed_bytes + sum(min(each.values()) for each in sizes.values())
        if self.max_ratio is not None and self._budget(full_bytes) < fewest:
            raise BuildError(
                f"--{self.option}-ratio: given {self.max_ratio:g}, and the smallest precisions "
                f"that the recipe leaves open come to {fewest / full_bytes:.4f}; give more than "
                "that"
            )

    def choose(self, items: Items, fixed_bytes: int, full_bytes: int) -> Choice:
        """The best choice, after the check."""
        if self.max_ratio is None:
            assert self.max_kl_nats is not None
            return least_bytes(items, self.max_kl_nats)
        return least_kl(items, self._budget(full_bytes) - fixed_bytes)

    def _budget(self, full_bytes: int) -> int:
        assert self.max_ratio is not None
        return int(self.max_ratio * full_bytes)


@dataclass(frozen=True)
class Bench:
    """What measuring needs. tokens: [sequences, length], of which the last `scored` of each count.
    read: gives tensors as values, unchanged."""

    model: Model
    recipe: Recipe
    resolved: ResolvedRecipe
    tokens: NDArray[np.int32]
    scored: int
    read: Read
    stages: Stages

    def measure(self, what: str, step: StepGraph, changes: Sequence[Change]) -> list[float]:
        """The KL that each change brings, in nats a token."""
        with self.stages.stage(f"measure {what}", shows_bars=True):
            return measure_changes(
                step,
                self.model.config,
                self.read,
                self.tokens,
                self.scored,
                changes,
                self._counter(what, len(changes)),
            )

    def _counter(self, what: str, total: int) -> Callable[[int], None]:
        """Says at each tenth how far it is."""
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            tenths_before, done = 10 * done // total, done + count
            if 10 * done // total > tenths_before:
                self.stages.progress.note(f"{what}: {done} of {total} measured")

        return advance


@dataclass(frozen=True)
class Part:
    """What was measured and chosen. items: by the glob that an override matches them with.
    fixed_bytes: of what the recipe's own overrides decide. full_bytes: of all in the dtype
    `full_dtype`. Bytes are those of `per` tokens or steps. together_kl_nats: measured with all
    choices at once."""

    name: str
    unit: str
    items: Items
    choice: Choice
    fixed_bytes: int
    full_bytes: int
    full_dtype: str
    per: int
    together_kl_nats: float

    @property
    def bytes_each(self) -> float:
        """Of a token or a step, as chosen."""
        return (total_bytes(self.choice) + self.fixed_bytes) / self.per

    @property
    def ratio(self) -> float:
        """Of the full bytes."""
        return (total_bytes(self.choice) + self.fixed_bytes) / self.full_bytes

    @property
    def expected_kl_nats(self) -> float:
        """The sum of what the choices do one at a time."""
        return total_kl(self.choice)
