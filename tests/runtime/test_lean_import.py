import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "onnx", "transformers", "pydantic", "gguf", "jinja2", "safetensors", "numpy")
HEAVY += ("rich", "yaml", "concurrent.futures", "importlib.metadata")

SERVE = """\
import sys
from llmbuild import LLM, SamplingParams
with LLM(sys.argv[1]) as llm:
    assert len(llm.generate([1, 2], SamplingParams(max_tokens=9, ignore_eos=True)).token_ids) == 9
    assert llm.generate("abc", SamplingParams(max_tokens=2)).text
    assert list(llm.stream("abc", SamplingParams(max_tokens=2)))"""


def loaded(statements: str, *arguments: object) -> list[str]:
    """Which of HEAVY a process has imported after the statements."""
    code = f"{statements}\nimport sys\nprint(*[m for m in {HEAVY!r} if m in sys.modules])"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize(
    "statement",
    [
        "import llmbuild.runtime",
        "from llmbuild.runtime import LLM, Completion, SamplingParams",
        "import llmbuild.cli",
        "import llmbuild.runtime.generate_cli",
    ],
)
def test_runtime_imports_nothing_heavy(statement: str) -> None:
    assert loaded(statement) == []


def test_greedy_serving_imports_nothing_heavy(tiny_engine: Path) -> None:
    """Above all not numpy, whose import alone would take longer than a load."""
    assert loaded(SERVE, tiny_engine) == []


def test_commands_are_imported_when_they_are_asked_for() -> None:
    none_yet = "assert not any(name.endswith('_cli') for name in sys.modules)"
    assert loaded(f"import llmbuild.cli\nimport sys\n{none_yet}") == []


def test_unknown_name_is_an_attribute_error() -> None:
    import llmbuild.runtime

    with pytest.raises(AttributeError, match="'Nothing'"):
        llmbuild.runtime.Nothing  # noqa: B018
