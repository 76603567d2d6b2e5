"""EXAONE 3.0 and 3.5: held to transformers, which runs them as a Llama."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from llmbuild.builder.models.families import family_of
from llmbuild.errors import ModelError

PUBLISHED_3_5_2_4B = {
    "activation_function": "silu",
    "architectures": ["ExaoneForCausalLM"],
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_exaone.ExaoneConfig",
        "AutoModelForCausalLM": "modeling_exaone.ExaoneForCausalLM",
    },
    "bos_token_id": 1,
    "embed_dropout": 0.0,
    "eos_token_id": 361,
    "head_dim": 80,
    "hidden_size": 2560,
    "initializer_range": 0.02,
    "intermediate_size": 7168,
    "layer_norm_epsilon": 1e-05,
    "max_position_embeddings": 32768,
    "model_type": "exaone",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_layers": 30,
    "pad_token_id": 0,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "transformers_version": "4.43.0",
    "use_cache": True,
    "vocab_size": 102400,
}
SHAPE = {"max_position_embeddings": 64, "eos_token_id": 2}


@pytest.mark.parametrize(
    "overrides",
    [
        {"num_key_value_heads": 6, "tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
    ],
    ids=["mha-tied", "gqa-biases"],
)
def test_decoder_equals_transformers(
    hf_model: Callable[..., Any],
    assert_decoder_matches: Callable[..., None],
    overrides: dict[str, Any],
) -> None:
    assert_decoder_matches(hf_model("exaone", **SHAPE, **overrides))


def test_the_published_spellings_make_the_same_model(
    hf_model: Callable[..., Any], assert_decoder_matches: Callable[..., None]
) -> None:
    saved = hf_model("exaone", **SHAPE)
    config = saved.config
    for key in ("attention_bias", "mlp_bias", "rope_parameters"):
        del config[key]
    config |= {
        "architectures": ["ExaoneForCausalLM"],
        "num_layers": config.pop("num_hidden_layers"),
        "layer_norm_epsilon": config.pop("rms_norm_eps"),
        "activation_function": config.pop("hidden_act"),
        "rope_theta": 500000.0,
    }
    (saved.path / "config.json").write_text(json.dumps(config))
    assert_decoder_matches(saved)


@pytest.mark.slow
def test_engine_equals_transformers(
    hf_model: Callable[..., Any], assert_engine_matches: Callable[..., None]
) -> None:
    assert_engine_matches(hf_model("exaone", **SHAPE))


def test_published_config_translates() -> None:
    config = family_of(PUBLISHED_3_5_2_4B).translate(PUBLISHED_3_5_2_4B)
    assert (config.num_layers, config.norm.eps, config.activation) == (30, 1e-5, "silu")
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (32, 8, 80)
    assert (config.ropes[0].kind, config.ropes[0].theta) == ("llama3", 1e6)
    assert config.tie_embeddings


def test_a_llama_without_model_type_stays_a_llama() -> None:
    assert family_of({"architectures": ["LlamaForCausalLM"]}).name == "llama"


def test_a_config_without_rope_theta_is_refused() -> None:
    config = {key: value for key, value in PUBLISHED_3_5_2_4B.items() if key != "rope_theta"}
    with pytest.raises(ModelError, match="rope_theta"):
        family_of(config).translate(config)


def test_an_unknown_key_is_refused() -> None:
    with pytest.raises(ModelError, match="clip_qkv"):
        family_of(PUBLISHED_3_5_2_4B).translate(PUBLISHED_3_5_2_4B | {"clip_qkv": 8.0})
