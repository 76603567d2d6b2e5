"""An executable's precisions are read from what it is emitted from, and held to the manifest's."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from manifests import whole_rank

from llmbuild.builder.compile import compile
from llmbuild.builder.graph.pipeline import run_passes
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.builder.models.canonical import expected_tensors
from llmbuild.builder.models.config import DecoderConfig, MoeConfig
from llmbuild.builder.report.compiled_precision import Activations, require_planned
from llmbuild.builder.targets.cpu.lower import lower
from llmbuild.builder.targets.cpu.lowering import Lowering
from llmbuild.builder.targets.cpu.plan import Argument, Call, PackedWeight, Pool, StepPlan, View
from llmbuild.builder.targets.cpu.read_precision import read_precision
from llmbuild.errors import InternalError
from llmbuild.quant.grid import WeightGrid
from llmbuild.quant.plan import QuantPlan
from llmbuild.runtime.manifest import (
    ALONE,
    SCHEMA_VERSION,
    KVLayout,
    Limits,
    Manifest,
    QuantisedTensor,
)
from llmbuild.runtime.target import CpuTarget

WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "head_dim": 16}
Q, K, V, OUT = (f"layers.0.attention.{part}_proj.weight" for part in "qkvo")
GATE, UP, DOWN = (f"layers.1.mlp.{part}_proj.weight" for part in ("gate", "up", "down"))
PLANNED = {  # name: grid, group of activations, whether their scales are static
    Q: (WeightGrid(4, 32, True), 32, False),
    K: (WeightGrid(4, 32, True), 32, False),
    V: (WeightGrid(8, 0, True), 64, True),
    OUT: (WeightGrid(4, 64, True), 32, False),  # one group a row
    GATE: (WeightGrid(4, 32, False), 0, False),
    UP: (WeightGrid(8, 32, False, True), 32, False),
    DOWN: (WeightGrid(8, 96, False), 32, True),
    "embed.weight": (WeightGrid(4, 32, False), 32, False),  # a table: no activations meet it
    "lm_head.weight": (WeightGrid(8, 32, True), 64, False),
}
KV = (("int8", "bf16"), ("int4", "bf16"))


class Engine:
    """A plan with every kind of grid, lowered, with the manifest that states it."""

    def __init__(self, step: StepGraph, config: DecoderConfig, kv: KVLayout) -> None:
        scales = {
            name: np.ones(step.weights[name].shape[1] // group, np.float32)
            for name, (_, group, static) in PLANNED.items()
            if static
        }
        quant_plan = QuantPlan(
            {name: grid for name, (grid, _, _) in PLANNED.items()},
            {name: group for name, (_, group, _) in PLANNED.items() if group},
            static=frozenset(scales),
            activation_scales=scales,
        )
        run_passes(step, plan=quant_plan)
        self.step, self.plan = step, lower(step, config, kv)
        quantised = {
            name: QuantisedTensor(
                bits=grid.bits,
                group_size=grid.group_size,
                symmetric=grid.symmetric,
                zero_points=grid.zero_points,
                activation_group=group,
                static_activations=static,
            )
            for name, (grid, group, static) in PLANNED.items()
        }
        self.manifest = manifest_of(config, kv, quantised)

    def require(self, plan: StepPlan | None = None, **changed: Any) -> None:
        """Hold a plan, by default its own, to the manifest, by default its own."""
        manifest = msgspec.structs.replace(self.manifest, **changed)
        compiled = read_precision(plan or self.plan, self.step)
        require_planned(compiled, manifest, self.step, manifest.kv)


def manifest_of(
    config: DecoderConfig, kv: KVLayout, quantised: dict[str, QuantisedTensor]
) -> Manifest:
    return Manifest(
        schema_version=SCHEMA_VERSION,
        llmbuild_version="0",
        name="m",
        model={},
        vocab_size=config.vocab_size,
        precision="bf16",
        quantised=quantised,
        target=CpuTarget(machine="m", isa_levels=[], compiler="c", compiler_flags={}),
        limits=Limits(max_sequence_length=64, max_step_tokens=8, max_sequences=2),
        buckets=[1],
        kv=kv,
        parallel=ALONE,
        ranks=[whole_rank(kv, config.vocab_size)],
        files={},
    )


@pytest.fixture
def engine(
    traced: Callable[..., StepGraph],
    decoder_config: Callable[..., DecoderConfig],
    kv_layout: Callable[..., KVLayout],
) -> Engine:
    config = decoder_config(**WIDE)
    return Engine(traced("bf16", **WIDE), config, kv_layout(config, *KV))


def changed(plan: StepPlan, change: Callable[[Call], Call]) -> StepPlan:
    calls = tuple(map(change, plan.calls))
    assert calls != plan.calls
    return replace(plan, calls=calls)


def reads(call: Call, name: str) -> bool:
    return any(isinstance(a, PackedWeight) and name in a.name.split("+") for a in call.arguments)


def with_template(call: Call, index: int, value: str | int) -> Call:
    return replace(call, template=(*call.template[:index], value, *call.template[index + 1 :]))


def test_every_matrix_and_every_part_of_the_kv_cache_is_read_back(engine: Engine) -> None:
    found = read_precision(engine.plan, engine.step)
    grids = {name: grid for name, (grid, _, _) in PLANNED.items()}
    grids[OUT] = WeightGrid(4, 0, True)
    grids[DOWN] = WeightGrid(8, 0, False)
    assert {name: found.weights[name] for name in grids} == {n: {g} for n, g in grids.items()}
    others = found.weights.keys() - grids.keys()
    assert len(others) == 3 + 4  # of layer 0 and layer 1
    assert all(found.weights[name] == {"bf16"} for name in others)
    assert found.activations[Q] == {Activations(32)}
    assert found.activations[V] == {Activations(64, True)}
    assert found.activations[GATE] == {Activations()}
    assert "embed.weight" not in found.activations
    dtypes = {"k.0": "int8", "k.1": "int4", "v.0": "bf16", "v.1": "bf16"}
    assert found.kv == {f"layers.{n}.{part}": {d} for n in (0, 1) for part, d in dtypes.items()}


def test_an_engine_as_planned_passes(engine: Engine) -> None:
    engine.require()


def test_models_of_other_kinds_have_all_their_matrices_read_back(
    lowerable: Callable[..., StepGraph],
    decoder_config: Callable[..., DecoderConfig],
    kv_layout: Callable[..., KVLayout],
) -> None:
    moe = MoeConfig(5, 2, 32, normalise=True, shared_size=64, shared_gate=True)
    kinds: list[dict[str, Any]] = [
        {"moe": moe, "moe_layers": (True, False)},
        {"tie_embeddings": True, "qkv_bias": True, "mlp_bias": True},
        {"gated_mlp": False, "qk_norm": "head"},
    ]
    for kind in kinds:
        config, step = decoder_config(**kind), lowerable("bf16", **kind)
        kv = kv_layout(config, ("bf16", "bf16"))
        compiled = read_precision(lower(step, config, kv), step)
        require_planned(compiled, manifest_of(config, kv, {}), step, kv)
        matrices = {name for name, shape in expected_tensors(config).items() if len(shape) > 1}
        assert compiled.weights.keys() == matrices


@pytest.mark.parametrize(
    ("name", "kernel_type", "said"),
    [
        (Q, "Grid<8, 32, false>", "int4, groups of 32, symmetric and int8, groups of 32, symm"),
        (V, "Grid<8, 32, false>", "int8, groups of 32, symmetric and int8, one group a row"),
        (OUT, "Grid<4, 64, true>", "int4, one group a row, symmetric and int4, one group a row, w"),
        (GATE, "Grid<4, 32, true, true>", "int4, groups of 32, with minimum and int4, groups of"),
        ("embed.weight", "bf16", "bf16 and int4, groups of 32, with minimum"),
        ("layers.1.attention.o_proj.weight", "float", "bf16 and fp32"),
    ],
)
def test_a_kernel_of_another_type_is_named(
    engine: Engine, name: str, kernel_type: str, said: str
) -> None:
    plan = changed(engine.plan, lambda c: with_template(c, 0, kernel_type) if reads(c, name) else c)
    with pytest.raises(InternalError) as error:
        engine.require(plan)
    lines = str(error.value).splitlines()[1:]
    (line,) = [line for line in lines if line.startswith(f"  {name}: weights planned ")]
    assert f", compiled {said}" in line
    merged = {Q: 2}  # Q and K are one weight
    assert len(lines) == merged.get(name, 1)


def test_a_weight_packed_on_another_grid_is_named(engine: Engine) -> None:
    def repack(argument: Argument) -> Argument:
        if isinstance(argument, PackedWeight) and argument.name == UP:
            return replace(argument, grid=WeightGrid(8, 32, True))
        return argument

    def change(call: Call) -> Call:
        return replace(call, arguments=tuple(map(repack, call.arguments)))

    with pytest.raises(InternalError, match=f"{UP}: weights planned int8, groups of 32, with zero"):
        engine.require(changed(engine.plan, change))


def test_activations_that_are_rounded_otherwise_are_named(engine: Engine) -> None:
    """By the kernel that makes them, or by the linear that reads them."""
    name = "lm_head.weight"
    (head,) = [call for call in engine.plan.calls if reads(call, name)]
    view = head.arguments[0]
    assert isinstance(view, View)
    (maker,) = [call for call in engine.plan.calls if view.buffer in call.writes]
    assert (head.kernel, maker.kernel) == ("int8_linear", "add_rms_norm_int8")
    for call, place in ((head, 3), (maker, 4)):
        assert call.template[place] == 64
        wrong = with_template(call, place, 32)
        plan = changed(engine.plan, lambda c, call=call, wrong=wrong: wrong if c is call else c)
        with pytest.raises(InternalError, match=f"{name}: activations planned int8, groups of 64"):
            engine.require(plan)


def test_static_scales_that_became_dynamic_are_named(engine: Engine) -> None:
    rounding = ("quantise_rows", "rms_norm_int8", "add_rms_norm_int8", "gated_activation_int8")

    def change(call: Call) -> Call:
        static = call.kernel in rounding and call.template[-1] == "true"
        return replace(call, template=call.template[:-1]) if static else call

    with pytest.raises(InternalError) as error:
        engine.require(changed(engine.plan, change))
    lines = str(error.value).splitlines()[1:]
    assert [line.split(":")[0].strip() for line in lines] == [V, DOWN]
    assert all("static scales, compiled int8" in line for line in lines)


@pytest.mark.parametrize("kernel", ["rope_kv_write", "paged_attention"])
def test_a_pool_of_another_type_is_named_by_layer_and_head(engine: Engine, kernel: str) -> None:
    def change(call: Call) -> Call:
        own = call.kernel == kernel and Pool(1, 1, "k") in call.arguments
        return with_template(call, 0, "int8_t") if own else call

    with pytest.raises(InternalError) as error:
        engine.require(changed(engine.plan, change))
    assert str(error.value).splitlines()[1:] == [
        "  layers.1.k.1: KV cache planned int4, compiled int4 and int8"
    ]


def test_a_plan_of_other_pools_than_the_manifest_is_named(
    engine: Engine, kv_layout: Callable[..., KVLayout], decoder_config: Callable[..., DecoderConfig]
) -> None:
    other = kv_layout(decoder_config(**WIDE), ("int8", "bf16"), ("int8", "int8"))
    with pytest.raises(InternalError) as error:
        engine.require(replace(engine.plan, kv=other))
    said = str(error.value)
    assert all(f"layers.{n}.k.1: KV cache planned int4" in said for n in (0, 1))
    assert all(f"layers.{n}.v.1: KV cache planned bf16" in said for n in (0, 1))
    assert "k.0" not in said
    with pytest.raises(InternalError, match=r"layers\.0\.v\.1: KV cache planned int8"):
        engine.require(kv=other)


def test_what_no_call_reads_is_named(engine: Engine) -> None:
    calls = tuple(
        call
        for call in engine.plan.calls
        if not reads(call, GATE) and Pool(0, 1, "v") not in call.arguments
    )
    with pytest.raises(InternalError) as error:
        engine.require(replace(engine.plan, calls=calls))
    said = str(error.value)
    assert f"{GATE}: weights planned int4, groups of 32, with minimum, compiled not at all" in said
    assert "layers.0.v.1: KV cache planned bf16, compiled not at all" in said


def test_every_tensor_that_differs_is_named_at_once(engine: Engine) -> None:
    left = {name: each for name, each in engine.manifest.quantised.items() if name not in (Q, DOWN)}
    with pytest.raises(InternalError) as error:
        engine.require(quantised=left)
    lines = str(error.value).splitlines()[1:]
    assert {line.split(":")[0].strip() for line in lines} == {Q, DOWN}
    assert f"  {Q}: weights planned bf16, compiled int4, groups of 32, symmetric" in lines
    assert f"  {Q}: activations planned fp32, compiled int8, groups of 32, dynamic scales" in lines


def test_a_build_that_leaves_activations_as_they_are_publishes_nothing(
    save_tiny_llama: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault that comparing logits would not find: the engine is only more exact than planned."""
    monkeypatch.setattr(Lowering, "rounding", lambda self, node: None)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 1}
    recipe = save_tiny_llama(tmp_path / "source", **sizes)
    with pytest.raises(InternalError, match=r"q_proj\.weight: activations planned int8.*fp32"):
        compile(recipe, tmp_path / "engine", ["quantisation=w8a8"])
    assert not (tmp_path / "engine").exists()
