"""The table of model families, made from their code: what each covers, and the features of the
decoder that its translation sets."""

import ast
import dataclasses
import inspect
import sys
from types import ModuleType

from llmbuild.builder.checkpoint.gguf_architectures import ARCHITECTURES
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.models.families import FAMILIES, Family
from llmbuild.runtime.target import CPU, TENSORRT, TENSORRT_RTX

# Fields of the config record that are features, as a reader of the table knows them.
FEATURES = {
    "activation": "its own activation",
    "attention_scale": "attention multiplier",
    "attention_soft_cap": "attention soft cap",
    "embed_scale": "embedding multiplier",
    "gated_mlp": "plain MLP",
    "layer_ropes": "RoPE by layer",
    "learned_positions": "learned positions",
    "logit_scale": "logit multiplier",
    "logit_soft_cap": "logit soft cap",
    "mlp_bias": "MLP bias",
    "moe": "mixture of experts",
    "norm": "its own norm",
    "o_bias": "output bias",
    "parallel_residual": "parallel residual",
    "post_norm": "post-norms",
    "qk_norm": "QK-norm",
    "qkv_bias": "QKV bias",
    "residual_scale": "residual multiplier",
    "rope_interleaved": "interleaved RoPE",
    "windows": "sliding windows",
}
# Features of the decoder that a target lacks. Windows are none of tensorrt-rtx: sequences that are
# shorter don't need them.
LACKS = {CPU: set[str](), TENSORRT: {"moe"}, TENSORRT_RTX: {"attention_soft_cap", "moe"}}
_SHARED = "common"  # the module of what every family reads; its keywords are no one's feature
_PACKAGE = "llmbuild.builder.models.families"


def rows() -> list[tuple[str, str, str, str, str]]:
    """For each family: its name, what it covers, its features, the formats it is read from, the
    targets it compiles for. Every family is one decoder, so `cpu` has all; a feature in
    LACKS may be one that only some of a family's models have, so the target is left out."""
    from_gguf = {kind.model_type for kinds in ARCHITECTURES.values() for kind in kinds}
    return [
        (
            family.name,
            _covers(module_of(family)),
            ", ".join(FEATURES[field] for field in features(family)) or "-",
            "safetensors, GGUF" if family.name in from_gguf else "safetensors",
            _targets(family),
        )
        for family in sorted(FAMILIES, key=lambda family: family.name)
    ]


def _targets(family: Family) -> str:
    return ", ".join(kind for kind, lacks in LACKS.items() if not lacks & {*features(family)})


def features(family: Family) -> list[str]:
    """The features that a family's translation can set, sorted: every keyword with the name of
    one in its module, and in the sibling modules whose readers it calls."""
    known = {field.name for field in dataclasses.fields(DecoderConfig)} & FEATURES.keys()
    return sorted(known & _keywords(module_of(family), set()))


def _keywords(module: ModuleType, seen: set[str]) -> set[str]:
    seen.add(module.__name__)
    tree = ast.parse(inspect.getsource(module))
    found = {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(_PACKAGE):
            continue
        sibling = sys.modules[str(node.module)]
        calls_its_reader = any(alias.name.startswith("read_") for alias in node.names)
        if calls_its_reader and sibling.__name__ not in {*seen, f"{_PACKAGE}.{_SHARED}"}:
            found |= _keywords(sibling, seen)
    return found


def _covers(module: ModuleType) -> str:
    """The first sentence of a family module's docstring, up to its colon: the models."""
    text = " ".join((module.__doc__ or "").split())
    return text.split(":")[0].rstrip(".")


def module_of(family: Family) -> ModuleType:
    return sys.modules[family.translate.__module__]


def markdown() -> str:
    """The table as Markdown, for docs/models.md."""
    head = ("family", "models", "features", "formats", "targets")
    lines = [head, tuple("---" for _ in head), *rows()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
