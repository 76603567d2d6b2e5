"""The recipe's KV cache: a precision, and overrides for layers, for K or V, and for KV heads."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from llmbuild.builder.recipe.problems import problem
from llmbuild.builder.recipe.section import Section, listed

KVDtype = Literal["fp32", "bf16", "fp16", "int8", "int8-static", "fp8", "int4"]
_BITS: dict[str | None, int] = {"int8": 8, "int8-static": 8, "fp8": 8, "int4": 4}
MAX_BLOCK_SIZE = 256
TENSORRT_DTYPES = ("int8", "int8-static", "fp8", "int4")  # and `precision`
_CPU_DTYPES = "fp32, bf16, int8, int8-static or int4"
_DTYPES = f"{_CPU_DTYPES}; with tensorrt `precision`, {', '.join(TENSORRT_DTYPES)}"


class KVOverride(Section):
    """match: a glob of names layers.L.k.H and layers.L.v.H, of layer L and KV head H."""

    match: str
    dtype: KVDtype = Field(description=_DTYPES)


class KVCache(Section):
    dtype: KVDtype | None = Field(default=None, description=_DTYPES)
    block_size: int | None = Field(
        default=None, ge=1, description=f"an integer from 1 to {MAX_BLOCK_SIZE}"
    )
    overrides: Annotated[tuple[KVOverride, ...], BeforeValidator(listed)] = Field(
        default=(),
        description="a list of mappings with the keys match (a glob of names such as layers.0.k.1: "
        f"layer, k or v, KV head) and dtype ({_DTYPES})",
    )

    @property
    def has_fp8(self) -> bool:
        """Whether any of it is FP8."""
        return "fp8" in self._dtypes

    @property
    def bits(self) -> int:
        """Of an item, the fewest that are asked for; 16 where nothing has less."""
        return min(_BITS.get(dtype, 16) for dtype in self._dtypes)

    def check_fits_cpu(self) -> None:
        """Raises a problem, for a recipe's validator, of what the cpu target hasn't."""
        wrong = self._dtypes & {"fp16", "fp8"}
        if wrong:
            raise problem(f"cpu has {_CPU_DTYPES}", loc=self._place_of(wrong))
        self._check_block_size()

    def check_fits_tensorrt(self, precision: str) -> None:
        """The same of tensorrt, whose KV cache is what its kernels read and write."""
        allowed = (precision, *TENSORRT_DTYPES)
        wrong = self._dtypes - {None, *allowed}
        if wrong:
            text = f"tensorrt has {', '.join(allowed)} with precision {precision}"
            raise problem(text, loc=self._place_of(wrong))
        self._check_block_size()

    def check_fits_rtx(self, precision: str, max_sequence_length: int | None) -> None:
        """The same of tensorrt-rtx, whose KV cache is linear: a block is a whole sequence."""
        if self.dtype not in (None, precision):
            text = f"tensorrt-rtx keeps the KV cache in `precision`, {precision}"
            raise problem(text, loc=("kv_cache", "dtype"))
        if self.overrides:
            text = "leave it out: tensorrt-rtx keeps the whole KV cache in `precision`"
            raise problem(text, loc=("kv_cache", "overrides"))
        if self.block_size is not None and self.block_size != max_sequence_length:
            text = "leave it out: tensorrt-rtx has one block a sequence, as long as that may get"
            raise problem(text, loc=("kv_cache", "block_size"))

    def _place_of(self, dtypes: set[str | None]) -> tuple[str, str]:
        """The key that asks for one of these."""
        return "kv_cache", "dtype" if self.dtype in dtypes else "overrides"

    @property
    def _dtypes(self) -> set[str | None]:
        return {self.dtype, *(override.dtype for override in self.overrides)}

    def _check_block_size(self) -> None:
        if self.block_size and self.block_size > MAX_BLOCK_SIZE:
            text = f"allowed: an integer from 1 to {MAX_BLOCK_SIZE}"
            raise problem(text, loc=("kv_cache", "block_size"))

    def resolved(self, dtype: str, block_size: int) -> dict[str, Any]:
        """As written, with the defaults given filled in."""
        content = self.model_dump()
        content["dtype"] = self.dtype or dtype
        content["block_size"] = self.block_size or block_size
        return content


class ResolvedKVCache(KVCache):
    dtype: KVDtype
    block_size: int
