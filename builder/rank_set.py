"""Ranks that are built one by one, by several calls of the builder, until the set is whole.

They wait in `.NAME.ranks` beside the output path NAME, each in the folders that the engine will
have of it, and are moved into the engine together. `recipe.yaml` there says what they are ranks of.
"""

import fcntl
import os
import shutil
from pathlib import Path

from llmbuild.errors import BuildError, RecipeError
from llmbuild.runtime.manifest import Parallel
from llmbuild.version import __version__

_RECIPE = "recipe.yaml"


def check_rank(rank: int, parallel: Parallel) -> None:
    """Raises RecipeError for a rank that there isn't."""
    count = parallel.tp * parallel.pp
    if count == 1:
        raise RecipeError(
            f"--rank: given {rank}, and the recipe has one rank; leave it out, or set parallel.tp "
            "or parallel.pp"
        )
    if not 0 <= rank < count:
        raise RecipeError(
            f"--rank: given {rank}; parallel.tp is {parallel.tp} and parallel.pp {parallel.pp}, so "
            f"0 to {count - 1} is allowed"
        )


class RankSet:
    """The waiting ranks of the engine that is to be published at `out`."""

    def __init__(self, out: Path, recipe: str, parallel: Parallel) -> None:
        """recipe: the effective one; ranks of another are refused, with a BuildError."""
        out = Path(os.path.realpath(out))
        self._root = out.parent / f".{out.name}.ranks"
        self._parallel = parallel
        identity = f"# llmbuild {__version__}\n{recipe}"
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            stated = self._root / _RECIPE
            if not stated.exists():
                stated.write_text(identity)
            other = stated.read_text() != identity
        except OSError as error:
            raise BuildError(f"can't keep ranks in {self._root}: {error}") from error
        if other:
            raise BuildError(
                f"{self._root} holds ranks of another recipe for the same output path; build its "
                "other ranks, remove that folder, or give another output path"
            )

    def add(self, rank: int, engine: Path) -> list[int]:
        """Put a rank that was built in the folder of an unfinished engine to the others; returns
        those that are missing yet. Once none is, all lie in `engine`, and nothing waits any more.
        A rank that waits already is replaced. Raises BuildError."""
        try:
            with (self._root / _RECIPE).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # two may want to be the last one
                self._put(rank, engine)
                missing = [each for each in self._all if not (self._root / f"rank{each}").exists()]
                if not missing:
                    self._take(engine)
            return missing
        except OSError as error:
            raise BuildError(f"can't keep rank {rank} in {self._root}: {error}") from error

    @property
    def _all(self) -> range:
        return range(self._parallel.tp * self._parallel.pp)

    def _put(self, rank: int, engine: Path) -> None:
        stage, tp_rank = divmod(rank, self._parallel.tp)
        # What a stage's ranks share is written with its first one. The rank's own folder, by which
        # it is known to wait, goes last.
        for folder in ([] if tp_rank else [f"stage{stage}"]) + [f"rank{rank}"]:
            shutil.rmtree(self._root / folder, ignore_errors=True)
            if (engine / folder).exists():
                (engine / folder).rename(self._root / folder)

    def _take(self, engine: Path) -> None:
        for path in list(self._root.iterdir()):
            if path.is_dir():
                path.rename(engine / path.name)
        shutil.rmtree(self._root)
