"""The recipe's distillation: how long rounded matrices are trained together."""

from pydantic import Field

from llmbuild.builder.recipe.section import Section


class Distillation(Section):
    """steps: of Adam, each with `batch` of `sequences` that are drawn as calibration's are."""

    steps: int = Field(ge=1, le=1_000_000, description="an integer from 1 to 1000000")
    batch: int = Field(default=8, ge=1, le=4096, description="an integer from 1 to 4096")
    sequences: int = Field(default=256, ge=1, le=65536, description="an integer from 1 to 65536")
