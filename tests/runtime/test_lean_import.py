import subprocess
import sys

import pytest

HEAVY = ("torch", "onnx", "transformers", "pydantic", "gguf", "jinja2", "safetensors")


@pytest.mark.parametrize(
    "statement",
    ["import llmbuild.runtime", "from llmbuild.runtime import LLM, Completion, SamplingParams"],
)
def test_runtime_imports_nothing_heavy(statement):
    code = f"{statement}\nimport sys\nprint([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_unknown_name_is_an_attribute_error():
    import llmbuild.runtime

    with pytest.raises(AttributeError, match="'Nothing'"):
        llmbuild.runtime.Nothing  # noqa: B018
