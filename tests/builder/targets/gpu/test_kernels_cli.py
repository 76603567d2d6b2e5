"""`llmbuild kernels` as a user meets it, and the table of the docs."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

RunPython = Callable[..., subprocess.CompletedProcess[str]]

LIST_NAMES = """
import json
from llmbuild.builder.targets.gpu.capabilities import CAPABILITIES
from llmbuild.builder.targets.gpu.kernels import registered_kernels
print(json.dumps([request.variant.name for request in registered_kernels(CAPABILITIES)]))
"""
# As where Triton isn't installed, whether it is or not.
WITHOUT_TRITON = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
"""


@pytest.fixture(scope="module")
def registered_names(run_python: RunPython) -> list[str]:
    """Every kernel's name, once."""
    done = run_python("-c", LIST_NAMES)
    assert done.returncode == 0, done.stderr
    return list(dict.fromkeys(json.loads(done.stdout)))


def test_kernels_lists_what_each_kernel_uses_and_writes_it(
    run_python: RunPython, registered_names: list[str], tmp_path: Path
) -> None:
    name = registered_names[0]
    options = ["--sm", "80,90", "--only", name, "--json", "--out", tmp_path / "out"]
    done = run_python("-m", "llmbuild", "kernels", *options, LLMBUILD_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {row["sm"] for row in rows} <= {80, 90}
    assert rows[0]["kernel"] == name
    assert all(0 < row["registers"] <= 255 and row["spilled_bytes"] == 0 for row in rows)
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    assert [(row["kernel"], row["sm"]) for row in rows] == [
        (entry["name"], entry["sm"]) for entry in index["kernels"]
    ]
    assert all(entry["null_pointers"] == 2 for entry in index["kernels"])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ["--sm", "75"],
            "Error: GPU kernels aren't built for SM 75; known: 80, 86, 89, 90, 100, 120",
        ),
        (["--sm", "80,121"], "Error: GPU kernels aren't built for SM 121; known"),
        (["--only", "nothing"], "Error: no kernel has 'nothing' in its name"),
    ],
)
def test_refusal_is_one_line(
    run_python: RunPython, options: list[str], expected: str, tmp_path: Path
) -> None:
    done = run_python("-m", "llmbuild", "kernels", *options, LLMBUILD_CACHE=str(tmp_path))
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(expected)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--sm", "80,"], "isn't numbers with commas between"),
        (["--sm", "sm_80"], "isn't numbers with commas between"),
        (["--markdown", "--json"], "give one of them"),
    ],
)
def test_option_that_cant_be_read_is_told(
    run_python: RunPython, options: list[str], expected: str
) -> None:
    done = run_python("-m", "llmbuild", "kernels", *options)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_interpreter_is_refused(run_python: RunPython, tmp_path: Path) -> None:
    environment = {"TRITON_INTERPRET": "1", "LLMBUILD_CACHE": str(tmp_path)}
    done = run_python("-m", "llmbuild", "kernels", **environment)
    assert done.returncode == 2
    assert "unset it to compile" in done.stderr


def test_missing_triton_is_one_line_that_says_what_to_install(run_python: RunPython) -> None:
    script = f"{WITHOUT_TRITON}\nfrom llmbuild.cli import main\nsys.argv[1:] = ['kernels']\nmain()"
    done = run_python("-c", script)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("Error: ")
    assert 'pip install ".[build,gpu]"' in line


def test_builder_needs_no_triton(run_python: RunPython) -> None:
    modules = "llmbuild.builder.compile, llmbuild.builder.targets.gpu.kernels"
    done = run_python("-c", f"{WITHOUT_TRITON}\nimport {modules}, llmbuild.plugins.registry")
    assert done.returncode == 0, done.stderr


def test_table_of_the_docs_lists_exactly_the_registered_kernels(
    checkout: Path, registered_names: list[str]
) -> None:
    text = (checkout / "docs" / "gpu-kernels.md").read_text()
    table = text.partition("<!-- kernels -->")[2]
    _, _, *listed = re.findall(r"^\| ([a-z0-9_.-]+) \|", table, re.MULTILINE)
    assert listed == registered_names
