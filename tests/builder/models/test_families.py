"""Config translation: against transformers' own reading, and of configs as published."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from llmbuild.builder.models.config import DecoderConfig, NormConfig, RopeConfig
from llmbuild.builder.models.families import FAMILIES, family_of
from llmbuild.errors import ModelError

# The keys that rule the computation, in configs as their makers published them.
SILU_UNTIED = {"hidden_act": "silu", "tie_word_embeddings": False, "use_cache": True}
LLAMA2_7B = SILU_UNTIED | {
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "vocab_size": 32000,
}
LLAMA31_8B = LLAMA2_7B | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_key_value_heads": 8,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
LLAMA32_1B = LLAMA31_8B | {
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "rope_scaling": LLAMA31_8B["rope_scaling"] | {"factor": 32.0},
    "tie_word_embeddings": True,
}
TINYLLAMA_CHAT = LLAMA2_7B | {
    "attention_bias": False,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_position_embeddings": 2048,
    "num_hidden_layers": 22,
    "num_key_value_heads": 4,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}
SMOLLM2_135M_INSTRUCT = LLAMA2_7B | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 2,
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "rope_interleaved": False,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    "vocab_size": 49152,
}
MISTRAL_V01 = SILU_UNTIED | {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.34.0.dev0",
    "vocab_size": 32000,
}
MISTRAL_V03 = MISTRAL_V01 | {
    "attention_dropout": 0.0,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "vocab_size": 32768,
}
MISTRAL_NEMO = MISTRAL_V03 | {
    "head_dim": 128,
    "hidden_size": 5120,
    "max_position_embeddings": 1024000,
    "num_hidden_layers": 40,
    "vocab_size": 131072,
}
QWEN2_7B_INSTRUCT = SILU_UNTIED | {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.41.2",
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN25_05B = QWEN2_7B_INSTRUCT | {
    "eos_token_id": 151643,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_window_layers": 24,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_mrope": False,
    "vocab_size": 151936,
}
QWEN3_06B = SILU_UNTIED | {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def translate(raw: dict[str, Any]) -> DecoderConfig:
    return family_of(raw).translate(raw)


def rope(theta: float) -> RopeConfig:
    return RopeConfig("default", theta, 0)


LLAMA31_ROPE = RopeConfig("llama3", 500000.0, 0, 8.0, 1.0, 4.0, 8192)
LLAMA32_ROPE = RopeConfig("llama3", 500000.0, 0, 32.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    ("raw", "family", "heads", "tied", "window", "expected_rope"),
    [  # heads: num_heads, num_kv_heads, head_dim
        pytest.param(LLAMA2_7B, "llama", (32, 32, 128), False, 0, rope(1e4), id="Llama-2-7B"),
        pytest.param(LLAMA31_8B, "llama", (32, 8, 128), False, 0, LLAMA31_ROPE, id="3.1-8B"),
        pytest.param(LLAMA32_1B, "llama", (32, 8, 64), True, 0, LLAMA32_ROPE, id="3.2-1B"),
        pytest.param(TINYLLAMA_CHAT, "llama", (32, 4, 64), False, 0, rope(1e4), id="TinyLlama"),
        pytest.param(SMOLLM2_135M_INSTRUCT, "llama", (9, 3, 64), True, 0, rope(1e5), id="SmolLM2"),
        pytest.param(MISTRAL_V01, "mistral", (32, 8, 128), False, 4096, rope(1e4), id="v0.1"),
        pytest.param(MISTRAL_V03, "mistral", (32, 8, 128), False, 0, rope(1e6), id="v0.3"),
        pytest.param(MISTRAL_NEMO, "mistral", (32, 8, 128), False, 0, rope(1e6), id="Nemo"),
        pytest.param(QWEN2_7B_INSTRUCT, "qwen2", (28, 4, 128), False, 0, rope(1e6), id="Qwen2-7B"),
        pytest.param(QWEN25_05B, "qwen2", (14, 2, 64), True, 0, rope(1e6), id="Qwen2.5-0.5B"),
        pytest.param(QWEN3_06B, "qwen3", (16, 8, 128), True, 0, rope(1e6), id="Qwen3-0.6B"),
    ],
)
def test_published_configs_translate(
    raw: dict[str, Any],
    family: str,
    heads: tuple[int, int, int],
    tied: bool,
    window: int,
    expected_rope: RopeConfig,
) -> None:
    assert translate(raw) == DecoderConfig(
        family=family,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        norm=NormConfig(raw["rms_norm_eps"]),
        ropes=(dataclasses.replace(expected_rope, rotary_dim=heads[2]),),
        layer_ropes=(0,) * raw["num_hidden_layers"],
        attention_scale=heads[2] ** -0.5,
        max_position=raw["max_position_embeddings"],
        tie_embeddings=tied,
        qk_norm="head" if family == "qwen3" else "",
        qkv_bias=family == "qwen2",
        o_bias=False,
        mlp_bias=False,
        windows=(window,) * raw["num_hidden_layers"],
    )


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
SAVED = [
    ("llama", {"num_key_value_heads": 6, "attention_bias": True}),
    ("llama", {"head_dim": None, "mlp_bias": True, "rope_parameters": LLAMA3_ROPE}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}}),
    ("mistral", {"sliding_window": 7, "tie_word_embeddings": True}),
    ("mistral", {"sliding_window": None, "rms_norm_eps": 1e-3}),
    ("qwen2", {"num_key_value_heads": 1, "num_hidden_layers": 3, **SLIDING}),
    ("qwen2", SLIDING | {"layer_types": ["sliding_attention", "full_attention"]}),
    ("qwen3", {"head_dim": 22, "attention_bias": True, **SLIDING}),
    ("qwen3", {"sliding_window": 5}),
]


@pytest.mark.parametrize(("model_type", "overrides"), SAVED)
def test_saved_config_means_what_the_model_does(
    hf_model: Callable[..., Any], model_type: str, overrides: dict[str, Any]
) -> None:
    saved = hf_model(model_type, **overrides)
    model, ours = saved.model, translate(saved.config)
    layers = model.model.layers
    attention, mlp = layers[0].self_attn, layers[0].mlp
    assert ours.family == model_type
    assert (ours.vocab_size, ours.hidden_size) == tuple(model.lm_head.weight.shape)
    assert ours.intermediate_size == mlp.up_proj.out_features
    assert ours.num_layers == len(layers)
    assert ours.q_size == attention.q_proj.out_features
    assert ours.kv_size == attention.k_proj.out_features
    assert ours.head_dim == attention.head_dim
    assert ours.num_heads == ours.num_kv_heads * attention.num_key_value_groups
    assert ours.norm.eps == model.model.norm.variance_epsilon
    assert ours.max_position == 32
    assert ours.tie_embeddings == (model.lm_head.weight is model.model.embed_tokens.weight)
    assert (ours.qk_norm == "head") == hasattr(attention, "q_norm")
    assert ours.qkv_bias == (attention.v_proj.bias is not None)
    assert ours.o_bias == (attention.o_proj.bias is not None)
    assert ours.mlp_bias == (mlp.down_proj.bias is not None)
    windows = [getattr(layer.self_attn, "sliding_window", None) for layer in layers]
    if model_type == "mistral":  # whose layers all look at the config
        windows = [model.config.sliding_window] * len(layers)
    assert ours.windows == tuple(window or 0 for window in windows)


@pytest.mark.parametrize(("model_type", "overrides"), SAVED)
def test_classic_spelling_of_a_saved_config_means_the_same(
    hf_model: Callable[..., Any], model_type: str, overrides: dict[str, Any]
) -> None:
    modern = hf_model(model_type, **overrides).config
    rope = dict(modern["rope_parameters"])
    classic = {key: value for key, value in modern.items() if key != "rope_parameters"}
    classic |= {"rope_theta": rope.pop("rope_theta"), "torch_dtype": classic.pop("dtype")}
    kind = rope.pop("rope_type")
    classic["rope_scaling"] = {"type": kind, **rope} if kind != "default" else None
    assert translate(classic) == translate(modern)


def test_heads_follow_from_hidden_size_when_unset() -> None:
    old = {key: value for key, value in LLAMA2_7B.items() if key != "num_key_value_heads"}
    assert translate(old) == translate(LLAMA2_7B) == translate(LLAMA2_7B | {"head_dim": None})


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_unknown_keys_are_all_named(family: str, hf_model: Callable[..., Any]) -> None:
    raw = hf_model(family).config | {"attention_multiplier_v2": 0.5, "quantization_config": {}}
    with pytest.raises(ModelError) as caught:
        translate(raw)
    message = "doesn't understand: attention_multiplier_v2 (0.5), quantization_config ({})"
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (LLAMA2_7B, {"num_attention_heads": 0}, "num_attention_heads is 0; allowed is an integer"),
        (LLAMA2_7B, {"vocab_size": "32000"}, "vocab_size is '32000'"),
        (LLAMA2_7B, {"num_hidden_layers": True}, "num_hidden_layers is True"),
        (LLAMA2_7B, {"intermediate_size": 11008.0}, "intermediate_size is 11008.0"),
        (LLAMA2_7B, {"num_key_value_heads": 5}, "num_key_value_heads is 5; allowed is a divisor"),
        (LLAMA2_7B, {"num_key_value_heads": 64}, "num_key_value_heads is 64"),
        (LLAMA2_7B, {"hidden_size": 4097}, "hidden_size is 4097; allowed is a multiple"),
        (LLAMA2_7B, {"head_dim": 63}, "head_dim is 63; allowed is an even number"),
        (LLAMA2_7B, {"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0; allowed is a finite number"),
        (LLAMA2_7B, {"hidden_act": "mish"}, "hidden_act is 'mish'; allowed is 'silu'"),
        (LLAMA2_7B, {"tie_word_embeddings": None}, "tie_word_embeddings is None; allowed is true"),
        (LLAMA2_7B, {"attention_bias": 1}, "attention_bias is 1; allowed is true or false"),
        (LLAMA2_7B, {"rope_interleaved": True}, "rope_interleaved is True; allowed is False"),
        (LLAMA2_7B, {"is_encoder_decoder": 0}, "is_encoder_decoder is 0; allowed is False"),
        (LLAMA2_7B, {"rope_scaling": {"type": "mrope"}}, "rope_scaling.type is 'mrope'; allowed"),
        (MISTRAL_V01, {"sliding_window": 0}, "sliding_window is 0; allowed is an integer of at"),
        (MISTRAL_V01, {"layer_types": ["full_attention"] * 32}, "layer_types"),
        (QWEN2_7B_INSTRUCT, {"attention_bias": False}, "attention_bias is False; allowed is True"),
        (LLAMA2_7B, {"rope_theta": 10**400}, "rope_theta is 1000"),
        (QWEN2_7B_INSTRUCT, {"use_mrope": True}, "use_mrope is True; allowed is False"),
        (QWEN2_7B_INSTRUCT, {"max_window_layers": -1}, "max_window_layers is -1"),
        (QWEN2_7B_INSTRUCT, {"layer_types": ["full_attention"]}, "a list of 28, one for each"),
        (QWEN2_7B_INSTRUCT, {"layer_types": ["sliding_attention"] * 28}, "full_attention alone"),
        (QWEN3_06B, {"layer_types": ["linear_attention"] * 28}, "'full_attention' or 'sliding_"),
        (
            QWEN3_06B,
            {"use_sliding_window": True, "max_window_layers": 4},
            "sliding_window is None; allowed is a number",
        ),
    ],
)
def test_bad_values_are_refused_with_given_and_allowed(
    base: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        translate(base | change)


@pytest.mark.parametrize(
    ("base", "key"),
    [
        (LLAMA2_7B, "hidden_size"),
        (LLAMA2_7B, "rms_norm_eps"),
        (LLAMA2_7B, "max_position_embeddings"),
        (MISTRAL_V01, "sliding_window"),
        (MISTRAL_V01, "num_key_value_heads"),
        (QWEN2_7B_INSTRUCT, "num_key_value_heads"),
        (QWEN2_7B_INSTRUCT | {"use_sliding_window": True}, "max_window_layers"),
        (QWEN3_06B, "head_dim"),
    ],
)
def test_absent_key_without_a_safe_default_is_named(base: dict[str, Any], key: str) -> None:
    with pytest.raises(ModelError, match=f"config: lacks {key};"):
        translate({name: value for name, value in base.items() if name != key})


@pytest.mark.parametrize(
    "names",
    [
        {"architectures": ["MambaForCausalLM"], "model_type": "mamba"},
        {"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"},
        {"architectures": ["LlamaForCausalLM"], "model_type": "mistral"},
        {"architectures": ["LlamaForCausalLM", "Qwen3ForCausalLM"]},
        {"architectures": [], "model_type": None},
        {"architectures": [["LlamaForCausalLM"]]},
        {"model_type": 3},
        {},
    ],
)
def test_unknown_model_is_refused_with_the_known_families(names: dict[str, Any]) -> None:
    with pytest.raises(ModelError) as caught:
        family_of(names)
    assert repr(names.get("model_type")) in str(caught.value)
    for family in FAMILIES:
        assert family.name in str(caught.value).partition("Known are: ")[2]


def test_architectures_that_are_no_list_are_refused() -> None:
    with pytest.raises(ModelError, match="architectures is 'LlamaForCausalLM'; allowed is a list"):
        family_of({"architectures": "LlamaForCausalLM"})


def test_model_type_alone_selects_a_family() -> None:
    for family in FAMILIES:
        assert family_of({"model_type": family.name}) is family
        assert family_of({"architectures": list(family.architectures)}) is family


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "head_dim"])
def test_a_number_beyond_any_model_is_refused_at_once(key: str) -> None:
    for family in FAMILIES:
        with pytest.raises(ModelError):
            family.translate({"num_hidden_layers": 2, "hidden_size": 8, key: 10**400})
