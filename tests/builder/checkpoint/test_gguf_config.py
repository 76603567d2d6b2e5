import numpy as np
import pytest

from llmbuild.builder.checkpoint import open_checkpoint
from llmbuild.errors import CheckpointError

EMBEDDING = {"token_embd.weight": np.zeros((10, 32), np.float32)}


def refused(path, *words):
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    for word in (str(path), *words):
        assert word in str(caught.value)


def renamed(metadata, architecture):
    return {key.replace("llama.", f"{architecture}."): v for key, v in metadata.items()}


def test_llama_metadata_becomes_a_config(write_gguf, llama_metadata):
    config = open_checkpoint(write_gguf(llama_metadata)).config
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 10,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
    }


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-8, 2e-5, 0.1])
def test_stored_float32_reads_as_the_decimal_that_was_meant(eps, write_gguf, llama_metadata):
    assert float(np.float32(eps)) != eps
    path = write_gguf(llama_metadata | {"llama.attention.layer_norm_rms_epsilon": eps})
    assert open_checkpoint(path).config["rms_norm_eps"] == eps


@pytest.mark.parametrize(
    ("architecture", "name"), [("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")]
)
def test_qwen_architectures_are_named(architecture, name, write_gguf, llama_metadata):
    metadata = renamed(llama_metadata, architecture)
    config = open_checkpoint(write_gguf(metadata, architecture=architecture)).config
    assert (config["model_type"], config["architectures"]) == (architecture, [name])


def test_tensors_tell_of_bias_and_untied_head(write_gguf, llama_metadata):
    tensors = EMBEDDING | {
        "blk.0.attn_q.bias": np.zeros(32, np.float32),
        "blk.0.ffn_gate.bias": np.zeros(64, np.float32),
        "output.weight": np.zeros((10, 32), np.float32),
    }
    config = open_checkpoint(write_gguf(llama_metadata, tensors)).config
    assert config["attention_bias"] is True
    assert config["mlp_bias"] is True
    assert config["tie_word_embeddings"] is False


def test_head_dim_may_differ_from_hidden_over_heads(write_gguf, llama_metadata):
    sizes = {"attention.key_length": 10, "attention.value_length": 10, "rope.dimension_count": 10}
    metadata = llama_metadata | {f"llama.{key}": value for key, value in sizes.items()}
    assert open_checkpoint(write_gguf(metadata)).config["head_dim"] == 10


def test_sizes_given_per_layer_must_agree(write_gguf, llama_metadata):
    key = "llama.attention.head_count_kv"
    assert (
        open_checkpoint(write_gguf(llama_metadata | {key: [2, 2]})).config["num_key_value_heads"]
        == 2
    )
    refused(write_gguf(llama_metadata | {key: [2, 4]}), key, "[2, 4]")


def test_linear_scaling_keeps_its_factor(write_gguf, llama_metadata):
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    config = open_checkpoint(write_gguf(llama_metadata | scaling)).config
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize("kind", ["none", "linear"])
def test_scaling_that_scales_nothing_is_none(kind, write_gguf, llama_metadata):
    path = write_gguf(llama_metadata | {"llama.rope.scaling.type": kind})
    assert open_checkpoint(path).config["rope_scaling"] is None


def test_early_files_linear_factor_is_understood(write_gguf, llama_metadata):
    config = open_checkpoint(write_gguf(llama_metadata | {"llama.rope.scale_linear": 2.0})).config
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


YARN = {"type": "yarn", "factor": 4.0, "original_context_length": 32}


def test_yarn_keeps_its_factor_length_and_ramp(write_gguf, llama_metadata):
    scaling = YARN | {"yarn_beta_fast": 16.0, "yarn_ext_factor": 1.0}
    metadata = llama_metadata | {f"llama.rope.scaling.{k}": v for k, v in scaling.items()}
    assert open_checkpoint(write_gguf(metadata)).config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16.0,
    }


@pytest.mark.parametrize(
    "further", [{"attn_factor": 1.5}, {"yarn_attn_factor": 1.5}, {"yarn_ext_factor": 0.5}], ids=str
)
def test_yarn_with_further_factors_is_refused(further, write_gguf, llama_metadata):
    scaling = {f"llama.rope.scaling.{k}": v for k, v in (YARN | further).items()}
    refused(write_gguf(llama_metadata | scaling), f"rope.scaling.{next(iter(further))}")


