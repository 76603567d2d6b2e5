"""What quantised weights are stored as, of those that GPU kernels are built for."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class WeightFormat:
    """See plugins/common/weight_triton.py. group: columns that share a scale, 0 for the row."""

    numbers: Literal["int4", "int8", "e4m3"]
    group: int
    offsets: Literal["", "minima", "zeros"] = ""  # what a group has besides its scale

    @property
    def bits(self) -> int:
        return 4 if self.numbers == "int4" else 8

    @property
    def name(self) -> str:
        """For a variant's name, such as "int4.g64.minima"."""
        return ".".join(filter(None, (self.numbers, f"g{self.group or 'row'}", self.offsets)))

    @property
    def constants(self) -> dict[str, int]:
        return {"BITS": self.bits, "GROUP": self.group}

    def types(self, sm: int) -> dict[str, str | None]:
        """Of the tensors; e4m3 is decoded by the kernel where an SM has no such conversion."""
        e4m3 = "*fp8e4nv" if sm >= 89 else "*u8"
        return {
            "codes": {"int4": "*u8", "int8": "*i8", "e4m3": e4m3}[self.numbers],
            "scales": "*fp32" if self.numbers == "e4m3" else "*fp16",
            "minima": "*fp16" if self.offsets == "minima" else None,
            "zeros": "*i8" if self.offsets == "zeros" else None,
        }

    def bytes_of(self, columns: str) -> str:
        """Of a row with so many columns."""
        scale_bytes = (4 if self.numbers == "e4m3" else 2) + {"": 0, "minima": 2, "zeros": 1}[
            self.offsets
        ]
        groups = f"{columns} / {self.group}" if self.group else "1"
        return f"{columns} * {self.bits} / 8 + {groups} * {scale_bytes}"


# The recipe's defaults.
INT4 = WeightFormat("int4", 64)
INT8 = WeightFormat("int8", 0)

# Those of checkpoints that are quantised already.
Q4_0 = WeightFormat("int4", 32)
Q4_1 = WeightFormat("int4", 32, "minima")
Q8_0 = WeightFormat("int8", 32)
INT4_128_ZEROS = WeightFormat("int4", 128, "zeros")  # GPTQ and AWQ
E4M3 = WeightFormat("e4m3", 0)
