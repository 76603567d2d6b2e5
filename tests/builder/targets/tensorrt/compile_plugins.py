"""Registers plugins with a stand-in for tensorrt.plugin, compiles their kernels, and prints what
TensorRT would be given. In a process of its own, in which Triton compiles."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from stand_in_plugin import Definition, StandInPlugin, TensorDesc

from llmbuild.builder.targets.tensorrt.emulation.sizes import evaluate, named
from llmbuild.builder.targets.tensorrt.plugins import PluginRegistry
from llmbuild.plugins.common.attention_variant import SMOLLM2
from llmbuild.plugins.common.tensorrt_plugin import TENSOR_DTYPES, Plugin
from llmbuild.plugins.common.weight_format import INT4
from llmbuild.plugins.linear.tensorrt import quantised_linear
from llmbuild.plugins.paged_attention.tensorrt import decode, prefill
from llmbuild.plugins.paged_attention.triton import AttentionType
from llmbuild.plugins.rope_kv_write.tensorrt import rope_kv_write

GIVEN = {"T": 37, "S": 5, "B": 9}


def plugins(sm: int) -> dict[str, tuple[Plugin, dict[str, tuple[Any, ...]]]]:
    """With the shapes of inputs whose sizes matter; others are [1]."""
    tokens, sequences = named("T"), named("S")
    of = AttentionType(SMOLLM2, "fp16", "int8", "int8", scale=0.125)
    q, tables = (tokens, 576), (sequences, named("B"))
    rope = rope_kv_write(sm, SMOLLM2, "fp16", ("int8", "int8"), rotary_dim=64)
    linear = quantised_linear(sm, INT4, "fp16", (96, 128), has_bias=False)
    return {
        "rope_kv_write": (rope, {"q": q, "block_tables": tables}),
        "decode": (decode(sm, of, 8), {"q": q, "block_tables": tables}),
        "prefill": (prefill(sm, of, 8), {"q": q, "block_tables": tables}),
        "linear": (linear, {"x": (tokens, 128), "codes": (96, 64)}),
    }


def told(definition: Definition, plugin: Plugin, shapes: dict[str, tuple[Any, ...]]) -> Any:
    inputs = [
        TensorDesc(shapes.get(name, (1,)), TENSOR_DTYPES[kind])
        for name, kind in plugin.inputs.items()
    ]
    outputs = definition.describe(*inputs)
    assert len(outputs) == definition.num_outputs
    kernels = []
    choices = definition.autotune(*inputs, outputs) if definition.autotune else []
    for tactic in choices[0].tactics if choices else [0]:
        assert definition.implement is not None
        entry, ptx, parameters, integers = definition.implement(*inputs, outputs, tactic)
        parts = ptx.partition(".entry")[2].partition(")")[0]
        kernels.append(
            {
                "is_entry": f".entry {entry}(" in ptx,
                "pointers": parts.count(".param .u64"),
                "integers": parts.count(".param .u32"),
                "given": [evaluate(each.value, GIVEN) for each in integers],
                "grid": [
                    evaluate(size, GIVEN)
                    for size in (parameters.grid_x, parameters.grid_y, parameters.grid_z)
                ],
                "threads": parameters.block_x,
                "shared": parameters.shared_mem,
            }
        )
    return {
        "outputs": [
            [each.dtype, [evaluate(size, GIVEN) for size in each.shape_expr]] for each in outputs
        ],
        "tensors": len(plugin.inputs) + len(plugin.outputs),
        "types": choices[0].types if choices else "",
        "kernels": kernels,
    }


def main() -> None:
    requests = SimpleNamespace(STRICT_AOT="STRICT_AOT")
    dtypes = {name: name for name in TENSOR_DTYPES.values()}
    trt = SimpleNamespace(QuickPluginCreationRequest=requests, **dtypes)
    result = {}
    for sm in map(int, sys.argv[1:]):
        trtp = StandInPlugin()
        registry = PluginRegistry(trt, trtp, sm)
        made = plugins(sm)
        creations = {
            name: registry.instantiate(plugin, [None] * len(plugin.inputs))[-1]
            for name, (plugin, _) in made.items()
        }
        registry.instantiate(made["linear"][0], [None] * len(made["linear"][0].inputs))  # again
        registry.compile(plugin for plugin, _ in made.values())
        result[sm] = {
            name: told(creations[name], plugin, shapes) for name, (plugin, shapes) in made.items()
        }
    print(json.dumps(result))


main()
