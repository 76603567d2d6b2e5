"""StarCoder2: held to transformers."""

from collections.abc import Callable
from typing import Any

import pytest

from llmbuild.builder.models.families import family_of
from llmbuild.errors import ModelError

PUBLISHED_3B = {
    "architectures": ["Starcoder2ForCausalLM"],
    "attention_dropout": 0.1,
    "residual_dropout": 0.1,
    "embedding_dropout": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 3072,
    "initializer_range": 0.018042195912175804,
    "intermediate_size": 12288,
    "max_position_embeddings": 16384,
    "mlp_type": "default",
    "model_type": "starcoder2",
    "norm_epsilon": 1e-05,
    "norm_type": "layer_norm",
    "num_attention_heads": 24,
    "num_hidden_layers": 30,
    "num_key_value_heads": 2,
    "rope_theta": 999999.4420358813,
    "sliding_window": 4096,
    "transformers_version": "4.37.0.dev0",
    "use_bias": True,
    "use_cache": True,
    "vocab_size": 49152,
}


@pytest.mark.parametrize(
    "overrides",
    [
        {"sliding_window": 7},
        {"num_key_value_heads": 6, "tie_word_embeddings": False},
        {"num_key_value_heads": 1, "use_bias": False, "hidden_act": "gelu", "norm_epsilon": 1e-2},
    ],
    ids=["window", "untied", "no-biases"],
)
def test_decoder_equals_transformers(
    hf_model: Callable[..., Any],
    assert_decoder_matches: Callable[..., None],
    overrides: dict[str, Any],
) -> None:
    assert_decoder_matches(hf_model("starcoder2", max_position_embeddings=64, **overrides))


@pytest.mark.slow
def test_engine_equals_transformers(
    hf_model: Callable[..., Any], assert_engine_matches: Callable[..., None]
) -> None:
    shape = {"max_position_embeddings": 64, "sliding_window": 7}
    assert_engine_matches(hf_model("starcoder2", bos_token_id=1, eos_token_id=1, **shape))


def test_published_config_translates() -> None:
    config = family_of(PUBLISHED_3B).translate(PUBLISHED_3B)
    assert config.windows == (4096,) * 30
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (24, 2, 128)
    assert (config.norm.kind, config.norm.bias, config.norm.eps) == ("layer", True, 1e-5)
    assert (config.activation, config.gated_mlp) == ("gelu_tanh", False)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, True, True)
    assert config.tie_embeddings
    assert config.ropes[0].theta == 999999.4420358813


@pytest.mark.parametrize(
    ("key", "value"),
    [("mlp_type", "gated"), ("norm_type", "rms_norm"), ("use_bias", 1), ("qk_norm", True)],
)
def test_what_would_compute_something_else_is_refused(key: str, value: object) -> None:
    with pytest.raises(ModelError, match=key):
        family_of(PUBLISHED_3B).translate(PUBLISHED_3B | {key: value})


@pytest.mark.parametrize("key", ["num_key_value_heads", "hidden_act"])
def test_a_config_without_a_key_of_differing_defaults_is_refused(key: str) -> None:
    config = {name: value for name, value in PUBLISHED_3B.items() if name != key}
    with pytest.raises(ModelError, match=key):
        family_of(config).translate(config)
