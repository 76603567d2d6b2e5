"""What every checkpoint reader provides, whatever the file format."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from numpy.typing import NDArray

from llmbuild.quant.grid import QuantisedMatrix, WeightGrid


@dataclass(frozen=True)
class TensorInfo:
    """A stored tensor before it is read. shape: row-major, [out, in] for a matrix; dtype: as
    stored, in the format's own spelling ("F32", "BF16", "I64", "Q4_1", ...). grid: of a matrix that
    is stored quantised on a grid of ours. by_rows: whether some rows can be read without the rest,
    because each lies in one piece."""

    shape: tuple[int, ...]
    dtype: str
    grid: WeightGrid | None = None
    by_rows: bool = True


class Checkpoint(Protocol):
    """A checkpoint that gives one tensor at a time.

    config: a Hugging Face style config.json; format: "safetensors" or "gguf", which says whose
    tensor names these are; tensors: everything stored, by the checkpoint's own names; notes: lines
    to tell whoever builds, of what is read otherwise than they may expect.
    """

    @property
    def config(self) -> dict[str, Any]: ...

    @property
    def format(self) -> str: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    @property
    def notes(self) -> tuple[str, ...]: ...

    def read(self, name: str) -> NDArray[Any]:
        """Tensor `name` (a key of `tensors`), row-major and owned by the caller.

        float32, float16 and ml_dtypes.bfloat16 come as stored, block-quantised types as float32.
        The bytes are read at their offset, never mapped, so that resident memory stays bounded
        by the tensors the caller holds. Raises CheckpointError for a dtype that isn't supported.
        """
        ...

    def read_rows(self, name: str, begin: int, end: int) -> NDArray[Any]:
        """read(name)[begin:end], along the first axis: no other row is read or held, unless the
        tensor isn't stored by rows. Raises as read does."""
        ...


@runtime_checkable
class StoresCodes(Protocol):
    """A checkpoint some of whose tensors have a grid."""

    def read_codes(self, name: str, rows: tuple[int, int] | None = None) -> QuantisedMatrix:
        """A tensor whose TensorInfo has a grid, as it is stored: nothing is rounded. rows: the
        first that is wanted, and the one after the last; all by default."""
        ...


@dataclass(frozen=True)
class TokenizerFiles:
    """A checkpoint's tokenizer in the form an engine carries it. tokenizer_json: for
    tokenizers.Tokenizer.from_str; add_bos: whether a prompt starts with bos_token_id."""

    tokenizer_json: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    add_bos: bool
    chat_template: str | None
