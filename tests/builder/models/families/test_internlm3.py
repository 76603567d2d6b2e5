"""InternLM3: held to transformers."""

from collections.abc import Callable
from typing import Any

import pytest

from llmbuild.builder.models.families import family_of
from llmbuild.errors import ModelError

Check = Callable[..., None]
SIZES = {"max_position_embeddings": 64}
DYNAMIC = {
    "max_position_embeddings": 20,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 6.0},
}


def published(**overrides: Any) -> dict[str, Any]:
    """The published config of internlm3-8b-instruct."""
    return {
        "architectures": ["InternLM3ForCausalLM"],
        "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_internlm3.InternLM3Config"},
        "bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 10240,
        "max_position_embeddings": 32768,
        "model_type": "internlm3",
        "num_attention_heads": 32,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "pad_token_id": 2,
        "qkv_bias": False,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 6.0, "rope_type": "dynamic"},
        "rope_theta": 50000000,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.47.1",
        "use_cache": True,
        "vocab_size": 128512,
    } | overrides


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        DYNAMIC | {"num_key_value_heads": 1},
        {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 6},
        {"tie_word_embeddings": True, "head_dim": None},
    ],
    ids=str,
)
def test_decoder_equals_transformers(
    hf_model: Callable[..., Any], assert_decoder_matches: Check, overrides: dict[str, Any]
) -> None:
    assert_decoder_matches(hf_model("internlm3", **SIZES | overrides))


@pytest.mark.slow
def test_engine_equals_transformers_past_the_original_length(
    hf_model: Callable[..., Any], assert_engine_matches: Check
) -> None:
    assert_engine_matches(hf_model("internlm3", **DYNAMIC, attention_bias=True, mlp_bias=True))


def test_published_config_reaches_six_times_its_original_length() -> None:
    raw = published()
    config = family_of(raw).translate(raw)
    assert (config.ropes[0].kind, config.ropes[0].theta) == ("dynamic", 5e7)
    assert (config.max_position, config.num_kv_heads, config.qkv_bias) == (6 * 32768, 2, False)


def test_biases_of_the_published_names_are_read() -> None:
    raw = published(qkv_bias=True, bias=True)
    config = family_of(raw).translate(raw)
    assert config.qkv_bias
    assert config.o_bias
    assert config.mlp_bias


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"qkv_bias": True}, "qkv_bias is True"),
        ({"attention_bias": True}, "both qkv_bias and attention_bias"),
        ({"sliding_window": 7}, "sliding_window"),
    ],
    ids=str,
)
def test_config_that_means_something_else_is_refused(overrides: dict[str, Any], named: str) -> None:
    raw = published(**overrides)
    with pytest.raises(ModelError, match=named):
        family_of(raw).translate(raw)
