"""InternLM3: Llama with head_dim apart, a dynamic RoPE, and one switch for all biases."""

from typing import Any

from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.models.config_reader import ConfigReader
from llmbuild.builder.models.families.common import GGUF_NAMES, HF_NAMES, IGNORED, read_decoder
from llmbuild.builder.models.families.family import Family


def translate(raw: dict[str, Any]) -> DecoderConfig:
    reader = ConfigReader(raw, "internlm3")
    # What transformers takes for these when they are left out is InternLM3 8B's own value.
    reader.require("num_key_value_heads", "head_dim")
    qkv_bias = _either(reader, "qkv_bias", "attention_bias")
    bias = _either(reader, "bias", "mlp_bias")
    if qkv_bias != bias:
        # transformers refuses it too: qkv_bias is for Q, K, V and the output projection at once.
        reader.refuse("qkv_bias", qkv_bias, f"the same as bias, {bias}")
    return read_decoder(reader, qkv_bias=bias, o_bias=bias, mlp_bias=bias)


def _either(reader: ConfigReader, published: str, saved: str) -> bool:
    """A switch by its name in the published config, or the one that transformers saves."""
    if published in reader and saved in reader:
        reader.fail(f"has both {published} and {saved}; keep one")
    return reader.boolean(published, reader.boolean(saved, False))


INTERNLM3 = Family(
    name="internlm3",
    # transformers has no class of its own for it, and saves that of Llama.
    architectures=("InternLM3ForCausalLM", "LlamaForCausalLM"),
    translate=translate,
    hf_names=HF_NAMES,
    # GGUF has no architecture of this name: there it is a "llama", layout included.
    gguf_names=GGUF_NAMES,
    ignored=IGNORED,
    gguf_permuted_qk=True,
)
