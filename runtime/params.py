"""The parameters of a request, and which of them are refused."""

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TypeGuard

from llmbuild.errors import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What a request asks for; a plain record, checked when the request is submitted.

    temperature 0 is greedy. top_k 0 and top_p 1.0 are off. seed None draws a fresh one.
    Output ends before the first of the `stop` strings.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


def check_params(params: SamplingParams) -> None:
    """Raises RequestError that names the first parameter out of its range."""
    if not is_whole(params.max_tokens) or params.max_tokens < 1:
        raise RequestError(f"max_tokens is {params.max_tokens!r}; it must be a whole number >= 1")
    if not _is_finite(params.temperature) or params.temperature < 0:
        raise RequestError(
            f"temperature is {params.temperature!r}; it must be a finite number >= 0 "
            "(0 picks the likeliest token)"
        )
    if not is_whole(params.top_k) or params.top_k < 0:
        raise RequestError(
            f"top_k is {params.top_k!r}; it must be a whole number >= 0 (0 keeps all tokens)"
        )
    if not _is_finite(params.top_p) or not 0 < params.top_p <= 1:
        raise RequestError(
            f"top_p is {params.top_p!r}; it must be a number in (0, 1] (1 keeps all tokens)"
        )
    if params.seed is not None and (not is_whole(params.seed) or params.seed < 0):
        raise RequestError(f"seed is {params.seed!r}; it must be None or a whole number >= 0")
    if not isinstance(params.stop, list | tuple):
        raise RequestError(f"stop is {params.stop!r}; give a list or tuple of strings")
    if not all(isinstance(text, str) and text for text in params.stop):
        raise RequestError(f"stop is {params.stop!r}; each stop string must be text, not empty")
    if not isinstance(params.ignore_eos, bool):
        raise RequestError(f"ignore_eos is {params.ignore_eos!r}; it must be True or False")


def is_whole(value: object) -> TypeGuard[int]:
    """An integer of Python or numpy, and no bool."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def _is_finite(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False
