"""InternLM 2 and 2.5: a Llama under other names, whose Q, K and V are stored by KV head."""

from typing import Any

from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.models.config_reader import ConfigReader
from llmbuild.builder.models.families.common import GGUF_NAMES, read_decoder
from llmbuild.builder.models.families.family import Family, Source
from llmbuild.builder.models.families.fused import by_kv_head, qkv_parts


def translate(raw: dict[str, Any]) -> DecoderConfig:
    reader = ConfigReader(raw, "internlm2")
    reader.ignore("attn_implementation")  # of the same result
    bias = reader.boolean("bias", False)
    return read_decoder(reader, qkv_bias=bias, o_bias=bias)


_MODULES = {
    "attn_norm": "attention_norm",
    "attention.o_proj": "attention.wo",
    "mlp_norm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}
_NAMES: dict[str, Source] = {
    "embed.weight": "model.tok_embeddings.weight",
    "final_norm.weight": "model.norm.weight",
    "lm_head.weight": "output.weight",
    "layers.{l}.attention.o_proj.bias": "model.layers.{l}.attention.wo.bias",
    **{
        f"layers.{{l}}.{module}.weight": f"model.layers.{{l}}.{hf}.weight"
        for module, hf in _MODULES.items()
    },
    **qkv_parts("model.layers.{l}.attention.wqkv", by_kv_head),
}

INTERNLM2 = Family(
    name="internlm2",
    architectures=("InternLM2ForCausalLM",),
    translate=translate,
    hf_names=_NAMES,
    gguf_names=GGUF_NAMES,
    ignored=("model.layers.{l}.attention.rotary_emb.inv_freq",),
    gguf_permuted_qk=True,
)
