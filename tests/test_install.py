"""`pip install .` without extras: the lean runtime, in an environment of its own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

BUILDER_LIBRARIES = ("gguf", "onnx", "onnx_ir", "pydantic", "safetensors", "torch", "transformers")


@pytest.fixture(scope="module")
def lean_bin(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bin/ of a fresh virtual environment that llmbuild is installed in."""
    environment = tmp_path_factory.mktemp("lean")
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    pip = [environment / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "-q"]
    # From a copy: setuptools leaves build/ in the folder that it builds in.
    source = environment / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).symlink_to(checkout / name)
    for name in ("llmbuild", "builder", "plugins", "quant", "runtime"):
        (source / name).symlink_to(checkout / name)
    subprocess.run([*pip, "install", source], check=True)
    return environment / "bin"


@pytest.fixture
def run_lean(lean_bin: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a program of the environment with nothing on PATH, outside the checkout."""

    def run(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        return subprocess.run(
            [lean_bin / program, *map(str, arguments)],
            cwd=tmp_path,
            env=kept | {"PATH": ""},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


RunLean = Callable[..., subprocess.CompletedProcess[str]]


def test_lean_install_has_no_builder_library(run_lean: RunLean) -> None:
    listed = run_lean("python", "-m", "pip", "list", "--format=freeze").stdout.lower()
    assert "llmbuild==" in listed
    installed = {line.partition("==")[0].replace("-", "_") for line in listed.split()}
    assert installed.isdisjoint(BUILDER_LIBRARIES)


def test_lean_install_runs_an_engine_without_a_compiler(
    tiny_engine: Path,
    run_lean: RunLean,
    run_llmbuild: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    asked = ("generate", tiny_engine, "In the beginning", "--max-tokens", 20)
    done = run_lean("llmbuild", *asked)
    assert done.returncode == 0, done.stderr
    assert done.stdout == run_llmbuild(*asked).stdout
    verified = run_lean("llmbuild", "verify", tiny_engine)
    assert verified.returncode == 0, verified.stderr
    assert verified.stdout.splitlines()[-1].startswith("verified: ")


def test_lean_install_evaluates_an_engine(
    tiny_engine: Path, checkout: Path, run_lean: RunLean
) -> None:
    text = checkout / "tests" / "data" / "genesis.txt"
    for asked in (["perplexity", tiny_engine], ["compare", tiny_engine, tiny_engine]):
        done = run_lean("llmbuild", "eval", *asked, "--text", text, "--context", 32)
        assert done.returncode == 0, done.stderr
    done = run_lean("llmbuild", "eval", "retrieval", tiny_engine)
    assert done.returncode == 2
    assert "a context of 64 tokens is too short" in done.stderr


def test_import_of_the_runtime_shows_no_builder_library(run_lean: RunLean) -> None:
    done = run_lean("python", "-X", "importtime", "-c", "import llmbuild.runtime, llmbuild.cli")
    assert done.returncode == 0, done.stderr
    modules = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines()]
    assert "llmbuild.runtime" in modules
    assert {module.partition(".")[0] for module in modules}.isdisjoint(BUILDER_LIBRARIES)


@pytest.mark.parametrize("command", ["compile", "fetch"])
def test_build_without_the_build_extra_says_what_to_install(
    tiny_engine: Path, run_lean: RunLean, command: str
) -> None:
    done = run_lean("llmbuild", command, tiny_engine.parent / "recipe.yaml")
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("Error: ")
    assert done.stderr.endswith("`pip install '.[build]'` in llmbuild's checkout has it\n")
    assert len(done.stderr.splitlines()) == 1
