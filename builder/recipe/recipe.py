"""The recipe: the only input of a build. Validated, completed, printed.

A default is cut to fit what is given beside it; a given value that contradicts is refused.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import (
    BeforeValidator,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from llmbuild.builder.recipe.calibration import DEFAULT_LENGTH, Calibration, ResolvedCalibration
from llmbuild.builder.recipe.distillation import (
    NOT_OF_FP8,
    NOTHING_TO_TRAIN,
    Distillation,
    ResolvedDistillation,
)
from llmbuild.builder.recipe.gate import Gate, ResolvedGate
from llmbuild.builder.recipe.kv_cache import KVCache, ResolvedKVCache
from llmbuild.builder.recipe.plan_file import PrecisionPlan, read_plan
from llmbuild.builder.recipe.problems import problem, problem_lines
from llmbuild.builder.recipe.quantisation import UNQUANTISED, Quantisation
from llmbuild.builder.recipe.section import Section, listed
from llmbuild.builder.recipe.target import PRECISIONS, Target
from llmbuild.builder.recipe.yaml_text import RecipeDumper, apply_overrides, read_recipe
from llmbuild.builder.sources import parse_source
from llmbuild.errors import RecipeError, SourceError
from llmbuild.quant.schemes import SCHEMES
from llmbuild.runtime import manifest
from llmbuild.runtime.target import CPU, TENSORRT, TENSORRT_RTX

DEFAULT_MAX_SEQUENCE_LENGTH = 2048
DEFAULT_MAX_STEP_TOKENS = 512
DEFAULT_MAX_SEQUENCES = 32
DEFAULT_BLOCK_SIZE = 16
DEFAULT_BUCKETS = (1, 2, 4, 8)
DEFAULT_TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}

DEFAULT_INT8_KV_TOLERANCE = 5e-2  # a tie may fall to either side
DEFAULT_COARSE_KV_TOLERANCE = 2e-1  # of int4, and FP8, whose next number may be an eighth further
DEFAULT_INT8_TOLERANCE = 1e-1  # where activations are rounded: a tie may fall to either side
# Activations of a GPU are rounded after every layer, and where they are int8 on tensorrt-rtx one
# scale is for all columns, so that a code is a larger step.
DEFAULT_GPU_TOLERANCE = {"fp16": 3e-2, "bf16": 1.5e-1}
DEFAULT_RTX_INT8_TOLERANCE = 2e-1
DEFAULT_FP8_TOLERANCE = 4e-1  # the next number may be an eighth further, not a step of 127

MAX_BUCKET = 64

Precision = Literal["fp32", "bf16", "fp16"]

R = TypeVar("R", bound="Recipe")


def _target(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


def _scheme(value: Any) -> Any:
    return {"scheme": value} if isinstance(value, str) else value


def _sha256(value: Any) -> str | dict[str, str] | None:
    if value is None:
        return None
    hashes = value if isinstance(value, dict) and value else {"file": value}
    for name, digest in hashes.items():
        parts = name.split("/") if isinstance(name, str) else [""]
        is_hash = isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest)
        if not is_hash or {"", ".", ".."} & set(parts):
            raise ValueError("not a SHA-256")
    checked: str | dict[str, str] = value
    return checked


class Model(Section):
    source: str = Field(description="path:DIRECTORY_OR_FILE, hf:... or pypi:...")
    sha256: Annotated[str | dict[str, str] | None, PlainValidator(_sha256)] = Field(
        default=None,
        description="64 lowercase hex digits, or for a directory a mapping of file name to such",
    )

    @field_validator("source")
    @classmethod
    def _source_is_well_formed(cls, source: str) -> str:
        try:
            parse_source(source)
        except SourceError as error:
            raise problem(str(error)) from error
        return source


class Limits(Section):
    max_sequence_length: int | None = Field(
        default=None, ge=1, description="an integer from 1 to the positions the model was made for"
    )
    max_step_tokens: int = Field(
        default=DEFAULT_MAX_STEP_TOKENS,
        ge=1,
        le=1 << 20,
        description="an integer from 1 to 1048576",
    )
    max_sequences: int | None = Field(
        default=None, ge=1, description="an integer from 1 to limits.max_step_tokens"
    )

    @field_validator("max_sequences")
    @classmethod
    def _every_sequence_fits_a_step(cls, given: int | None, info: ValidationInfo) -> int | None:
        max_step_tokens = info.data.get("max_step_tokens")
        if given is not None and max_step_tokens is not None and given > max_step_tokens:
            raise problem(f"at most limits.max_step_tokens, {max_step_tokens}, is allowed")
        return given

    @property
    def effective_max_sequences(self) -> int:
        """Sequences of one step: as given, or the default cut to the step's tokens."""
        return self.max_sequences or min(DEFAULT_MAX_SEQUENCES, self.max_step_tokens)


