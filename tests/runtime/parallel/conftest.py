"""An engine of four ranks, and what it is to compute."""

import os
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from llmbuild.builder.cache import locked


@pytest.fixture(scope="session")
def engine_of_ranks(
    tiny_engine: Path,
    tmp_path_factory: pytest.TempPathFactory,
    run_llmbuild: Callable[..., CompletedProcess[str]],
) -> Path:
    """tiny_engine's model for two stages of two ranks; tests leave it as it is. All workers of
    pytest-xdist have the same, which the first compiles."""
    own = tmp_path_factory.getbasetemp()
    folder = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    engine = folder / "ranks" / "engine"
    sizes = ("--set", "parallel.tp=2", "--set", "parallel.pp=2")
    recipe, cache = tiny_engine.parent / "recipe.yaml", str(tiny_engine.parent / "cache")
    with locked(folder / "ranks.lock", lambda: None):
        if not engine.exists():
            done = run_llmbuild("compile", recipe, "-o", engine, *sizes, LLMBUILD_CACHE=cache)
            assert done.returncode == 0, done.stderr
    return engine
