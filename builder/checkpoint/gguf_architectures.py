"""What each GGUF architecture's metadata means, as a table.

Metadata keys stand without their "{architecture}."; they are those that llama.cpp's converter
writes. What its loader takes for granted instead of reading it stands in `constants`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_RMS = {"rms_norm_eps": "attention.layer_norm_rms_epsilon"}
_LAYER_NORM = "attention.layer_norm_epsilon"
_EXPERTS_USED = {"num_experts_per_tok": "expert_used_count"}
_EXPERT_SIZE = {"moe_intermediate_size": "expert_feed_forward_length"}
_GRANITE = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_QKV_BIAS = {"attention_bias": "blk.0.attn_q.bias"}
_BIASES = _QKV_BIAS | {"mlp_bias": "blk.0.ffn_gate.bias"}
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh"}


@dataclass(frozen=True)
class GgufArchitecture:
    """One architecture, or the variant of it whose metadata `when` is there and isn't 0.

    model_type, hf_class: config.json's. numbers: config key -> metadata key, required; optional:
    likewise, where the metadata has it. flags: config key -> tensor whose presence says true.
    constants: further config keys. with_window: config keys where there is a sliding window.
    full_every: every so manieth layer attends to all and the others slide, where the metadata
    doesn't say which; 0 for families whose window is every layer's. rotary_part: the config key
    for the part of a head that turns, "" where all of it must. has_rope: False for learned
    positions. head_scaled_layers: the number of layers of the model whose query_pre_attn_scalar
    is hidden_size / heads, where the others' is head_dim; 0 for families without it.
    """

    model_type: str
    hf_class: str
    when: str = ""
    numbers: Mapping[str, str] = field(default_factory=lambda: _RMS)
    optional: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=lambda: {"hidden_act": "silu"})
    with_window: Mapping[str, Any] = field(default_factory=dict)
    full_every: int = 0
    rotary_part: str = ""
    has_rope: bool = True
    head_scaled_layers: int = 0


_SILU = {"hidden_act": "silu"}
_SLIDES = {"use_sliding_window": True}

# By general.architecture; of several variants the first whose `when` holds.
ARCHITECTURES: Mapping[str, tuple[GgufArchitecture, ...]] = {
    "llama": (  # which Mistral's files say too
        GgufArchitecture(
            "mixtral",
            "MixtralForCausalLM",
            when="expert_count",
            numbers=_RMS | _EXPERTS_USED | {"num_local_experts": "expert_count"},
        ),
        GgufArchitecture("llama", "LlamaForCausalLM", flags=_BIASES),
    ),
    "qwen2": (
        GgufArchitecture(
            "qwen2",
            "Qwen2ForCausalLM",
            flags=_QKV_BIAS,
            with_window=_SLIDES | {"max_window_layers": 0},
        ),
    ),
    "qwen3": (
        GgufArchitecture(
            "qwen3",
            "Qwen3ForCausalLM",
            flags=_QKV_BIAS,
            with_window=_SLIDES | {"max_window_layers": 0},
        ),
    ),
    "qwen2moe": (
        GgufArchitecture(
            "qwen2_moe",
            "Qwen2MoeForCausalLM",
            numbers=_RMS
            | _EXPERTS_USED
            | _EXPERT_SIZE
            | {
                "num_experts": "expert_count",
                "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
            },
            flags={"qkv_bias": "blk.0.attn_q.bias"},
            constants=_SILU | {"norm_topk_prob": False},
        ),
    ),
    "qwen3moe": (
        GgufArchitecture(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            numbers=_RMS | _EXPERTS_USED | _EXPERT_SIZE | {"num_experts": "expert_count"},
            flags=_QKV_BIAS,
            constants=_SILU | {"norm_topk_prob": True},
            with_window=_SLIDES,
        ),
    ),
    "olmoe": (
        GgufArchitecture(
            "olmoe",
            "OlmoeForCausalLM",
            numbers=_RMS | _EXPERTS_USED | {"num_experts": "expert_count"},
            flags=_QKV_BIAS,
            constants=_SILU | {"norm_topk_prob": False},
        ),
    ),
    "gemma": (GgufArchitecture("gemma", "GemmaForCausalLM", constants=_GEMMA),),
    "gemma2": (
        GgufArchitecture(
            "gemma2",
            "Gemma2ForCausalLM",
            numbers=_RMS
            | {
                "attn_logit_softcapping": "attn_logit_softcapping",
                "final_logit_softcapping": "final_logit_softcapping",
            },
            constants=_GEMMA,
            full_every=2,
            head_scaled_layers=46,
        ),
    ),
    "gemma3": (
        GgufArchitecture(
            "gemma3_text",
            "Gemma3ForCausalLM",
            optional={
                "final_logit_softcapping": "final_logit_softcapping",
                "rope_local_base_freq": "rope.freq_base_swa",
            },
            constants=_GEMMA,
            full_every=6,
            head_scaled_layers=62,
        ),
    ),
    "phi3": (GgufArchitecture("phi3", "Phi3ForCausalLM", rotary_part="partial_rotary_factor"),),
    "granite": (
        GgufArchitecture("granite", "GraniteForCausalLM", optional=_GRANITE, flags=_BIASES),
    ),
    "granitemoe": tuple(
        GgufArchitecture(
            model_type,
            hf_class,
            when=shared_size,
            numbers=_RMS | _EXPERTS_USED | {"num_local_experts": "expert_count"},
            optional=_GRANITE | ({"shared_intermediate_size": shared_size} if shared_size else {}),
            flags=_QKV_BIAS,
        )
        for model_type, hf_class, shared_size in (
            (
                "granitemoeshared",
                "GraniteMoeSharedForCausalLM",
                "expert_shared_feed_forward_length",
            ),
            ("granitemoe", "GraniteMoeForCausalLM", ""),
        )
    ),
    "olmo2": (  # which OLMo 3's files say too
        GgufArchitecture(
            "olmo3",
            "Olmo3ForCausalLM",
            when="attention.sliding_window",
            flags=_QKV_BIAS,
            full_every=4,
        ),
        GgufArchitecture("olmo2", "Olmo2ForCausalLM", flags=_QKV_BIAS),
    ),
    "smollm3": (
        GgufArchitecture(
            "smollm3",
            "SmolLM3ForCausalLM",
            flags=_BIASES,
            constants=_SILU | {"no_rope_layer_interval": 4},
        ),
    ),
    "command-r": (
        GgufArchitecture(
            "cohere",
            "CohereForCausalLM",
            numbers={"layer_norm_eps": _LAYER_NORM, "logit_scale": "logit_scale"},
            flags=_QKV_BIAS | {"use_qk_norm": "blk.0.attn_q_norm.weight"},
        ),
    ),
    "cohere2": (
        GgufArchitecture(
            "cohere2",
            "Cohere2ForCausalLM",
            numbers={"layer_norm_eps": _LAYER_NORM, "logit_scale": "logit_scale"},
            flags=_QKV_BIAS,
            full_every=4,
        ),
    ),
    "starcoder2": (
        GgufArchitecture(
            "starcoder2",
            "Starcoder2ForCausalLM",
            numbers={"norm_epsilon": _LAYER_NORM},
            flags={"use_bias": "blk.0.attn_q.bias"},
            constants={"hidden_act": "gelu_pytorch_tanh"},
        ),
    ),
    "gptneox": (
        GgufArchitecture(
            "gpt_neox",
            "GPTNeoXForCausalLM",
            numbers={"layer_norm_eps": _LAYER_NORM},
            optional={"use_parallel_residual": "use_parallel_residual"},
            flags={"attention_bias": "blk.0.attn_qkv.bias"},
            constants={"hidden_act": "gelu"},
            rotary_part="rotary_pct",
        ),
    ),
    "gpt2": (
        GgufArchitecture(
            "gpt2",
            "GPT2LMHeadModel",
            numbers={"layer_norm_epsilon": _LAYER_NORM},
            constants={"activation_function": "gelu_new"},
            has_rope=False,
        ),
    ),
    "exaone": (GgufArchitecture("exaone", "ExaoneForCausalLM"),),
    "exaone4": (GgufArchitecture("exaone4", "Exaone4ForCausalLM", full_every=4),),
    "internlm2": (
        GgufArchitecture("internlm2", "InternLM2ForCausalLM", flags={"bias": "blk.0.attn_q.bias"}),
    ),
    "seed_oss": (
        GgufArchitecture(
            "seed_oss",
            "SeedOssForCausalLM",
            flags=_BIASES | {"attention_out_bias": "blk.0.attn_output.bias"},
        ),
    ),
}