class Verify(Section):
    tolerance: float | None = Field(
        default=None, gt=0, le=1, allow_inf_nan=False, description="a number above 0, at most 1"
    )


class Parallel(Section):
    tp: int = Field(default=1, ge=1, description="an integer from 1 to the model's query heads")
    pp: int = Field(default=1, ge=1, description="an integer from 1 to the model's layers")

    @property
    def of_ranks(self) -> "manifest.Parallel":
        """The same, as the manifest has it."""
        return manifest.Parallel(tp=self.tp, pp=self.pp)


class Recipe(Section):
    """A recipe as written. None stands where the default follows from other keys or the model."""

    version: int = Field(ge=1, le=1, description="1")  # Literal[1] would take `true`
    name: str = Field(
        pattern=r"^[a-z0-9][a-z0-9._-]*$",
        description="text of a-z, 0-9, '.', '_' and '-' that starts with a letter or digit",
    )
    model: Model
    target: Annotated[Target, BeforeValidator(_target)] = Field(
        default=Target(),
        description="cpu, tensorrt, tensorrt-rtx, or a mapping with the keys kind, isa, "
        "capabilities",
    )
    precision: Precision = Field(
        description="fp32 or bf16 for cpu, fp16 or bf16 for tensorrt and tensorrt-rtx"
    )
    quantisation: Annotated[Quantisation, BeforeValidator(_scheme)] = Field(
        default=Quantisation(),
        description=f"a scheme ({UNQUANTISED}, {', '.join(SCHEMES)}), or a mapping with the keys "
        "scheme, group_size, symmetric, method, overrides, rotation",
    )
    parallel: Parallel = Parallel()
    limits: Limits = Limits()
    kv_cache: KVCache = KVCache()
    buckets: Annotated[tuple[int, ...] | None, BeforeValidator(listed)] = Field(
        default=None,
        description=f"a list of distinct integers from 1 to {MAX_BUCKET}, ascending from 1",
    )
    calibration: Calibration = Calibration()
    plan: str | None = Field(
        default=None,
        min_length=1,
        description="a file that `llmbuild plan` wrote, relative to the recipe's folder",
    )
    distillation: Distillation | None = None
    gate: Gate | None = None
    verify: Verify = Verify()

    @field_validator("precision")
    @classmethod
    def _target_has_the_precision(cls, precision: str, info: ValidationInfo) -> str:
        target: Target | None = info.data.get("target")
        if target and precision not in PRECISIONS[target.kind]:
            raise problem(f"{target.kind} has {' and '.join(PRECISIONS[target.kind])}")
        return precision

    @field_validator("quantisation")
    @classmethod
    def _target_has_the_schemes(
        cls, quantisation: Quantisation, info: ValidationInfo
    ) -> Quantisation:
        target: Target | None = info.data.get("target")
        if target:
            target.check_quantisation(quantisation, info.data.get("precision"))
        return quantisation

    @field_validator("kv_cache")
    @classmethod
    def _target_has_the_kv_cache(cls, kv_cache: KVCache, info: ValidationInfo) -> KVCache:
        """TensorRT for RTX has a linear KV cache: one block is a whole sequence."""
        target, limits = info.data.get("target"), info.data.get("limits")
        precision = info.data.get("precision")
        if not (target and limits and precision):
            return kv_cache
        if target.kind == CPU:
            kv_cache.check_fits_cpu()
        elif target.kind == TENSORRT:
            kv_cache.check_fits_tensorrt(precision)
        else:
            kv_cache.check_fits_rtx(precision, limits.max_sequence_length)
        return kv_cache

    @field_validator("gate")
    @classmethod
    def _target_runs_here(cls, gate: Gate | None, info: ValidationInfo) -> Gate | None:
        target: Target | None = info.data.get("target")
        if gate is not None and target and target.kind != CPU:
            raise problem(
                f"leave it out: a gate runs the engine where it is built, and {target.kind} doesn't"
            )
        return gate

    @field_validator("kv_cache")
    @classmethod
    def _block_fits_a_sequence(cls, kv_cache: KVCache, info: ValidationInfo) -> KVCache:
        limits: Limits | None = info.data.get("limits")
        if limits and limits.max_sequence_length and kv_cache.block_size:
            length = limits.max_sequence_length
            if kv_cache.block_size > length:
                text = f"at most limits.max_sequence_length, {length}, is allowed"
                raise problem(text, loc=("kv_cache", "block_size"))
        return kv_cache

    @field_validator("calibration")
    @classmethod
    def _calibration_fits_a_sequence(
        cls, calibration: Calibration, info: ValidationInfo
    ) -> Calibration:
        limits: Limits | None = info.data.get("limits")
        longest = limits and limits.max_sequence_length
        if longest and calibration.length and calibration.length > longest:
            text = f"at most limits.max_sequence_length, {longest}, is allowed"
            raise problem(text, loc=("calibration", "length"))
        return calibration

    @field_validator("distillation")
    @classmethod
    def _something_is_to_be_trained(
        cls, distillation: Distillation | None, info: ValidationInfo
    ) -> Distillation | None:
        """A plan may bring it."""
        quantisation: Quantisation | None = info.data.get("quantisation")
        has_plan = info.data.get("plan") is not None
        if distillation and quantisation and quantisation.has_fp8:
            raise problem(NOT_OF_FP8)
        if distillation and quantisation and not has_plan and not quantisation.calibrates:
            raise problem(NOTHING_TO_TRAIN)
        return distillation

    @field_validator("gate")
    @classmethod
    def _gate_fits_a_sequence(cls, gate: Gate | None, info: ValidationInfo) -> Gate | None:
        limits: Limits | None = info.data.get("limits")
        if gate and limits and limits.max_sequence_length:
            gate.check_fits(limits.max_sequence_length)
        return gate

    @field_validator("buckets")
    @classmethod
    def _buckets_fit_a_step(
        cls, buckets: tuple[int, ...] | None, info: ValidationInfo
    ) -> tuple[int, ...] | None:
        if buckets is None:
            return None
        ascending = all(a < b for a, b in pairwise(buckets))
        if not ascending or buckets[:1] != (1,) or buckets[-1] > MAX_BUCKET:
            raise ValueError("no buckets")
        limits: Limits | None = info.data.get("limits")
        if limits and buckets[-1] > limits.effective_max_sequences:
            cut = limits.effective_max_sequences == limits.max_step_tokens
            key = "max_step_tokens" if cut else "max_sequences"
            most = limits.effective_max_sequences
            raise problem(f"a bucket of at most limits.{key}, {most}, is allowed")
        return buckets

    def with_plan(self, plan: PrecisionPlan) -> "Recipe":
        """The recipe with the plan's overrides behind its own, which decide first. Raises
        RecipeError where they don't go together."""
        content = self.model_dump(exclude_none=True)
        chosen = {"quantisation": plan.quantisation, "kv_cache": plan.kv_cache}
        for name, overrides in chosen.items():
            more = [each.model_dump(exclude_none=True) for each in overrides]
            content[name]["overrides"] = [*content[name]["overrides"], *more]
        given = content.pop("plan", None)
        return _validated(Recipe, content, f"recipe {self.name} with its plan {given}")

    def resolve(self, max_position: int) -> "ResolvedRecipe":
        """The recipe with every default filled.

        max_position: token positions that the model was made for. RecipeError if the limits
        don't fit it.
        """
        length = self.limits.max_sequence_length
        if length is not None and length > max_position:
            raise RecipeError(
                f"recipe {self.name}:\n  limits.max_sequence_length: given {length}; the model was "
                f"made for {max_position} positions, so at most {max_position} is allowed"
            )
        length = length or min(DEFAULT_MAX_SEQUENCE_LENGTH, max_position)
        max_sequences = self.limits.effective_max_sequences
        content = self.model_dump()
        content["limits"] |= {"max_sequence_length": length, "max_sequences": max_sequences}
        content["target"] = self.target.resolved(self.quantisation)
        is_linear = self.target.kind == TENSORRT_RTX
        block_size = length if is_linear else min(DEFAULT_BLOCK_SIZE, length)
        content["kv_cache"] = self.kv_cache.resolved(self.precision, block_size)
        content["buckets"] = self.buckets or tuple(
            bucket for bucket in DEFAULT_BUCKETS if bucket <= max_sequences
        )
        content["quantisation"] = self.quantisation.resolved()
        content["calibration"] |= {"length": self.calibration.length or min(DEFAULT_LENGTH, length)}
        content["distillation"] = self.distillation and self.distillation.resolved()
        content["gate"] = self.gate and self.gate.resolved(length)
        content["verify"] = {"tolerance": self.verify.tolerance or self.usual_tolerance}
        return _validated(ResolvedRecipe, content, f"recipe {self.name}")

    @property
    def usual_tolerance(self) -> float:
        """What rounding in the recipe's precisions may cost: the default of verify.tolerance."""
        if self.quantisation.has_fp8:
            return DEFAULT_FP8_TOLERANCE
        if self.kv_cache.bits < 8 or self.kv_cache.has_fp8:
            return DEFAULT_COARSE_KV_TOLERANCE
        is_on_gpu = self.target.kind != CPU
        unrounded = (DEFAULT_GPU_TOLERANCE if is_on_gpu else DEFAULT_TOLERANCE)[self.precision]
        if self.quantisation.rounds_activations:
            is_rtx = self.target.kind == TENSORRT_RTX
            return max(unrounded, DEFAULT_RTX_INT8_TOLERANCE if is_rtx else DEFAULT_INT8_TOLERANCE)
        if self.kv_cache.bits == 8:
            return max(unrounded, DEFAULT_INT8_KV_TOLERANCE)
        return unrounded