def test_unknown_scaling_is_refused(write_gguf, llama_metadata):
    path = write_gguf(llama_metadata | {"llama.rope.scaling.type": "ntk"})
    refused(path, "rope.scaling.type", "'ntk'", "yarn")


def test_longrope_without_its_tensors_is_refused(write_gguf, llama_metadata):
    kind = {"llama.rope.scaling.type": "longrope"}
    refused(write_gguf(llama_metadata | kind), "rope_factors_long.weight")
    tensors = EMBEDDING | {"rope_factors_long.weight": np.ones(4, np.float32)}
    refused(write_gguf(llama_metadata, tensors), "rope_factors_short.weight")


def test_rope_freqs_become_factors_and_leave_the_tensors(write_gguf, llama_metadata):
    factors = np.array([1, 1.25, 8, 8], np.float32)
    path = write_gguf(llama_metadata, EMBEDDING | {"rope_freqs.weight": factors})
    checkpoint = open_checkpoint(path)
    expected = {"rope_type": "factors", "factors": [1.0, 1.25, 8.0, 8.0]}
    assert checkpoint.config["rope_scaling"] == expected
    assert "rope_freqs.weight" not in checkpoint.tensors


@pytest.mark.parametrize("factors", [[1.0] * 3, [1.0, 0.0, 1.0, 1.0], [1.0, np.nan, 1.0, 1.0]])
def test_unusable_rope_freqs_are_refused(factors, write_gguf, llama_metadata):
    tensors = EMBEDDING | {"rope_freqs.weight": np.array(factors, np.float32)}
    refused(write_gguf(llama_metadata, tensors), "rope_freqs.weight", "4 positive")


def test_rope_freqs_beside_a_linear_factor_are_refused(write_gguf, llama_metadata):
    tensors = EMBEDDING | {"rope_freqs.weight": np.ones(4, np.float32)}
    path = write_gguf(llama_metadata | {"llama.rope.scaling.factor": 2.0}, tensors)
    refused(path, "twice", "rope_freqs.weight")


def test_sliding_window_is_kept(write_gguf, llama_metadata):
    window = {"llama.attention.sliding_window": 4096}
    assert open_checkpoint(write_gguf(llama_metadata | window)).config["sliding_window"] == 4096


def test_qwen_is_told_that_its_window_holds(write_gguf, llama_metadata):
    metadata = renamed(llama_metadata | {"llama.attention.sliding_window": 7}, "qwen2")
    config = open_checkpoint(write_gguf(metadata, architecture="qwen2")).config
    assert (config["sliding_window"], config["use_sliding_window"]) == (7, True)
    assert config["max_window_layers"] == 0


