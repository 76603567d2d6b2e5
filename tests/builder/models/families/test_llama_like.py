"""Models that are Llamas by another name, and Llama 4, which isn't one."""

from typing import Any

import pytest

from llmbuild.builder.models.families import FAMILIES, family_of
from llmbuild.errors import ModelError

COMMON = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "model_type": "llama",
    "pretraining_tp": 1,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
FALCON_3_7B = COMMON | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 11,
    "head_dim": 256,
    "hidden_size": 3072,
    "intermediate_size": 23040,
    "max_position_embeddings": 32768,
    "mlp_bias": False,
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000042,
    "transformers_version": "4.46.1",
    "vocab_size": 131080,
}
YI_6B = COMMON | {
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "rope_theta": 5000000.0,
    "transformers_version": "4.34.0",
    "vocab_size": 64000,
}
DEEPSEEK_LLM_7B = COMMON | {
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 30,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "transformers_version": "4.33.1",
    "vocab_size": 102400,
}
DEEPSEEK_CODER_33B = DEEPSEEK_LLM_7B | {
    "bos_token_id": 32013,
    "eos_token_id": 32014,
    "hidden_size": 7168,
    "intermediate_size": 19200,
    "max_position_embeddings": 16384,
    "num_attention_heads": 56,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "rope_scaling": {"factor": 4.0, "type": "linear"},
    "rope_theta": 100000,
    "vocab_size": 32256,
}


@pytest.mark.parametrize(
    ("published", "heads", "theta"),
    [
        (FALCON_3_7B, (12, 4, 256), 1000042),
        (YI_6B, (32, 4, 128), 5e6),
        (DEEPSEEK_LLM_7B, (32, 32, 128), 1e4),
        (DEEPSEEK_CODER_33B, (56, 8, 128), 1e5),
    ],
    ids=["falcon-3", "yi", "deepseek-llm", "deepseek-coder"],
)
def test_published_config_translates_as_a_llama(
    published: dict[str, Any], heads: tuple[int, int, int], theta: float
) -> None:
    family = family_of(published)
    config = family.translate(published)
    assert family.name == "llama"
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == heads
    assert config.ropes[0].theta == theta
    assert config.ropes[0].kind == ("linear" if published["rope_scaling"] else "default")
    assert config.max_position == published["max_position_embeddings"]
    biases = (config.qkv_bias, config.o_bias, config.mlp_bias)
    assert (biases, config.tie_embeddings) == ((False, False, False), False)


def test_llama_4_is_refused_with_the_list_of_known_families() -> None:
    text = {"architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text"}
    with pytest.raises(ModelError, match="'llama4_text'") as refusal:
        family_of(text)
    assert all(family.name in str(refusal.value) for family in FAMILIES)


def test_llama_4_with_its_vision_part_is_refused() -> None:
    whole = {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "text_config": {"model_type": "llama4_text"},
    }
    with pytest.raises(ModelError, match="'llama4'"):
        family_of(whole)
