"""Widths of the models whose kernels are worth building ahead."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    hidden: int
    inner: int  # of the MLP


SMOLLM2 = ModelShape(hidden=576, inner=1536)
LLAMA_8B = ModelShape(hidden=4096, inner=14336)
MODEL_SHAPES = (SMOLLM2, LLAMA_8B)
