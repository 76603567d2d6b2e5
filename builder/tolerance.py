"""How far a build's logits may be from the reference's, and whose fault it is when they are."""

from collections.abc import Iterator
from contextlib import contextmanager

from llmbuild.builder.recipe.recipe import ResolvedRecipe
from llmbuild.errors import InternalError, RecipeError


class Divergence(InternalError):
    """Logits that differ by more than allowed. worst: by how much, of the largest."""

    def __init__(self, what: str, worst: float, tolerance: float) -> None:
        super().__init__(
            f"the {what}'s logits differ from the reference's by {worst:.2e} of the largest, and "
            f"verify.tolerance is {tolerance:.2e}; nothing was published"
        )
        self.worst = worst


def require_within(tolerance: float, worst: float, what: str) -> None:
    """Raises Divergence, also for NaN."""
    if not worst <= tolerance:
        raise Divergence(what, worst, tolerance)


@contextmanager
def held_to_its_tolerance(resolved: ResolvedRecipe) -> Iterator[None]:
    """Raises RecipeError for a divergence that the recipe's precisions explain: it then asks for
    less than rounding costs."""
    try:
        yield
    except Divergence as error:
        usual = resolved.usual_tolerance
        if not error.worst <= usual:
            raise
        raise RecipeError(
            f"recipe {resolved.name}:\n  verify.tolerance: given {resolved.verify.tolerance:g}; "
            f"logits differ by {error.worst:.3g} of the largest, which rounding in the recipe's "
            f"precisions explains; give more, or leave it out for {usual:g}"
        ) from error
