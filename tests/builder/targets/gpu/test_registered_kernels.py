"""The plugins' kernels compile for every SM, within the gates."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

RunPython = Callable[..., subprocess.CompletedProcess[str]]

SCRIPT = Path(__file__).parent / "compile_registered.py"


def test_every_kernel_has_a_variant_that_keeps_to_the_gates(
    run_python: RunPython, tmp_path: Path
) -> None:
    done = run_python(SCRIPT, "--one-each", LLMBUILD_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 3 * 19


@pytest.mark.slow
def test_every_variant_keeps_to_the_gates_on_every_sm(
    run_python: RunPython, tmp_path: Path
) -> None:
    done = run_python(SCRIPT, LLMBUILD_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 6 * 100
