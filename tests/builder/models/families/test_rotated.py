"""A model in rotated coordinates is the same model, whatever its layers are made of."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from llmbuild.builder.checkpoint import open_checkpoint
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.models.families import family_of
from llmbuild.builder.models.rotated import RotatedTensors, rotated_config
from llmbuild.builder.models.weights import ModelWeights
from llmbuild.errors import RecipeError

LONG = {"max_position_embeddings": 64}
MOE = LONG | {"experts_implementation": "eager"}
EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 19}
SCALED = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 16.0}
ROTATED = {
    "tied": ("llama", LONG | {"tie_word_embeddings": True}),
    "biases": ("llama", LONG | {"attention_bias": True, "mlp_bias": True}),
    "odd sizes": ("llama", LONG | {"hidden_size": 66, "head_dim": 6}),
    "norms that add one": ("gemma", LONG),
    "norms of heads": ("qwen3", LONG),
    "a bias of V": ("qwen2", LONG),
    "scaled residual": ("granite", LONG | SCALED),
    "experts": ("mixtral", MOE),
    "experts, a shared one, its gate": (
        "qwen2_moe",
        MOE | EXPERTS | {"shared_expert_intermediate_size": 23},
    ),
}
REFUSED = {
    "layer norms": ("starcoder2", LONG, "subtract a mean"),
    "a layer norm without bias": ("cohere", LONG, "subtract a mean"),
    "norms behind too": ("gemma2", LONG, "norms after attention"),
    "norms behind alone": ("olmo2", LONG, "norms after attention"),
}


@pytest.mark.parametrize(("model_type", "overrides"), ROTATED.values(), ids=ROTATED)
def test_logits_of_a_rotated_model_equal_transformers(
    hf_model: Callable[..., Any],
    assert_decoder_matches: Callable[..., None],
    model_type: str,
    overrides: dict[str, Any],
) -> None:
    assert_decoder_matches(hf_model(model_type, **overrides), is_rotated=True)


def test_an_engine_of_a_rotated_model_gives_transformers_logits(
    hf_model: Callable[..., Any], assert_engine_matches: Callable[..., None]
) -> None:
    saved = hf_model("llama", **LONG, tie_word_embeddings=True, attention_bias=True)
    assert_engine_matches(saved, "quantisation.rotation=true")


@pytest.mark.parametrize(("model_type", "overrides", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_model_that_rotation_would_change_is_refused(
    hf_model: Callable[..., Any], model_type: str, overrides: dict[str, Any], reason: str
) -> None:
    _, config = opened(hf_model(model_type, **overrides))
    with pytest.raises(RecipeError, match=rf"^quantisation\.rotation: given true; .*{reason}"):
        rotated_config(config)


@pytest.mark.parametrize(("model_type", "overrides"), ROTATED.values(), ids=ROTATED)
def test_rows_are_those_of_the_whole_tensor(
    hf_model: Callable[..., Any], model_type: str, overrides: dict[str, Any]
) -> None:
    rotated = RotatedTensors(*opened(hf_model(model_type, **overrides)))
    for name, shape in rotated.names.items():
        whole = rotated.read(name)
        assert whole.shape == shape == rotated.shape(name)
        middle = slice(shape[0] // 3, shape[0] // 3 + 2)
        rows = rotated.read_rows(name, middle.start, middle.stop)
        np.testing.assert_allclose(rows, whole[middle], rtol=0, atol=1e-6, err_msg=name)


def test_a_channel_that_stands_out_is_spread_over_all(hf_model: Callable[..., Any]) -> None:
    saved = hf_model("llama", **LONG, hidden_size=48)
    saved.model.model.embed_tokens.weight.data[:, 17] *= 50
    saved.model.save_pretrained(saved.path)
    weights, config = opened(saved)
    before, after = weights.read("embed.weight"), RotatedTensors(weights, config)
    reach = np.abs(after.read("embed.weight")).max(0)
    assert np.abs(before).max(0)[17] > 20 * np.median(np.abs(before).max(0))
    assert reach.max() < 3 * np.median(reach)


def opened(saved: Any) -> tuple[ModelWeights, DecoderConfig]:
    checkpoint = open_checkpoint(saved.path)
    family = family_of(checkpoint.config)
    config = family.translate(checkpoint.config)
    return ModelWeights(checkpoint, family, config), config
