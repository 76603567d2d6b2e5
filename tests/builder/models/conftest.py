"""Saved models as checkpoints in memory, and as GGUF files."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file


class StoredTensor(NamedTuple):
    shape: tuple[int, ...]
    dtype: str
    grid: None = None
    by_rows: bool = True


@dataclass
class MemoryCheckpoint:
    """A checkpoint held in a dict, to take from and add to."""

    config: dict[str, Any]
    stored: dict[str, np.ndarray]
    format: str = "safetensors"
    notes: tuple[str, ...] = ()
    reads: list[str] = field(default_factory=list)
    row_reads: list[tuple[str, int, int]] = field(default_factory=list)

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        return {name: StoredTensor(t.shape, "F32") for name, t in self.stored.items()}

    def read(self, name: str) -> np.ndarray:
        self.reads.append(name)
        return self.stored[name]

    def read_rows(self, name: str, begin: int, end: int) -> np.ndarray:
        self.row_reads.append((name, begin, end))
        return self.stored[name][begin:end]


@pytest.fixture
def in_memory() -> Callable[[Any], MemoryCheckpoint]:
    """What a saved model's files hold, as a checkpoint that a test can alter."""

    def load(saved: Any) -> MemoryCheckpoint:
        return MemoryCheckpoint(saved.config, load_file(saved.path / "model.safetensors"))

    return load


@dataclass(frozen=True)
class GgufForm:
    """How llama.cpp's converter writes a family beside what it writes of all. keys: metadata key
    -> attribute of transformers' config; constants: metadata of its own; permuted: rows of Q and
    K in rotary pairs; adds_one: norms as 1 + w; reshape: stored name and tensor -> those of the
    file, where they aren't one to one."""

    arch: str
    keys: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    permuted: bool = False
    adds_one: bool = False
    reshape: "Callable[[str, np.ndarray, Any], Iterator[tuple[str, np.ndarray]]] | None" = None


def _gpt2(name: str, tensor: np.ndarray, _: Any) -> Iterator[tuple[str, np.ndarray]]:
    is_linear = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
    yield name, tensor.T if is_linear else tensor


