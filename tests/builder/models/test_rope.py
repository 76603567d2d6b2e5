"""Rotary frequencies against transformers, bit for bit, and the spellings that configs use."""

from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from llmbuild.builder.models.config import RopeConfig
from llmbuild.builder.models.config_reader import ConfigReader
from llmbuild.builder.models.rope import inverse_frequencies, read_rope
from llmbuild.errors import ModelError

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def read(head_dim: int = 64, **keys: Any) -> RopeConfig:
    return read_rope(ConfigReader({"max_position_embeddings": 131072} | keys, "llama"), head_dim)


@pytest.mark.parametrize("head_dim", [2, 6, 64, 80, 96, 128])
@pytest.mark.parametrize("theta", [10000.0, 500000.0, 1e6])
@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 2.5},
        LLAMA3,
        LLAMA3 | {"factor": 32, "original_max_position_embeddings": 37, "high_freq_factor": 2.0},
        YARN,
        YARN | {"beta_fast": 8.0, "beta_slow": 2.0, "truncate": False},
    ],
)
def test_frequencies_equal_those_of_transformers_exactly(
    scaling: dict[str, Any] | None, theta: float, head_dim: int
) -> None:
    keys = {"rope_theta": theta, "rope_scaling": scaling and dict(scaling)}
    ours = inverse_frequencies(read(head_dim, **keys))
    hf = AutoConfig.for_model("llama", head_dim=head_dim, max_position_embeddings=131072, **keys)
    theirs = LlamaRotaryEmbedding(hf).inv_freq.numpy()
    assert ours.dtype == np.float32
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    "scaling",
    [
        YARN,
        YARN | {"factor": 1.0},
        YARN | {"attention_factor": 0.7},
        YARN | {"mscale": 0.8, "mscale_all_dim": 1.2},
        YARN | {"mscale": 0.8},
    ],
)
def test_attention_factor_of_yarn_equals_that_of_transformers(scaling: dict[str, Any]) -> None:
    ours = read(rope_theta=1e4, rope_scaling=dict(scaling)).attention_factor
    hf = AutoConfig.for_model(
        "llama",
        head_dim=64,
        max_position_embeddings=131072,
        rope_parameters=scaling | {"rope_theta": 1e4},
    )
    assert ours == pytest.approx(LlamaRotaryEmbedding(hf).attention_scaling, rel=1e-12)


def test_factors_of_a_gguf_give_the_llama3_frequencies_they_were_made_from() -> None:
    plain = inverse_frequencies(RopeConfig("default", 500000.0, 64))
    scaled = inverse_frequencies(read(rope_theta=500000.0, rope_scaling=LLAMA3))
    factors = [float(factor) for factor in plain / scaled]
    rope = read(rope_theta=500000.0, rope_scaling={"rope_type": "factors", "factors": factors})
    np.testing.assert_allclose(inverse_frequencies(rope), scaled, rtol=2e-7)


def test_factors_that_do_not_fit_the_head_are_refused() -> None:
    scaling = {"rope_type": "factors", "factors": [1.0, 2.0, 3.0]}
    with pytest.raises(ModelError, match=r"factors is 'a list of 3'; allowed is one of 4"):
        read(8, rope_scaling=scaling)


@pytest.mark.parametrize(
    "scaling",
    [
        LLAMA3,
        {("type" if key == "rope_type" else key): value for key, value in LLAMA3.items()},
        LLAMA3 | {"type": "llama3"},
    ],
)
def test_old_and_new_spellings_mean_the_same(scaling: dict[str, Any]) -> None:
    expected = RopeConfig("llama3", 5e5, 64, 8.0, 1.0, 4.0, 8192)
    assert read(rope_theta=5e5, rope_scaling=scaling) == expected
    assert read(rope_parameters=scaling | {"rope_theta": 5e5}) == expected
    assert read(rope_theta=5e5, rope_parameters=scaling | {"rope_theta": 5e5}) == expected


def test_theta_is_10000_where_a_config_says_nothing() -> None:
    assert read() == read(rope_scaling=None) == RopeConfig("default", 10000.0, 64)


def test_llama3_without_its_original_length_takes_max_position() -> None:
    scaling = {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"}
    assert read(rope_scaling=scaling).original_max_position == 131072


@pytest.mark.parametrize("kind", ["mrope", "ntk", "", 3, None])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_unknown_kind_is_refused_with_the_allowed_ones(kind: Any, key: str) -> None:
    with pytest.raises(ModelError) as caught:
        read(rope_scaling={key: kind, "factor": 2.0})
    assert f"rope_scaling.{key} is {kind!r}" in str(caught.value)
    assert "'default' or 'linear' or 'llama3'" in str(caught.value)
    with pytest.raises(
        ModelError, match="default, linear, llama3, yarn, longrope, dynamic, factors"
    ):
        inverse_frequencies(RopeConfig(str(kind), 1e4, 8))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope_scaling": {"type": "linear"}}, "lacks rope_scaling.factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0; allowed"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor is '2'; allowed"),
        ({"rope_scaling": {"type": "linear", "factor": True}}, "factor is True; allowed"),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "factor is nan; allowed"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "beta_fast": 1}}, "beta_fast"),
        ({"rope_scaling": {"type": "linear", "rope_type": "llama3"}}, "same as rope_type"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor is 1.0"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; allowed is an object"),
        ({"rope_scaling": LLAMA3, "rope_parameters": LLAMA3}, "keep one"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "rope_theta is 1000000.0"),
        ({"rope_theta": -1}, "rope_theta is -1"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.3}}, "partial_rotary_factor is 0.3"),
        ({"partial_rotary_factor": 0.01}, "partial_rotary_factor is 0.01"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
        ({"rope_scaling": {"rope_type": "factors", "factors": [1.0, 0.0]}}, r"factors\[1\] is 0"),
        ({"rope_scaling": {"rope_type": "factors", "factors": 2.0}}, "factors is 2.0"),
    ],
)
def test_bad_parameters_are_refused_by_name(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(**keys)
