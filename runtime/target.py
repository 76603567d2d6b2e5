"""What an engine runs on, as its manifest has it: a record for each kind of target."""

from typing import Annotated, ClassVar

import msgspec

from llmbuild.runtime.record import Record

TARGET_KINDS = CPU, TENSORRT, TENSORRT_RTX = "cpu", "tensorrt", "tensorrt-rtx"

ALIGNMENT_BYTES = 256  # of every address that a plan is given

Capability = Annotated[str, msgspec.Meta(pattern=r"^[1-9][0-9]?\.[0-9]$")]


class CpuTarget(Record, frozen=True, tag_field="kind", tag=CPU):
    machine: str  # platform.machine() that the code runs on
    isa_levels: list[str]  # best first; each has its own executable
    compiler: str  # name and version
    compiler_flags: dict[str, list[str]]  # by ISA level

    variants_key: ClassVar[str] = "isa_levels"

    @property
    def variants(self) -> list[str]:
        """What each rank has an executable for."""
        return self.isa_levels

    def describe(self) -> str:
        return f"{CPU}, {self.machine}: {', '.join(self.isa_levels)}"


class TensorrtTarget(Record, frozen=True, tag_field="kind", tag=TENSORRT):
    """GPUs of one compute capability, by plans of TensorRT with our kernels in them."""

    version: str  # of TensorRT, which alone runs the plans
    capability: Capability  # of the GPU that they were built on

    variants_key: ClassVar[str] = "capability"

    @property
    def variants(self) -> list[str]:
        """What each rank has an executable for."""
        return [self.capability]

    def describe(self) -> str:
        return f"{TENSORRT} {self.version}: compute capability {self.capability}"


class RtxTarget(Record, frozen=True, tag_field="kind", tag=TENSORRT_RTX):
    """GPUs, by plans of TensorRT for RTX; a rank's plan is for all capabilities."""

    version: str  # of TensorRT for RTX, which alone runs the plans
    capabilities: list[Capability]  # compute capabilities, such as 8.9, ascending

    variants_key: ClassVar[str] = "capabilities"

    @property
    def variants(self) -> list[str]:
        """What each rank has an executable for."""
        return self.capabilities

    def describe(self) -> str:
        return f"{TENSORRT_RTX} {self.version}: compute capabilities {', '.join(self.capabilities)}"


Target = CpuTarget | TensorrtTarget | RtxTarget


class PlanTensor(Record, frozen=True):
    """An input or output of a plan. A size is a number, or the name of one that changes: of
    tensorrt-rtx B sequences, L tokens of each, T = B * L, R logits rows; of tensorrt S sequences
    and S + 1, T tokens of all together, B blocks of a sequence, R logits rows."""

    name: str
    dtype: str  # int32, fp16, bf16 or fp32, and int64 of an address
    shape: list[int | str]
    is_input: bool

    def describe(self) -> str:
        return f"{self.dtype} [{', '.join(map(str, self.shape))}]"