def _gpt_neox(name: str, tensor: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    if "query_key_value" in name:
        heads = tensor.reshape(config.num_attention_heads, 3, -1, *tensor.shape[1:])
        tensor = heads.swapaxes(0, 1).reshape(tensor.shape)
    yield name, tensor


def _granitemoe(name: str, tensor: np.ndarray, _: Any) -> Iterator[tuple[str, np.ndarray]]:
    if "input_linear" not in name:
        yield name, tensor
        return
    layer, kind = name.split(".")[2], "shexp" if "shared_mlp" in name else "exps"
    for half, part in zip(("gate", "up"), np.split(tensor, 2, axis=-2), strict=True):
        yield f"blk.{layer}.ffn_{half}_{kind}.weight", part


_RMS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_HEAD = {"attention.key_length": "head_dim", "attention.value_length": "head_dim"}
_LLAMA = _RMS | _HEAD | {"rope.dimension_count": "head_dim", "vocab_size": "vocab_size"}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_EXPERTS = {"expert_used_count": "num_experts_per_tok"}
_CAPS = {f"{kind}_logit_softcapping": f"{kind}_logit_softcapping" for kind in ("attn", "final")}
_LAYER_EPS = "attention.layer_norm_epsilon"
_GRANITE = _LLAMA | {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_NO_SCALING = {"rope.scaling.type": "none"}
_MIXTRAL = _EXPERTS | {"expert_count": "num_local_experts"}
_QWEN_MOE = _RMS | _HEAD | _EXPERTS | {"expert_feed_forward_length": "moe_intermediate_size"}
_SHARED = "expert_shared_feed_forward_length"

GGUF_FORMS = {
    "llama": GgufForm("llama", _LLAMA, permuted=True),
    "exaone": GgufForm("exaone", _LLAMA),
    "internlm2": GgufForm("internlm2", _RMS, permuted=True),
    "mixtral": GgufForm("llama", _LLAMA | _MIXTRAL, permuted=True),
    "qwen2": GgufForm("qwen2", _RMS | _HEAD),
    "qwen3": GgufForm("qwen3", _RMS | _HEAD),
    "qwen2_moe": GgufForm(
        "qwen2moe",
        _QWEN_MOE | {"expert_count": "num_experts", _SHARED: "shared_expert_intermediate_size"},
    ),
    "qwen3_moe": GgufForm("qwen3moe", _QWEN_MOE | {"expert_count": "num_experts"}),
    "olmoe": GgufForm("olmoe", _RMS | _HEAD | _EXPERTS | {"expert_count": "num_experts"}),
    "gemma": GgufForm("gemma", _RMS | _HEAD, adds_one=True),
    "gemma2": GgufForm("gemma2", _RMS | _HEAD | _WINDOW | _CAPS, adds_one=True),
    "gemma3_text": GgufForm("gemma3", _RMS | _HEAD | _WINDOW, adds_one=True),
    "phi3": GgufForm("phi3", _RMS | _WINDOW),
    "granite": GgufForm("granite", _GRANITE, permuted=True),
    "granitemoe": GgufForm("granitemoe", _GRANITE | _MIXTRAL, permuted=True, reshape=_granitemoe),
    "granitemoeshared": GgufForm(
        "granitemoe",
        _GRANITE | _MIXTRAL | {_SHARED: "shared_intermediate_size"},
        permuted=True,
        reshape=_granitemoe,
    ),
    "olmo2": GgufForm("olmo2", _RMS | _HEAD),
    "olmo3": GgufForm("olmo2", _RMS | _HEAD | _WINDOW),
    "smollm3": GgufForm("smollm3", _LLAMA, permuted=True),
    "cohere": GgufForm(
        "command-r",
        _HEAD | {_LAYER_EPS: "layer_norm_eps", "logit_scale": "logit_scale"},
        _NO_SCALING,
    ),
    "cohere2": GgufForm(
        "cohere2",
        _HEAD | _WINDOW | {_LAYER_EPS: "layer_norm_eps", "logit_scale": "logit_scale"},
        _NO_SCALING,
    ),
    "starcoder2": GgufForm("starcoder2", _HEAD | {_LAYER_EPS: "norm_epsilon"}),
    "gpt_neox": GgufForm(
        "gptneox",
        {_LAYER_EPS: "layer_norm_eps", "use_parallel_residual": "use_parallel_residual"},
        reshape=_gpt_neox,
    ),
    "gpt2": GgufForm("gpt2", {_LAYER_EPS: "layer_norm_epsilon"}, reshape=_gpt2),
    "exaone4": GgufForm("exaone4", _RMS | _HEAD | _WINDOW),
    "seed_oss": GgufForm("seed_oss", _RMS | _HEAD),
}


def pairs_from_halves(tensor: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows as a llama-arch GGUF stores them: element i of a head beside element i + D/2."""
    rows = []
    for head in range(len(tensor) // head_dim):
        for i in range(head_dim // 2):
            rows += [tensor[head * head_dim + i], tensor[head * head_dim + i + head_dim // 2]]
    return np.stack(rows)


def llama3_divisors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """rope_freqs.weight of a llama3 scaling, in float64."""
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    divisors = []
    for i in range(head_dim // 2):
        turns = original * rope["rope_theta"] ** (-2 * i / head_dim) / (2 * np.pi)
        blend = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - blend) / factor + blend))
    return np.array(divisors, np.float32)


def _metadata(saved: Any, form: GgufForm) -> dict[str, Any]:
    config = saved.model.config
    is_gpt2 = config.model_type == "gpt2"
    inner = config.n_inner if is_gpt2 else config.intermediate_size
    values = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": inner or 4 * config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        **({"attention.head_count_kv": heads} if (heads := _kv_heads(config)) else {}),
        **{key: getattr(config, attribute) for key, attribute in form.keys.items()},
        **form.constants,
    }
    if "attention.sliding_window" in form.keys and form.arch in ("olmo2", "exaone4"):
        values["attention.sliding_window_pattern"] = [
            kind == "sliding_attention" for kind in config.layer_types
        ]
    values |= _rope_metadata(saved, form, values)
    return {key: value for key, value in values.items() if value is not None}


def _kv_heads(config: Any) -> int | None:
    return getattr(config, "num_key_value_heads", None)


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _rope_metadata(saved: Any, form: GgufForm, values: Mapping[str, Any]) -> dict[str, Any]:
    stated = saved.config.get("rope_parameters")
    if stated is None:
        return {}
    rope = stated.get("full_attention", stated)
    result = {"rope.freq_base": rope["rope_theta"]}
    if form.arch in ("gemma3",):
        result["rope.freq_base_swa"] = stated["sliding_attention"]["rope_theta"]
    if form.arch in ("phi3", "gptneox"):
        part = rope.get("partial_rotary_factor", 1.0)
        result["rope.dimension_count"] = int(part * _head_dim(saved.model.config))
    if form.arch == "phi3":
        original = rope.get("original_max_position_embeddings", values["context_length"])
        result["rope.scaling.original_context_length"] = original
    if rope["rope_type"] in ("linear", "yarn"):
        result["rope.scaling.type"] = rope["rope_type"]
        result["rope.scaling.factor"] = rope["factor"]
    if rope["rope_type"] == "yarn":
        original = rope["original_max_position_embeddings"]
        result["rope.scaling.original_context_length"] = original
    if rope["rope_type"] == "longrope":
        scale = values["context_length"] / original
        result["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(scale) / math.log(original))
    return result


def _gguf_tensors(saved: Any, form: GgufForm) -> Iterator[tuple[str, np.ndarray]]:
    config, head_dim = saved.model.config, _head_dim(saved.model.config)
    rope = saved.config.get("rope_parameters", {})
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", llama3_divisors(rope, head_dim)
    for kind in ("long", "short") if rope.get("rope_type") == "longrope" else ():
        yield f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32)
    architectures = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(architectures[form.arch], config.num_hidden_layers)
    for name, tensor in _stacked(load_file(saved.path / "model.safetensors")).items():
        if form.permuted and ("q_proj" in name or "k_proj" in name):
            tensor = pairs_from_halves(tensor, head_dim)
        if form.adds_one and name.endswith("norm.weight"):
            tensor = tensor + 1
        parts = form.reshape(name, tensor, config) if form.reshape else [(name, tensor)]
        for part_name, part in parts:
            mapped = names.get_name(part_name, (".weight", ".bias")) or part_name
            assert mapped.startswith(("blk.", "token_embd", "position_embd", "output")), name
            yield mapped, np.ascontiguousarray(part)


def _stacked(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The experts of each layer, one tensor each, as stacks; a Mixtral's by their older name."""
    result, stacks = {}, defaultdict(dict)
    for name, tensor in tensors.items():
        found = re.fullmatch(r"(.+\.experts)\.(\d+)\.(.+)", name)
        if found is None:
            result[name] = tensor
            continue
        prefix = found[1].replace("block_sparse_moe", "feed_forward")
        prefix = prefix.removeprefix("model.") if "feed_forward" in prefix else prefix
        stacks[f"{prefix}.{found[3]}"][int(found[2])] = tensor
    for name, experts in stacks.items():
        result[name] = np.stack([experts[i] for i in range(len(experts))])
    return result


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """write_gguf(saved, form=None, kinds=()): a saved model as a GGUF file without a tokenizer, as
    its family's, or as another one's that has the same weights. Names are those of the gguf
    library. kinds: types of the matrices, in turn; without them all are F32."""

    def write(
        saved: Any, form: str | None = None, kinds: Sequence[gguf.GGMLQuantizationType] = ()
    ) -> Path:
        how, path = GGUF_FORMS[form or saved.model.config.model_type], tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, how.arch)
        for key, value in _metadata(saved, how).items():
            add = {
                bool: writer.add_bool,
                int: writer.add_uint32,
                float: writer.add_float32,
                str: writer.add_string,
                list: writer.add_array,
            }[type(value)]
            add(f"{how.arch}.{key}", value)
        turns = cycle(kinds or [None])
        for name, tensor in _gguf_tensors(saved, how):
            kind = next(turns) if tensor.ndim > 1 else None
            data = tensor if kind is None else gguf.quants.quantize(tensor, kind)
            writer.add_tensor(name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write
