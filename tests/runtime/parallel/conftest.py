"""An engine of four ranks, and what it is to compute."""

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest


@pytest.fixture(scope="session")
def engine_of_ranks(
    tiny_engine: Path,
    tmp_path_factory: pytest.TempPathFactory,
    run_llmbuild: Callable[..., CompletedProcess[str]],
) -> Path:
    """tiny_engine's model for two stages of two ranks; tests leave it as it is."""
    engine = tmp_path_factory.mktemp("ranks") / "engine"
    sizes = ("--set", "parallel.tp=2", "--set", "parallel.pp=2")
    recipe, cache = tiny_engine.parent / "recipe.yaml", str(tiny_engine.parent / "cache")
    done = run_llmbuild("compile", recipe, "-o", engine, *sizes, LLMBUILD_CACHE=cache)
    assert done.returncode == 0, done.stderr
    return engine
