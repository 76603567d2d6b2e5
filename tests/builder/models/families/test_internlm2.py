"""InternLM 2: transformers has no code for it, so a Llama of the same weights is the reference."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmbuild.builder.models.families import family_of
from llmbuild.errors import ModelError

PUBLISHED_2_5_7B = {
    "architectures": ["InternLM2ForCausalLM"],
    "attn_implementation": "eager",
    "auto_map": {
        "AutoConfig": "configuration_internlm2.InternLM2Config",
        "AutoModelForCausalLM": "modeling_internlm2.InternLM2ForCausalLM",
        "AutoModel": "modeling_internlm2.InternLM2ForCausalLM",
    },
    "bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "internlm2",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pad_token_id": 2,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"type": "dynamic", "factor": 2.0},
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.41.0",
    "use_cache": True,
    "vocab_size": 92544,
    "pretraining_tp": 1,
}
NAMES = {
    "model.embed_tokens": "model.tok_embeddings",
    "lm_head": "output",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}


def _as_internlm2(saved: Any) -> Any:
    """The saved Llama rewritten as InternLM2 stores it: for each KV head, its queries, key and
    value follow one another in the rows of wqkv."""
    config = saved.config
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    llama = load_file(saved.path / "model.safetensors")
    tensors = {}
    for name, tensor in llama.items():
        if any(f".{letter}_proj." in name for letter in "qkv"):
            continue
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        tensors[name] = tensor
    for layer in range(config["num_hidden_layers"]):
        for kind in ("weight", "bias"):
            prefix = f"model.layers.{layer}"
            if f"{prefix}.self_attn.q_proj.{kind}" not in llama:
                continue
            q, k, v = (
                llama[f"{prefix}.self_attn.{letter}_proj.{kind}"].split(config["head_dim"])
                for letter in "qkv"
            )
            group, rows = heads // kv_heads, []
            for head in range(kv_heads):
                rows += [*q[head * group : (head + 1) * group], k[head], v[head]]
            tensors[f"{prefix}.attention.wqkv.{kind}"] = torch.cat(rows)
    bias = config.pop("attention_bias")
    for key in ("mlp_bias", "rope_parameters"):
        del config[key]
    config |= {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": bias}
    path = saved.path.parent / "internlm2"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return replace(saved, path=path)


@pytest.mark.parametrize(
    ("kv_heads", "bias"), [(6, False), (2, True), (1, False)], ids=["mha", "gqa-bias", "mqa"]
)
def test_decoder_equals_a_llama_of_the_same_weights(
    hf_model: Callable[..., Any],
    assert_decoder_matches: Callable[..., None],
    kv_heads: int,
    bias: bool,
) -> None:
    llama = hf_model(
        "llama", num_key_value_heads=kv_heads, attention_bias=bias, max_position_embeddings=64
    )
    assert_decoder_matches(_as_internlm2(llama))


@pytest.mark.slow
def test_engine_equals_a_llama_of_the_same_weights(
    hf_model: Callable[..., Any], assert_engine_matches: Callable[..., None]
) -> None:
    assert_engine_matches(_as_internlm2(hf_model("llama", max_position_embeddings=64)))


def test_published_config_translates() -> None:
    config = family_of(PUBLISHED_2_5_7B).translate(PUBLISHED_2_5_7B)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (32, 8, 128)
    assert (config.ropes[0].kind, config.ropes[0].theta) == ("dynamic", 1e6)
    assert (config.max_position, config.tie_embeddings) == (65536, False)


@pytest.mark.parametrize(("key", "value"), [("bias", None), ("qk_norm", True)])
def test_what_would_compute_something_else_is_refused(key: str, value: object) -> None:
    with pytest.raises(ModelError, match=key):
        family_of(PUBLISHED_2_5_7B).translate(PUBLISHED_2_5_7B | {key: value})