@pytest.mark.parametrize(
    "extra",
    [
        {"llama.attention.scale": 0.5},
        {"llama.final_logit_softcapping": 30.0},
        {"llama.something_new": True},
        {"llama.rope.dimension_count": 4},
        {"llama.attention.value_length": 4},
        {"llama.attention.causal": False},
        {"llama.use_parallel_residual": True},
        {"llama.expert_used_count": 8},
        {"llama.expert_gating_func": 2},
        {"llama.rope.scaling.attn_factor": 1.5},
        {"llama.embedding_length": -1.0},
        {"llama.context_length": "long"},
        {"llama.attention.layer_norm_rms_epsilon": 0.0},
        {"llama.rope.freq_base": float("nan")},
        {"llama.vocab_size": 11},
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_what_is_not_understood_is_refused_by_name(extra, write_gguf, llama_metadata):
    name = next(iter(extra)).removeprefix("llama.")
    words = {"rope.dimension_count": "rotated", "attention.value_length": "values"}
    refused(write_gguf(llama_metadata | extra), words.get(name, name))


def test_dense_model_may_say_that_it_has_no_experts(write_gguf, llama_metadata):
    said = {"llama.expert_count": 0, "llama.expert_used_count": 0, "llama.attention.causal": True}
    assert open_checkpoint(write_gguf(llama_metadata | said)).config["model_type"] == "llama"


@pytest.mark.parametrize(
    "key",
    ["llama.block_count", "llama.context_length", "llama.embedding_length",
     "llama.feed_forward_length", "llama.attention.head_count",
     "llama.attention.layer_norm_rms_epsilon"],
)  # fmt: skip
def test_missing_metadata_is_named(key, write_gguf, llama_metadata):
    del llama_metadata[key]
    refused(write_gguf(llama_metadata), key, "missing")


def test_missing_embedding_is_named(write_gguf, llama_metadata):
    path = write_gguf(llama_metadata, {"output.weight": np.zeros((10, 32), np.float32)})
    refused(path, "token_embd.weight")


def test_llama_with_experts_is_a_mixtral(write_gguf, llama_metadata):
    experts = {"llama.expert_count": 8, "llama.expert_used_count": 2}
    config = open_checkpoint(write_gguf(llama_metadata | experts)).config
    assert (config["model_type"], config["architectures"]) == ("mixtral", ["MixtralForCausalLM"])
    assert (config["num_local_experts"], config["num_experts_per_tok"]) == (8, 2)
    del experts["llama.expert_used_count"]
    refused(write_gguf(llama_metadata | experts), "llama.expert_used_count", "missing")


@pytest.mark.parametrize(("num_layers", "scalar"), [(26, 8), (46, 16)])
def test_gemma_2_scales_attention_by_its_size(num_layers, scalar, write_gguf, llama_metadata):
    """The 27B model, of 46 layers, by hidden_size / heads; the others by head_dim."""
    metadata = renamed(llama_metadata, "gemma2") | {
        "gemma2.block_count": num_layers,
        "gemma2.attention.head_count": 2,
        "gemma2.attention.key_length": 8,
        "gemma2.attention.value_length": 8,
        "gemma2.attn_logit_softcapping": 50.0,
        "gemma2.final_logit_softcapping": 30.0,
        "gemma2.attention.sliding_window": 4096,
    }
    config = open_checkpoint(write_gguf(metadata, architecture="gemma2")).config
    assert config["query_pre_attn_scalar"] == scalar
    assert config["layer_types"][:3] == [
        *("sliding_attention", "full_attention", "sliding_attention")
    ]


@pytest.mark.parametrize(
    ("pattern", "full"), [([True, False], [1]), (2, [1]), (None, []), ([False, True], [0])]
)
def test_layers_that_slide_are_those_that_the_file_names(pattern, full, write_gguf, llama_metadata):
    metadata = renamed(llama_metadata, "exaone4") | {"exaone4.attention.sliding_window": 7}
    if pattern is not None:
        metadata["exaone4.attention.sliding_window_pattern"] = pattern
    types = open_checkpoint(write_gguf(metadata, architecture="exaone4")).config["layer_types"]
    assert [layer for layer, kind in enumerate(types) if kind == "full_attention"] == full


@pytest.mark.parametrize("pattern", [[True], "LLLG", 0], ids=str)
def test_malformed_pattern_of_windows_is_refused(pattern, write_gguf, llama_metadata):
    metadata = renamed(llama_metadata, "exaone4") | {
        "exaone4.attention.sliding_window": 7,
        "exaone4.attention.sliding_window_pattern": pattern,
    }
    refused(write_gguf(metadata, architecture="exaone4"), "sliding_window_pattern", repr(pattern))


def test_part_of_a_head_that_turns_is_kept_where_the_family_has_it(write_gguf, llama_metadata):
    metadata = renamed(llama_metadata, "phi3") | {"phi3.rope.dimension_count": 6}
    config = open_checkpoint(write_gguf(metadata, architecture="phi3")).config
    assert int(config["head_dim"] * config["partial_rotary_factor"]) == 6


@pytest.mark.parametrize("architecture", ["mamba", "rwkv6", "t5"])
def test_other_architecture_is_refused(architecture, write_gguf, llama_metadata):
    path = write_gguf(renamed(llama_metadata, architecture), architecture=architecture)
    refused(path, architecture, "llama, qwen2, qwen3")


def test_adapter_file_is_refused(write_gguf, llama_metadata):
    refused(write_gguf(llama_metadata | {"general.type": "adapter"}), "'adapter'")
