"""Kernels compiled ahead of time, in processes of their own: one that interprets kernels can't."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import pytest

sys.path.append(str(Path(__file__).parent))

from toy_outcome import TOYS, CompileToys, ToyOutcome

RunPython = Callable[..., subprocess.CompletedProcess[str]]

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def run_python() -> RunPython:
    """run_python(*arguments, **environment): an interpreter of Python's, none of Triton's."""

    def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        kept = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            env=kept | environment,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def compile_toys(run_python: RunPython) -> CompileToys:
    """compile_toys("NAME:SM", ..., cache=folder, script=path): outcomes by what was asked."""

    def run(
        *wanted: str, cache: Path, script: Path = HERE / "compile_toys.py"
    ) -> dict[str, ToyOutcome]:
        done = run_python(script, *wanted, LLMBUILD_CACHE=str(cache), PYTHONPATH=_search_path())
        assert done.returncode == 0, done.stderr
        outcomes = msgspec.json.decode(done.stdout, type=list[ToyOutcome])
        return {f"{outcome.name}:{outcome.sm}": outcome for outcome in outcomes}

    return run


def _search_path() -> str:
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join([given, str(HERE)] if given else [str(HERE)])


@pytest.fixture(scope="session")
def toys_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache that `toys` fills."""
    return tmp_path_factory.mktemp("toys")


@pytest.fixture(scope="session")
def toys(compile_toys: CompileToys, toys_cache: Path) -> Mapping[str, ToyOutcome]:
    """Outcomes of toys, all of one run with an empty cache."""
    return compile_toys(*TOYS, cache=toys_cache)
