"""The recipe's target: what the engine runs on, and what else of a recipe fits it."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from llmbuild.builder.recipe.problems import problem
from llmbuild.builder.recipe.quantisation import ROW, UNQUANTISED, Precisions, Quantisation
from llmbuild.builder.recipe.section import Section, listed
from llmbuild.builder.targets.gpu.capabilities import CAPABILITIES as KERNELS
from llmbuild.quant.schemes import SCHEMES as ALL_SCHEMES
from llmbuild.runtime.isa import LEVELS
from llmbuild.runtime.plan_header import CAPABILITY_BITS
from llmbuild.runtime.target import CPU, TENSORRT, TENSORRT_RTX

NATIVE = "native"  # the best level, or the GPU, of the machine that builds

# By target. TensorRT builds for the GPU at hand alone, with the kernels that we have.
CAPABILITIES = {
    TENSORRT: (NATIVE, *(f"{sm // 10}.{sm % 10}" for sm in KERNELS)),
    TENSORRT_RTX: tuple(CAPABILITY_BITS),
}
DEFAULT_CAPABILITIES = {TENSORRT: (NATIVE,), TENSORRT_RTX: ("8.0", "8.6", "8.9", "12.0")}
FIRST_FP8_CAPABILITY = 8.9  # whose tensor cores multiply FP8

# By target: of GPUs, what kernels and native layers have.
PRECISIONS = {CPU: ("fp32", "bf16"), TENSORRT: ("fp16", "bf16"), TENSORRT_RTX: ("fp16", "bf16")}
SCHEMES = {
    CPU: (UNQUANTISED, *(name for name, scheme in ALL_SCHEMES.items() if not scheme.is_fp8)),
    TENSORRT: (UNQUANTISED, *ALL_SCHEMES),
    TENSORRT_RTX: (UNQUANTISED, "w4a16", "w8a16", "w8a8-static", "fp8_w8a8"),
}
INT4_GROUP_SIZES = range(32, 193, 32)  # wider ones build no fused kernel


def _levels(value: Any) -> Any:
    return (value,) if isinstance(value, str) else listed(value)


def _capabilities(value: Any) -> Any:
    """YAML reads 8.9 as a number."""
    if isinstance(value, dict):
        return value
    values = value if isinstance(value, list | tuple) else [value]
    return tuple(str(each) if isinstance(each, float) else each for each in values)


class Target(Section):
    kind: Literal["cpu", "tensorrt", "tensorrt-rtx"] = Field(
        default="cpu", description="cpu, tensorrt or tensorrt-rtx"
    )
    isa: Annotated[tuple[str, ...] | None, BeforeValidator(_levels)] = Field(
        default=None,
        description=f"{NATIVE}, a level, or a list of levels: {', '.join(LEVELS)}",
    )
    capabilities: Annotated[tuple[str, ...] | None, BeforeValidator(_capabilities)] = Field(
        default=None,
        description="a compute capability or a list of them, such as 8.9; of tensorrt one, or "
        f"{NATIVE}",
    )

    @field_validator("isa")
    @classmethod
    def _levels_are_of_one_machine(
        cls, levels: tuple[str, ...] | None, info: ValidationInfo
    ) -> tuple[str, ...] | None:
        if levels is None:
            return None
        _refuse_unless((CPU,), info)
        if levels == (NATIVE,):
            return levels
        if not levels or not set(levels) <= LEVELS.keys():
            raise ValueError("no levels")
        if len(set(levels)) < len(levels):
            raise problem("each level may stand once")
        if len({LEVELS[level].machine for level in levels}) > 1:
            raise problem("an engine runs on one kind of machine: list x86-64 levels or aarch64")
        return levels

    @field_validator("capabilities")
    @classmethod
    def _capabilities_exist(
        cls, capabilities: tuple[str, ...] | None, info: ValidationInfo
    ) -> tuple[str, ...] | None:
        if capabilities is None:
            return None
        _refuse_unless(tuple(CAPABILITIES), info)
        kind = info.data.get("kind")
        if kind is None:
            return capabilities
        known = CAPABILITIES[kind]
        if not capabilities or not set(capabilities) <= {*known}:
            raise problem(f"{kind} has {', '.join(known)}")
        if len(set(capabilities)) < len(capabilities):
            raise problem("each compute capability may stand once")
        if kind == TENSORRT and len(capabilities) > 1:
            raise problem(f"give one: a plan of {TENSORRT} is for the GPU that it is built on")
        return tuple(sorted(capabilities, key=known.index))

    def resolved(self, quantisation: Quantisation) -> dict[str, Any]:
        """As written, with the defaults of its kind filled, those that have what is chosen."""
        content = self.model_dump(exclude_none=True)
        if self.kind == CPU:
            content.setdefault("isa", (NATIVE,))
        else:
            default = DEFAULT_CAPABILITIES[self.kind]
            able = tuple(filter(may_have_fp8, default)) if quantisation.has_fp8 else default
            content.setdefault("capabilities", able)
        return content

    def check_quantisation(self, quantisation: Quantisation, precision: str | None) -> None:
        """Raises the problem of a scheme, or a grid, that the target hasn't."""
        for chosen in (quantisation, *quantisation.overrides):
            lack = self._lack(chosen, precision)
            if lack is not None:
                raise problem(f"on {self.kind} {lack}")
            if chosen.is_fp8 and not all(map(may_have_fp8, self.capabilities or ())):
                able = ", ".join(filter(may_have_fp8, CAPABILITIES[self.kind]))
                text = f"{chosen.scheme} needs one of {able}; leave the others out"
                raise problem(text, loc=("target", "capabilities"))

    def _lack(self, chosen: Precisions, precision: str | None) -> str | None:
        """Why the target can't have weights of these precisions, where it can't."""
        known = SCHEMES[self.kind]
        if chosen.scheme not in known:
            others = [kind for kind, schemes in SCHEMES.items() if chosen.scheme in schemes]
            return (
                f"there are {', '.join(known)}, not {chosen.scheme}; choose one of these, or "
                f"target {' or '.join(others)}"
            )
        return _rtx_lack(chosen, precision) if self.kind == TENSORRT_RTX else None


def may_have_fp8(capability: str) -> bool:
    """Whether a compute capability, such as 8.9, has FP8; what NATIVE is shows at the build."""
    return capability == NATIVE or float(capability) >= FIRST_FP8_CAPABILITY


def _rtx_lack(chosen: Precisions, precision: str | None) -> str | None:
    if chosen.symmetric is False:
        return "grids are symmetric"
    if chosen.scheme == "w4a16":
        if precision == "bf16":
            return "w4a16 needs precision fp16"
        if chosen.group_size is not None and chosen.group_size not in INT4_GROUP_SIZES:
            allowed = ", ".join(map(str, INT4_GROUP_SIZES))
            return f"the groups of w4a16 have {allowed} columns, not {chosen.group_size}"
    elif chosen.group_size not in (None, ROW):
        return f"int8 weights have a group a row, not one of {chosen.group_size}"
    return None


def _refuse_unless(kinds: tuple[str, ...], info: ValidationInfo) -> None:
    given = info.data.get("kind")
    if given is not None and given not in kinds:
        raise problem(f"leave it out: it is for target {' and '.join(kinds)}, and this is {given}")
