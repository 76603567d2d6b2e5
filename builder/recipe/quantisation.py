"""The recipe's choice of weight precisions: a scheme, its grid, and overrides by tensor name."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from llmbuild.builder.recipe.problems import problem
from llmbuild.builder.recipe.section import Section, listed
from llmbuild.quant.grid import GROUP_UNIT
from llmbuild.quant.plan import METHODS, Method
from llmbuild.quant.schemes import SCHEMES

ROW: Literal["row"] = "row"
UNQUANTISED = "none"

DEFAULT_GROUP_SIZES: dict[int, int | Literal["row"]] = {4: 64, 8: ROW}  # by bits
FP8_ALLOWED: dict[str, tuple[str | bool, ...]] = {
    "group_size": (ROW,),
    "symmetric": (True,),
    "method": ("rtn", "smoothquant"),
}


class Precisions(Section):
    """A scheme and its grid."""

    scheme: str = Field(default=UNQUANTISED, description=f"{UNQUANTISED}, {', '.join(SCHEMES)}")
    group_size: Annotated[int, Field(ge=GROUP_UNIT)] | Literal["row"] | None = Field(
        default=None, description=f"a multiple of {GROUP_UNIT}, or {ROW}"
    )
    symmetric: bool | None = Field(default=None, description="true or false")
    method: Method | None = Field(default=None, description=", ".join(METHODS))

    @field_validator("scheme")
    @classmethod
    def _scheme_exists(cls, scheme: str) -> str:
        if scheme != UNQUANTISED and scheme not in SCHEMES:
            raise ValueError("no scheme")
        return scheme

    @field_validator("group_size")
    @classmethod
    def _groups_are_whole_units(cls, size: Any) -> Any:
        if isinstance(size, int) and size % GROUP_UNIT:
            raise ValueError("no multiple")
        return size

    @field_validator("group_size", "symmetric", "method")
    @classmethod
    def _scheme_has_a_grid(cls, given: Any, info: ValidationInfo) -> Any:
        scheme = info.data.get("scheme")
        if given is not None and scheme is not None and not _weight_bits(scheme):
            raise problem(f"the scheme {scheme} has no grid to choose, so leave it out")
        return given

    @field_validator("group_size", "symmetric", "method")
    @classmethod
    def _fp8_fits_its_grid(cls, given: Any, info: ValidationInfo) -> Any:
        scheme, key = info.data.get("scheme"), str(info.field_name)
        if given is not None and _is_fp8(scheme) and given not in FP8_ALLOWED[key]:
            allowed = " or ".join(map(str, FP8_ALLOWED[key])).lower()
            raise problem(f"{scheme} has {key} {allowed}: choose that, or leave it out")
        return given

    @field_validator("method")
    @classmethod
    def _smoothing_is_of_rounded_activations(cls, method: Any, info: ValidationInfo) -> Any:
        scheme = info.data.get("scheme")
        is_idle = scheme in SCHEMES and not SCHEMES[scheme].rounds_activations
        if method == "smoothquant" and is_idle:
            raise problem(
                f"it evens activations before they are rounded, and {scheme} leaves them as they "
                "are: choose rtn, gptq or awq"
            )
        return method

    @property
    def rounds_activations(self) -> bool:
        return self.scheme != UNQUANTISED and SCHEMES[self.scheme].rounds_activations

    @property
    def is_fp8(self) -> bool:
        return _is_fp8(self.scheme)

    def resolved(self) -> dict[str, Any]:
        """As written, with the grid's defaults filled."""
        content = self.model_dump(exclude_none=True)
        bits = _weight_bits(self.scheme)
        if bits is not None:
            content.setdefault("group_size", DEFAULT_GROUP_SIZES[bits])
            content.setdefault("symmetric", True)
            content.setdefault("method", _default_method(self.scheme, bits))
        return content


class Override(Precisions):
    match: str
    scheme: str  # has to be given

    def resolved(self) -> dict[str, Any]:
        return {"match": self.match, **super().resolved()}


class Quantisation(Precisions):
    overrides: Annotated[tuple[Override, ...], BeforeValidator(listed)] = Field(
        default=(),
        description="a list of mappings with the keys match (a glob of tensor names) and scheme, "
        "and where the scheme has a grid group_size, symmetric, method",
    )

    rotation: bool = Field(default=False, description="true or false")

    @field_validator("rotation")
    @classmethod
    def _no_stored_codes_are_rotated(cls, rotation: bool, info: ValidationInfo) -> bool:
        schemes = [info.data.get("scheme"), *(o.scheme for o in info.data.get("overrides", ()))]
        stored = [each for each in schemes if each in SCHEMES and not SCHEMES[each].weight_bits]
        if rotation and stored:
            raise problem(
                f"{stored[0]} keeps the checkpoint's own codes, which can't be rotated: choose "
                "another scheme, or leave rotation out"
            )
        return rotation

    @property
    def quantises(self) -> bool:
        """Whether any matrix is to be."""
        return any(each.scheme != UNQUANTISED for each in (self, *self.overrides))

    @property
    def rounds_activations(self) -> bool:
        return super().rounds_activations or any(o.rounds_activations for o in self.overrides)

    @property
    def has_fp8(self) -> bool:
        """Whether any matrix could be FP8."""
        return self.is_fp8 or any(override.is_fp8 for override in self.overrides)

    @property
    def calibrates(self) -> bool:
        """Whether any matrix could be rounded with regard to its inputs."""
        every = (super().resolved(), *(override.resolved() for override in self.overrides))
        return any(each.get("method", "rtn") != "rtn" for each in every)

    def resolved(self) -> dict[str, Any]:
        return super().resolved() | {"overrides": [o.resolved() for o in self.overrides]}


def _weight_bits(scheme: str) -> int | None:
    return None if scheme == UNQUANTISED else SCHEMES[scheme].weight_bits


def _is_fp8(scheme: str | None) -> bool:
    return scheme in SCHEMES and SCHEMES[scheme].is_fp8


def _default_method(scheme: str, bits: int) -> Method:
    """FP8's steps follow each number's size, so that columns needn't be evened."""
    if SCHEMES[scheme].static_activations and not _is_fp8(scheme):
        return "smoothquant"
    return "gptq" if bits == 4 else "rtn"
