"""Chooses a precision for each layer's K and V, or for each KV head's."""

from collections.abc import Mapping
from fnmatch import fnmatchcase

import msgspec

from llmbuild.builder.calibration.kv import measure_reaches
from llmbuild.builder.calibration.sensitivity import KVChange, with_neutral_kv_scales
from llmbuild.builder.graph.trace import trace
from llmbuild.builder.planning.part import Aim, Bench, Part
from llmbuild.builder.quantisation import kv_layout
from llmbuild.builder.recipe.kv_cache import KVOverride
from llmbuild.quant.kv import channel_scales
from llmbuild.quant.sensitivity import Choice, Option
from llmbuild.runtime.manifest import KVLayer, KVLayout

CANDIDATES = ("int8", "int4")
FULL = "bf16"  # what ratios are relative to

Slots = dict[str, list[str]]  # glob of an item -> the names of its KV heads' K or V


def kv_part(bench: Bench, aim: Aim, *, per_head: bool) -> Part:
    """Measure all that the recipe's own overrides leave open, in the candidates, and choose."""
    config, precision = bench.model.config, bench.recipe.precision
    kv = kv_layout(bench.resolved, config)
    slots = _open_slots(bench, kv, per_head)
    sizes = {
        match: {
            dtype: len(names) * kv.head_block_bytes(dtype) for dtype in (precision, *CANDIDATES)
        }
        for match, names in slots.items()
    }
    opened = {name for names in slots.values() for name in names}
    own = _dtypes(kv)
    fixed_bytes = sum(kv.head_block_bytes(own[name]) for name in own if name not in opened)
    full_bytes = len(own) * kv.head_block_bytes(FULL)
    aim.check(sizes, fixed_bytes, full_bytes)
    step = with_neutral_kv_scales(trace(config, "fp32"), config)
    with bench.stages.stage("calibrate KV cache"):
        reaches = measure_reaches(step, config, bench.read, bench.tokens)

    def change(dtypes: Mapping[str, str]) -> KVChange:
        layout = _with_dtypes(kv, dtypes)
        return KVChange(layout, channel_scales(layout, reaches))

    asked = [(match, dtype) for match in slots for dtype in CANDIDATES]
    changes = [change(dict.fromkeys(slots[match], dtype)) for match, dtype in asked]
    measured = dict(zip(asked, bench.measure("KV cache", step, changes), strict=True))
    items = {
        match: [
            Option(dtype, num_bytes, measured.get((match, dtype), 0.0))
            for dtype, num_bytes in each.items()
        ]
        for match, each in sizes.items()
    }
    choice = aim.choose(items, fixed_bytes, full_bytes)
    chosen = {
        name: choice[match].precision
        for match, names in slots.items()
        for name in names
        if choice[match].precision != precision
    }
    together = bench.measure("KV cache as chosen", step, [change(chosen)]) if chosen else [0.0]
    return Part(
        name="KV cache",
        unit="token",
        items=items,
        choice=choice,
        fixed_bytes=fixed_bytes,
        full_bytes=full_bytes,
        full_dtype=FULL,
        per=kv.block_size,
        together_kl_nats=together[0],
    )


def kv_overrides(choice: Choice) -> list[KVOverride]:
    """What a recipe has to say."""
    return [
        KVOverride.model_validate({"match": match, "dtype": option.precision})
        for match, option in choice.items()
    ]


def _dtypes(kv: KVLayout) -> dict[str, str]:
    """By the names that overrides match."""
    return {
        f"layers.{index}.{part}.{head}": dtype
        for index, layer in enumerate(kv.layers)
        for part, dtypes in (("k", layer.k_dtypes), ("v", layer.v_dtypes))
        for head, dtype in enumerate(dtypes)
    }


def _open_slots(bench: Bench, kv: KVLayout, per_head: bool) -> Slots:
    slots: Slots = {}
    for name in _dtypes(kv):
        if not any(fnmatchcase(name, own.match) for own in bench.recipe.kv_cache.overrides):
            match = name if per_head else f"{name.rpartition('.')[0]}.*"
            slots.setdefault(match, []).append(name)
    return slots


def _with_dtypes(kv: KVLayout, dtypes: Mapping[str, str]) -> KVLayout:
    """The layout with these dtypes by name, and all else in fp32."""

    def dtype(layer: int, part: str, head: int) -> str:
        return dtypes.get(f"layers.{layer}.{part}.{head}", "fp32")

    layers = [
        KVLayer.of_heads(
            (dtype(layer, "k", head), dtype(layer, "v", head)) for head in range(kv.num_kv_heads)
        )
        for layer in range(len(kv.layers))
    ]
    return msgspec.structs.replace(kv, layers=layers)
