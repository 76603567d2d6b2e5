"""How the next token is chosen from logits, and the parameters of a request."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmbuild.errors import InternalError, RequestError


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
    if not _is_int(params.max_tokens) or params.max_tokens < 1:
        raise RequestError(f"max_tokens is {params.max_tokens!r}; it must be a whole number >= 1")
    if not _is_finite(params.temperature) or params.temperature < 0:
        raise RequestError(
            f"temperature is {params.temperature!r}; it must be a finite number >= 0 "
            "(0 picks the likeliest token)"
        )
    if not _is_int(params.top_k) or params.top_k < 0:
        raise RequestError(
            f"top_k is {params.top_k!r}; it must be a whole number >= 0 (0 keeps all tokens)"
        )
    if not _is_finite(params.top_p) or not 0 < params.top_p <= 1:
        raise RequestError(
            f"top_p is {params.top_p!r}; it must be a number in (0, 1] (1 keeps all tokens)"
        )
    if params.seed is not None and (not _is_int(params.seed) or params.seed < 0):
        raise RequestError(f"seed is {params.seed!r}; it must be None or a whole number >= 0")
    if not isinstance(params.stop, list | tuple):
        raise RequestError(f"stop is {params.stop!r}; give a list or tuple of strings")
    if not all(isinstance(text, str) and text for text in params.stop):
        raise RequestError(f"stop is {params.stop!r}; each stop string must be text, not empty")
    if not isinstance(params.ignore_eos, bool):
        raise RequestError(f"ignore_eos is {params.ignore_eos!r}; it must be True or False")


def sample(logits: NDArray[np.float32], params: SamplingParams, rng: np.random.Generator) -> int:
    """The next token id from one row of logits, fp32 [vocab].

    Greedy when temperature is 0; otherwise one draw of `rng` from the distribution left by
    temperature, then top-k, then top-p. Raises InternalError when logits aren't finite.
    """
    best = int(np.argmax(logits))
    if not math.isfinite(logits[best]):  # argmax finds a NaN or +inf wherever there is one
        raise InternalError(f"the logit of token {best} is {logits[best]}: the step went wrong")
    if params.temperature == 0:
        return best
    weights = _weights(logits, params)
    cumulative = np.cumsum(weights)
    token = int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))
    return token if token < len(weights) else best  # a draw can round up to the very end


def _weights(logits: NDArray[np.float32], params: SamplingParams) -> NDArray[np.float64]:
    """Unnormalised probabilities [vocab]; 0 for tokens that top-k and top-p remove."""
    # The maximum is subtracted before the division, so that no temperature overflows.
    shifted = logits.astype(np.float64) - float(logits.max())
    with np.errstate(over="ignore"):
        weights: NDArray[np.float64] = np.exp(shifted / params.temperature)
    if 0 < params.top_k < len(weights):
        # Tokens that tie with the k-th likeliest all stay.
        threshold = np.partition(shifted, -params.top_k)[-params.top_k]
        weights[shifted < threshold] = 0.0
    if params.top_p < 1:
        order = np.argsort(-weights, kind="stable")
        before = np.cumsum(weights[order])
        before -= weights[order]
        # A token stays while those before it don't yet reach top_p; the likeliest always does.
        weights[order[before >= params.top_p * weights.sum()]] = 0.0
    return weights


def _is_int(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False
