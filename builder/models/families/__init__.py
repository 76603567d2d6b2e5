"""The model families. A new one is a file here with its Family record, listed in FAMILIES."""

from typing import Any

from llmbuild.builder.models.families.family import Family
from llmbuild.builder.models.families.llama import LLAMA
from llmbuild.builder.models.families.mistral import MISTRAL
from llmbuild.builder.models.families.qwen2 import QWEN2
from llmbuild.builder.models.families.qwen3 import QWEN3
from llmbuild.errors import ModelError

__all__ = ["FAMILIES", "Family", "family_of"]

FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3)


def family_of(config: dict[str, Any]) -> Family:
    """The family of a raw config, by its architecture and its model_type; where both stand they
    must agree. Raises ModelError, listing the known families."""
    architectures, model_type = config.get("architectures") or [], config.get("model_type")
    if not isinstance(architectures, list):
        raise ModelError(f"architectures is {architectures!r}; allowed is a list of names.")
    if architectures or model_type:
        for family in FAMILIES:
            known_names = all(name in family.architectures for name in architectures)
            if known_names and model_type in (family.name, None):
                return family
    known = ", ".join(f"{family.name} ({'/'.join(family.architectures)})" for family in FAMILIES)
    raise ModelError(
        f"No known model family has model_type {model_type!r} with architectures "
        f"{architectures!r}. Known are: {known}."
    )
