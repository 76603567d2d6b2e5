"""GPTQ checkpoints, as AutoGPTQ and GPTQModel write them.

A linear X is X.qweight, int32 [in * bits / 32, out], X.qzeros, int32 [groups, out * bits / 32],
X.scales [groups, out] and X.g_idx, int32 [in], the group of each column. Zero points are stored
less one in format `gptq` (v1), and as they are in `gptq_v2`.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmbuild.builder.checkpoint.quantisation_section import Section
from llmbuild.builder.checkpoint.safetensors import SafetensorsCheckpoint
from llmbuild.builder.checkpoint.stored_matrix import (
    FLOATS,
    Parts,
    StoredMatrix,
    transposed,
    unpack,
)
from llmbuild.errors import CheckpointError

WEIGHT = "qweight"
_INDEX = "g_idx"
# Keys of how the codes were found, and of how other programs run them.
_CARRY_NOTHING = frozenset(
    {
        *("quant_method", "method", "quantizer", "meta", "version", "lm_head", "dataset"),
        *("damp_percent", "damp_auto_increment", "true_sequential", "static_groups", "mse"),
        *("desc_act", "act_group_aware", "model_name_or_path", "model_file_base_name"),
        *("tokenizer", "batch_size", "pad_token_id", "model_seqlen", "cache_block_outputs"),
        *("block_name_to_quantize", "module_name_preceding_first_block"),
        *("modules_in_block_to_quantize", "modules_to_not_convert", "modules_not_to_convert"),
        *("use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config", "backend"),
        *("max_input_length", "parallel_packing", "awq_gemm_checkpoint", "use_cuda_kernel"),
    }
)


def find_gptq(checkpoint: SafetensorsCheckpoint, raw: object) -> list[StoredMatrix]:
    """The quantised linears of a checkpoint, by its quantization_config."""
    section = Section(raw, "quantization_config")
    bits = section.one_of("bits", [4, 8])
    group_size = section.group_size("group_size")
    # Zero points are stored either way, so not knowing costs memory and no precision.
    symmetric = section.one_of("sym", [True, False], default=False)
    key = "checkpoint_format" if "checkpoint_format" in section else "format"
    version = section.one_of(key, ["gptq", "gptq_v2"], default="gptq")
    section.one_of("format", [version], default=version)
    section.one_of("is_marlin_format", [False], default=False)
    section.one_of("pack_dtype", ["int32"], default="int32")
    dynamic = section.take("dynamic", {})
    if not isinstance(dynamic, dict) or any(dynamic[k] for k in dynamic if k[:2] != "-:"):
        section.refuse(
            "dynamic", dynamic, "only rules that leave modules out, '-:...', can be read"
        )
    section.finish(_CARRY_NOTHING)
    modules = [n.removesuffix(f".{WEIGHT}") for n in checkpoint.tensors if n.endswith(f".{WEIGHT}")]
    return [
        GptqMatrix(Parts(checkpoint, module), bits, group_size, symmetric, version == "gptq")
        for module in modules
    ]


class GptqMatrix(StoredMatrix):
    """less_one: of format v1."""

    scale_part = "scales"

    def __init__(
        self, parts: Parts, bits: int, group_size: int, symmetric: bool, less_one: bool
    ) -> None:
        self.parts, self.bits, self.symmetric, self._less_one = parts, bits, symmetric, less_one
        words, rows = parts.info(WEIGHT, ["I32"]).shape
        columns = words * 32 // bits
        self.shape = (rows, columns)
        self.group_size = 0 if group_size >= columns else group_size
        if rows * bits % 32:
            raise CheckpointError(
                f"{parts.name(WEIGHT)} has {rows} outputs; in this format they must be a multiple "
                f"of {32 // bits}"
            )
        parts.check("scales", FLOATS, (self.groups, rows))
        parts.check("qzeros", ["I32"], (self.groups, rows * bits // 32))
        if _INDEX in parts:
            parts.check(_INDEX, ["I32"], (columns,))

    def names(self) -> list[str]:
        names = [WEIGHT, "scales", "qzeros", _INDEX]
        return [self.parts.name(part) for part in names if part in self.parts]

    def codes(self) -> NDArray[np.uint8]:
        return transposed(unpack(self.parts.read(WEIGHT), self.bits, axis=0))

    def scales(self) -> NDArray[Any]:
        return transposed(self.parts.read(self.scale_part))

    def stored_zeros(self) -> NDArray[np.uint8]:
        words = self.parts.read("qzeros").view(np.uint32)
        if self._less_one:
            # One is added to whole words, with its carry: so GPTQModel takes it off, and a zero
            # point of 0 comes back.
            words = words + np.uint32(0x11111111 if self.bits == 4 else 0x01010101)
        return transposed(unpack(words, self.bits, axis=1))

    def group_index(self) -> NDArray[np.integer[Any]] | None:
        if _INDEX not in self.parts:
            return None
        index = self.parts.read(_INDEX)
        if index.min() < 0 or index.max() >= self.groups:
            raise CheckpointError(
                f"{self.parts.name(_INDEX)} has groups from {index.min()} to {index.max()}; there "
                f"are {self.groups}, counted from 0"
            )
        return index
