"""Quantisation schemes by name: what weights and the activations that meet them become."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Scheme:
    """weight_bits: 4 or 8, or None for the codes that the checkpoint stores. rounds_activations:
    to int8, in groups of a row; otherwise they stay fp32. static_activations: by scales that
    calibration fixes, not as they come. is_fp8: weights and activations are FP8 numbers in place of
    whole ones, with one scale for all activations of a linear."""

    weight_bits: int | None
    rounds_activations: bool
    static_activations: bool = False
    is_fp8: bool = False


SCHEMES: dict[str, Scheme] = {
    "w4a8": Scheme(4, True),
    "w4a16": Scheme(4, False),
    "w8a8": Scheme(8, True),
    "w8a8-static": Scheme(8, True, static_activations=True),
    "w8a16": Scheme(8, False),
    "stored-a8": Scheme(None, True),
    "stored-a16": Scheme(None, False),
    "fp8_w8a8": Scheme(8, True, static_activations=True, is_fp8=True),
}