class ResolvedLimits(Limits):
    max_sequence_length: int
    max_sequences: int


class ResolvedVerify(Verify):
    tolerance: float


class ResolvedRecipe(Recipe):
    """A recipe in which nothing is left open."""

    limits: ResolvedLimits
    kv_cache: ResolvedKVCache
    calibration: ResolvedCalibration
    distillation: ResolvedDistillation | None = None
    gate: ResolvedGate | None = None
    buckets: tuple[int, ...]
    verify: ResolvedVerify


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a YAML file, with `KEY.PATH=VALUE` overrides applied, and its plan's.

    Raises RecipeError, which lists every problem of the recipe, one a line.
    """
    content = read_recipe(path)
    apply_overrides(content, overrides)
    with_overrides = "".join(f" --set {override}" for override in overrides)
    recipe = _validated(Recipe, content, f"recipe {path}{with_overrides}")
    return recipe if recipe.plan is None else recipe.with_plan(read_plan(path.parent / recipe.plan))


def effective_yaml(resolved: ResolvedRecipe) -> str:
    """The recipe as YAML with every default written out; it loads and resolves to itself."""
    content = resolved.model_dump(mode="json", exclude_none=True)
    return yaml.dump(content, Dumper=RecipeDumper, sort_keys=False, allow_unicode=True)


def _validated(schema: type[R], content: dict[Any, Any], what: str) -> R:
    try:
        return schema.model_validate(content)
    except ValidationError as error:
        lines = problem_lines(error, schema, content)
        raise RecipeError("\n  ".join([f"{what}:", *lines])) from error
