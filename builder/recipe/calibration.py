"""The recipe's calibration: the tokens by which quantisation judges what matters."""

from pydantic import Field

from llmbuild.builder.recipe.section import Section

SELF = "self"  # the model's own samples
DEFAULT_LENGTH = 512


class Calibration(Section):
    """data: SELF or a file. length: tokens of a sequence, cut by default to the model's longest."""

    data: str = Field(
        default=SELF,
        min_length=1,
        description=f"{SELF} (the model's own samples), or a .txt or .jsonl file, relative to the "
        "recipe's folder",
    )
    sequences: int = Field(default=32, ge=1, le=4096, description="an integer from 1 to 4096")
    length: int | None = Field(
        default=None, ge=1, description="an integer from 1 to limits.max_sequence_length"
    )
    seed: int = Field(default=0, ge=0, lt=1 << 32, description="an integer from 0 to 4294967295")


class ResolvedCalibration(Calibration):
    length: int
