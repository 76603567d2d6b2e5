"""The model families. A new one is a file here with its Family record, listed in FAMILIES."""

from typing import Any

from llmbuild.builder.models.families.cohere import COHERE
from llmbuild.builder.models.families.cohere2 import COHERE2
from llmbuild.builder.models.families.exaone import EXAONE
from llmbuild.builder.models.families.exaone4 import EXAONE4
from llmbuild.builder.models.families.family import Family
from llmbuild.builder.models.families.gemma import GEMMA
from llmbuild.builder.models.families.gemma2 import GEMMA2
from llmbuild.builder.models.families.gemma3 import GEMMA3_TEXT
from llmbuild.builder.models.families.gpt2 import GPT2
from llmbuild.builder.models.families.gpt_neox import GPT_NEOX
from llmbuild.builder.models.families.granite import GRANITE
from llmbuild.builder.models.families.granitemoe import GRANITEMOE
from llmbuild.builder.models.families.granitemoeshared import GRANITEMOESHARED
from llmbuild.builder.models.families.internlm2 import INTERNLM2
from llmbuild.builder.models.families.internlm3 import INTERNLM3
from llmbuild.builder.models.families.llama import LLAMA
from llmbuild.builder.models.families.ministral import MINISTRAL
from llmbuild.builder.models.families.mistral import MISTRAL
from llmbuild.builder.models.families.mixtral import MIXTRAL
from llmbuild.builder.models.families.olmo2 import OLMO2
from llmbuild.builder.models.families.olmo3 import OLMO3
from llmbuild.builder.models.families.olmoe import OLMOE
from llmbuild.builder.models.families.phi3 import PHI3
from llmbuild.builder.models.families.qwen2 import QWEN2
from llmbuild.builder.models.families.qwen2_moe import QWEN2_MOE
from llmbuild.builder.models.families.qwen3 import QWEN3
from llmbuild.builder.models.families.qwen3_moe import QWEN3_MOE
from llmbuild.builder.models.families.seed_oss import SEED_OSS
from llmbuild.builder.models.families.smollm3 import SMOLLM3
from llmbuild.builder.models.families.starcoder2 import STARCODER2
from llmbuild.errors import ModelError

__all__ = ["FAMILIES", "Family", "family_of"]

FAMILIES = (
    COHERE,
    COHERE2,
    EXAONE4,
    GEMMA,
    GEMMA2,
    GEMMA3_TEXT,
    GPT2,
    GPT_NEOX,
    GRANITE,
    GRANITEMOE,
    GRANITEMOESHARED,
    INTERNLM2,
    LLAMA,
    EXAONE,  # after LLAMA, as its exports state that architecture
    INTERNLM3,  # likewise
    MINISTRAL,
    MISTRAL,
    MIXTRAL,
    OLMO2,
    OLMO3,
    OLMOE,
    PHI3,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    SEED_OSS,
    SMOLLM3,
    STARCODER2,
)


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
    if "text_config" in config:
        raise ModelError(
            f"The config, of model_type {model_type!r}, is that of a multimodal model; only text "
            "models are supported. Save its text model as a checkpoint of its own."
        )
    known = ", ".join(sorted(family.name for family in FAMILIES))
    raise ModelError(
        f"No known model family has model_type {model_type!r} with architectures "
        f"{architectures!r}. Known are: {known}; `llmbuild models` says more of each."
    )
