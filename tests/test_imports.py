"""What an import costs: the runtime loads no builder library, llmbuild itself next to nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

import llmbuild

BUILDER_LIBRARIES = {
    "gguf",
    "huggingface_hub",
    "ml_dtypes",
    "onnx",
    "onnx_ir",
    "onnxscript",
    "pydantic",
    "safetensors",
    "torch",
    "transformers",
    "yaml",
}


def packages_loaded_by(statement: str, folder: Path) -> set[str]:
    """Top-level packages that a fresh interpreter started in `folder` loads for `statement`."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", statement],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}


@pytest.mark.parametrize(
    "statement",
    ["import llmbuild.runtime", "from llmbuild import LLM, SamplingParams", "import llmbuild.cli"],
)
def test_runtime_loads_no_builder_library(statement: str, tmp_path: Path) -> None:
    loaded = packages_loaded_by(statement, tmp_path)
    assert "llmbuild" in loaded
    assert loaded & BUILDER_LIBRARIES == set()


def test_runtime_loads_jinja2_only_when_a_chat_template_asks_for_it(tmp_path: Path) -> None:
    loaded = packages_loaded_by("from llmbuild import LLM", tmp_path)
    assert "llmbuild" in loaded
    assert "jinja2" not in loaded


def test_import_of_llmbuild_loads_the_standard_library_alone(tmp_path: Path) -> None:
    plain = packages_loaded_by("pass", tmp_path)
    loaded = packages_loaded_by("import llmbuild", tmp_path) - plain
    assert loaded - sys.stdlib_module_names == {"llmbuild"}


def test_packages_load_from_the_root_of_a_checkout(checkout: Path) -> None:
    assert "llmbuild" in packages_loaded_by("import llmbuild.runtime, llmbuild.builder", checkout)


def test_public_names_are_those_that_load() -> None:
    for name in llmbuild.__all__:
        assert getattr(llmbuild, name) is not None


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Engin'"):
        llmbuild.Engin  # noqa: B018
