"""What a model family is to the builder: a config translation and two name maps."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llmbuild.builder.models.config import DecoderConfig


@dataclass(frozen=True)
class Family:
    """Templates hold `{l}` where a layer's number stands.

    name: config.json's model_type. architectures: its `architectures` that are this family.
    translate: raw config -> DecoderConfig; raises ModelError.
    hf_names, gguf_names: canonical template -> the checkpoint's template.
    ignored: checkpoint templates that carry nothing.
    gguf_permuted_qk: GGUF files of the family keep rows of Q and K in interleaved rotary order.
    """

    name: str
    architectures: tuple[str, ...]
    translate: Callable[[dict[str, Any]], DecoderConfig]
    hf_names: Mapping[str, str]
    gguf_names: Mapping[str, str]
    ignored: tuple[str, ...]
    gguf_permuted_qk: bool
