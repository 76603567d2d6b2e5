"""What a model family is to the builder: a config translation and two maps of names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from llmbuild.builder.models.config import DecoderConfig

Shape = tuple[int, ...]
Tensor = NDArray[Any]


@dataclass(frozen=True)
class Part:
    """A canonical tensor that is taken out of a stored one: a slice of a fused projection, a
    transposed matrix. shape: of the stored tensor. take: stored tensor -> canonical one."""

    template: str
    shape: Callable[[DecoderConfig], Shape]
    take: Callable[[Tensor, DecoderConfig], Tensor]


@dataclass(frozen=True)
class Experts:
    """A canonical stack [experts, rows, columns] of stored matrices: for each expert (`{e}` in
    the templates) the rows of every template, one below the other."""

    templates: tuple[str, ...]


@dataclass(frozen=True)
class StackedExperts:
    """The same where each template is one stored stack [experts, rows, columns]."""

    templates: tuple[str, ...]


Source = str | Part | Experts | StackedExperts  # a str: the stored tensor is the canonical one


@dataclass(frozen=True)
class Family:
    """Templates hold `{l}` where a layer's number stands.

    name: config.json's model_type. architectures: its `architectures` that are this family.
    translate: raw config -> DecoderConfig; raises ModelError.
    hf_names, gguf_names: canonical template -> where the checkpoint has it.
    ignored: checkpoint templates that carry nothing.
    gguf_permuted_qk: GGUF files of the family keep rows of Q and K in interleaved rotary order.
    gguf_adds_one: GGUF files of the family hold 1 + w where the Hugging Face ones hold w.
    bare_prefix: begins the names of hf_names, and checkpoints of the model without its head leave
    it out.
    """

    name: str
    architectures: tuple[str, ...]
    translate: Callable[[dict[str, Any]], DecoderConfig]
    hf_names: Mapping[str, Source]
    gguf_names: Mapping[str, Source]
    ignored: tuple[str, ...]
    gguf_permuted_qk: bool = False
    gguf_adds_one: bool = False
    bare_prefix: str = ""
