"""llmbuild compiles decoder LLMs ahead of time into engines, and serves them.

The names of the public API load on first use, so `import llmbuild` costs next to nothing and
`llmbuild.compile` alone needs the `build` extra.
"""

from importlib import import_module
from pkgutil import extend_path
from typing import TYPE_CHECKING

from llmbuild.version import __version__

if TYPE_CHECKING:
    from llmbuild.builder.compile import compile
    from llmbuild.runtime.api import LLM, Completion, SamplingParams

# In a checkout's root this folder comes first on sys.path, yet the folders that pyproject.toml
# maps below llmbuild (builder, runtime, ...) stand beside it: the installed ones are added.
__path__ = extend_path(__path__, __name__)

__all__ = ["LLM", "Completion", "SamplingParams", "__version__", "compile"]

_HOMES = {
    "LLM": "llmbuild.runtime.api",
    "Completion": "llmbuild.runtime.api",
    "SamplingParams": "llmbuild.runtime.api",
    "compile": "llmbuild.builder.compile",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
