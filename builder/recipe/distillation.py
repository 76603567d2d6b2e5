"""The recipe's distillation: how long rounded matrices are trained together."""

from typing import Any

from pydantic import Field, ValidationInfo, field_validator

from llmbuild.builder.recipe.problems import problem
from llmbuild.builder.recipe.section import Section

DEFAULT_BATCH = 8
NOTHING_TO_TRAIN = (
    "no matrix that it could train is rounded by gptq, awq or smoothquant (experts of a mixture "
    "aren't trained): choose one of them as quantisation.method, or leave it out"
)

NOT_OF_FP8 = (
    "it trains whole numbers alone, and quantisation asks for FP8: leave it out, or choose schemes "
    "of int4 and int8"
)


class Distillation(Section):
    """steps: of Adam, each with `batch` of `sequences` that are drawn as calibration's are."""

    steps: int = Field(ge=1, le=1_000_000, description="an integer from 1 to 1000000")
    sequences: int = Field(default=256, ge=1, le=65536, description="an integer from 1 to 65536")
    batch: int | None = Field(
        default=None, ge=1, description="an integer from 1 to distillation.sequences"
    )

    @field_validator("batch")
    @classmethod
    def _batch_is_of_the_sequences(cls, batch: int | None, info: ValidationInfo) -> int | None:
        sequences = info.data.get("sequences")
        if batch is not None and sequences is not None and batch > sequences:
            raise problem(f"at most distillation.sequences, {sequences}, is allowed")
        return batch

    def resolved(self) -> dict[str, Any]:
        """As written, with the default of the batch, cut to what there is."""
        return self.model_dump() | {"batch": self.batch or min(DEFAULT_BATCH, self.sequences)}


class ResolvedDistillation(Distillation):
    batch: int
