"""The lean runtime: opens an engine and serves many requests at once by inflight batching.

Public names load on first use, so that the builder can import the schema alone cheaply.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmbuild.runtime.api import LLM, Completion, SamplingParams

__all__ = ["LLM", "Completion", "SamplingParams"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("llmbuild.runtime.api"), name)
