"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: held to transformers."""

from collections.abc import Callable
from typing import Any

import pytest

from llmbuild.builder.models.families import family_of
from llmbuild.errors import ModelError

Check = Callable[..., None]

# Phi3Config checks the number of factors against hidden_size / num_attention_heads, so these
# models have no head_dim of their own: 20 with 6 heads.
PLAIN = {"head_dim": 20, "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 1}


def longrope(turning: int, original: int, **section: Any) -> dict[str, Any]:
    """Overrides for LongRoPE with `turning` of a head's elements turned."""
    pairs = range(turning // 2)
    return {
        "max_position_embeddings": 64,
        "original_max_position_embeddings": original,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0 + 0.1 * pair for pair in pairs],
            "long_factor": [1.5 + 0.7 * pair for pair in pairs],
        }
        | section,
    }


def mini(**overrides: Any) -> dict[str, Any]:
    """The published config of Phi-4-mini-instruct; its factors are made up."""
    return {
        "architectures": ["Phi3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
        "bos_token_id": 199999,
        "embd_pdrop": 0.0,
        "eos_token_id": 199999,
        "full_attn_mod": 1,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "initializer_range": 0.02,
        "intermediate_size": 8192,
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "phi3",
        "num_attention_heads": 24,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "original_max_position_embeddings": 4096,
        "pad_token_id": 199999,
        "partial_rotary_factor": 0.75,
        "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "long_factor": [2.0] * 48,
            "short_factor": [1.0] * 48,
            "type": "longrope",
        },
        "rope_theta": 10000.0,
        "sliding_window": 262144,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0",
        "use_cache": True,
        "vocab_size": 200064,
    } | overrides


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"sliding_window": 7},
        {"num_key_value_heads": 1, "tie_word_embeddings": True},
        {"num_key_value_heads": 6, "hidden_act": "gelu_pytorch_tanh"},
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.4}},
    ],
    ids=str,
)
def test_decoder_equals_transformers(
    hf_model: Callable[..., Any], assert_decoder_matches: Check, overrides: dict[str, Any]
) -> None:
    assert_decoder_matches(hf_model("phi3", **PLAIN | overrides))


@pytest.mark.parametrize("original", [10, 17, 26, 41])  # in the first chunk, ..., never
def test_longrope_changes_to_the_long_factors_where_transformers_does(
    hf_model: Callable[..., Any], assert_decoder_matches: Check, original: int
) -> None:
    assert_decoder_matches(hf_model("phi3", **PLAIN | longrope(20, original)))


def test_longrope_turns_a_part_of_each_head(
    hf_model: Callable[..., Any], assert_decoder_matches: Check
) -> None:
    rope = longrope(14, 26, partial_rotary_factor=0.7, attention_factor=1.3)
    assert_decoder_matches(hf_model("phi3", **PLAIN | rope))


def test_engine_equals_transformers_across_the_original_length(
    hf_model: Callable[..., Any], assert_engine_matches: Check
) -> None:
    rope = longrope(14, 26, partial_rotary_factor=0.7)
    assert_engine_matches(hf_model("phi3", **PLAIN | rope | {"sliding_window": 19}))


@pytest.mark.slow
def test_engine_equals_transformers_without_scaling(
    hf_model: Callable[..., Any], assert_engine_matches: Check
) -> None:
    assert_engine_matches(hf_model("phi3", **PLAIN, tie_word_embeddings=True))


def test_phi4_mini_turns_three_quarters_of_a_head_by_longrope() -> None:
    raw = mini()
    config = family_of(raw).translate(raw)
    rope = config.ropes[0]
    assert (rope.kind, rope.rotary_dim, rope.original_max_position) == ("longrope", 96, 4096)
    assert rope.attention_factor == pytest.approx(1.1902, abs=1e-4)
    assert (config.head_dim, config.num_kv_heads, config.tie_embeddings) == (128, 8, True)
    assert config.max_position == 131072
    assert set(config.windows) == {262144}


def test_phi4_has_plain_rope_and_no_window() -> None:
    raw = mini(
        hidden_size=5120,
        intermediate_size=17920,
        max_position_embeddings=16384,
        num_attention_heads=40,
        num_hidden_layers=40,
        num_key_value_heads=10,
        original_max_position_embeddings=16384,
        rope_scaling=None,
        rope_theta=250000,
        sliding_window=None,
        tie_word_embeddings=False,
        vocab_size=100352,
    )
    del raw["partial_rotary_factor"], raw["full_attn_mod"], raw["interpolate_factor"]
    config = family_of(raw).translate(raw)
    assert (config.ropes[0].kind, config.ropes[0].theta) == ("default", 250000)
    assert (config.head_dim, config.ropes[0].rotary_dim, set(config.windows)) == (128, 128, {0})


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"qk_layernorm": True}, "qk_layernorm"),
        ({"attention_bias": True}, "attention_bias"),
        ({"lm_head_bias": True}, "lm_head_bias"),
        ({"interpolate_factor": 2}, "interpolate_factor"),
        ({"full_attn_mod": 2}, "full_attn_mod"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "yarn"),
        ({"original_max_position_embeddings": None}, "original_max_position_embeddings"),
        ({"partial_rotary_factor": 0.5}, "short_factor"),
    ],
    ids=str,
)
def test_config_that_means_something_else_is_refused(overrides: dict[str, Any], named: str) -> None:
    raw = mini(**overrides)
    with pytest.raises(ModelError, match=named):
        family_of(raw).translate(raw)


def test_two_original_lengths_that_differ_are_refused() -> None:
    raw = mini()
    raw["rope_scaling"]["original_max_position_embeddings"] = 8192
    with pytest.raises(ModelError, match="original_max_position_embeddings is 4096"):
        family_of(raw).translate(raw)
