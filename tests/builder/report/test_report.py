"""The build report's numbers, worked out by hand."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from manifests import whole_rank

from llmbuild.builder.assemble import Assembled
from llmbuild.builder.gate import GateResult, Row
from llmbuild.builder.graph.pipeline import run_passes
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.quantisation import untie_head
from llmbuild.builder.recipe.calibration import ResolvedCalibration
from llmbuild.builder.report.page import write_report
from llmbuild.builder.report.report import CalibrationData, KVDtypes, Report, make_report
from llmbuild.builder.targets.cpu.lower import lower
from llmbuild.quant.grid import WeightGrid
from llmbuild.quant.plan import QuantPlan
from llmbuild.runtime.manifest import (
    ALONE,
    SCHEMA_VERSION,
    KVLayout,
    Limits,
    Manifest,
)
from llmbuild.runtime.target import CpuTarget

VERIFIED = {"x86-64-v4": None, "x86-64-v3": 1.5e-6}
SECONDS = {"fetch": 0.5, "trace": 2.0}
GATE = GateResult([Row("KL in nats a token", 0.25, 0.5, False, "5 windows")])
CALIBRATION = ResolvedCalibration(data="some.txt", sequences=3, length=7, seed=11)


@pytest.fixture
def report_of(
    traced: Callable[..., StepGraph],
    decoder_config: Callable[..., DecoderConfig],
    kv_layout: Callable[..., KVLayout],
) -> Callable[..., Report]:
    """report_of(max_sequence_length, plan=QuantPlan(), losses=({}, {}), kv=bf16, **config
    overrides), in bf16. losses: of products, and of rounding."""

    def build(
        max_sequence_length: int,
        plan: QuantPlan | None = None,
        losses: tuple[dict[str, float], dict[str, float]] = ({}, {}),
        kv: tuple[tuple[str, str], ...] = (("bf16", "bf16"),),
        **overrides: Any,
    ) -> Report:
        plan = plan or QuantPlan()
        config, step = decoder_config(**overrides), traced("bf16", **overrides)
        untie_head(step, plan)
        run_passes(step, plan=plan)
        layout = kv_layout(config, *kv)
        manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            llmbuild_version="0",
            name="m",
            model={},
            vocab_size=config.vocab_size,
            precision="bf16",
            quantised={},
            target=CpuTarget(machine="m", isa_levels=[], compiler="c", compiler_flags={}),
            limits=Limits(
                max_sequence_length=max_sequence_length, max_step_tokens=8, max_sequences=2
            ),
            buckets=[1],
            kv=layout,
            parallel=ALONE,
            ranks=[whole_rank(layout, config.vocab_size, arena_bytes=123_456)],
            files={},
        )
        lowered = lower(step, config, layout)
        assembled = Assembled(
            *(manifest, step, plan, lowered, lambda name: np.empty(0)),
            graphs=[],
            rank_plans=[lowered],
            product_losses=losses[0],
        )
        return make_report(
            assembled,
            config,
            VERIFIED,
            GATE,
            1e-4,
            SECONDS,
            rounding_losses=losses[1],
            calibration=CALIBRATION,
        )

    return build


def on_grids(grids: dict[str, WeightGrid], group: int = 32) -> QuantPlan:
    return QuantPlan(grids, dict.fromkeys(grids, group))


# Hidden 20, inner 19, vocabulary 37; 6 heads in 2 groups of 4: Q is 24 wide, K and V are 8.
LAYER_MACS = 40 * 20 + 20 * 24 + 38 * 20 + 20 * 19
HEAD_MACS = 37 * 20
# In tiles of 16 rows: 48 for 40, 32 for 20, 48 for 38 and 37. All of them fill 64 bytes evenly.
LAYER_BYTES = 2 * (48 * 20 + 32 * 24 + 48 * 20 + 32 * 19)
HEAD_BYTES = 2 * 48 * 20


def test_bytes_and_operations_of_a_decode_step_are_those_counted_by_hand(
    report_of: Callable[..., Report],
) -> None:
    report = report_of(3000)
    assert [step.context_tokens for step in report.decode] == [128, 2048, 3000]
    for step in report.decode:
        tokens = step.context_tokens
        assert step.weight_bytes == 2 * LAYER_BYTES + HEAD_BYTES
        assert step.kv_bytes == tokens * 2 * 2 * (2 * 4) * 2  # layers, K and V, items, bytes
        attention_macs = 2 * (6 * 4) * tokens  # scores and sums of one layer
        assert step.operations == 2 * (2 * (LAYER_MACS + attention_macs) + HEAD_MACS)
        ratio = step.operations / (step.weight_bytes + step.kv_bytes)
        assert step.operations_per_byte == pytest.approx(ratio)


def test_tied_embedding_counts_once_and_an_untied_one_is_not_read_whole(
    report_of: Callable[..., Report],
) -> None:
    tied, untied = report_of(64, tie_embeddings=True), report_of(64)
    assert tied.decode == untied.decode
    embedding_bytes = 2 * 37 * 20 + 56  # rows, padded to 64 bytes
    assert untied.weights_bytes - tied.weights_bytes == embedding_bytes


def test_weights_are_summed_by_dtype_as_they_lie_in_the_file(
    report_of: Callable[..., Report],
) -> None:
    report = report_of(64, tie_embeddings=True, num_layers=1, windows=(0,))
    norms = 3 * 128  # 20 floats, padded to 64 bytes
    assert report.weights_by_dtype == {"bf16": LAYER_BYTES + HEAD_BYTES, "fp32": norms + 64}
    assert report.weights_bytes == sum(report.weights_by_dtype.values())
    assert report.kv_bytes_per_token == 2 * (2 * 4) * 2


def test_a_step_reads_codes_and_scales_of_matrices_but_only_rows_of_a_table(
    report_of: Callable[..., Report],
) -> None:
    """Hidden 64, 37 rows in 48; of each group of 32 codes of 4 bits, a scale and a minimum."""
    grid, hidden = WeightGrid(4, 32, False), {"hidden_size": 64}
    plain = report_of(64, **hidden)
    head = report_of(64, on_grids({"lm_head.weight": grid}), **hidden)
    both = dict.fromkeys(("lm_head.weight", "embed.weight"), grid)
    with_table = report_of(64, on_grids(both), **hidden)
    matrix_bytes = 48 * 2 * (16 + 2 + 2)
    assert plain.decode[0].weight_bytes - head.decode[0].weight_bytes == 2 * 48 * 64 - matrix_bytes
    assert head.decode == with_table.decode
    assert plain.decode[0].operations == head.decode[0].operations
    assert head.weights_by_dtype["int4"] == matrix_bytes
    assert with_table.weights_by_dtype["int4"] == 2 * matrix_bytes
    assert plain.weights_bytes - head.weights_bytes == 2 * 48 * 64 - matrix_bytes


def test_contexts_beyond_the_longest_sequence_become_that_one(
    report_of: Callable[..., Report],
) -> None:
    assert [step.context_tokens for step in report_of(5).decode] == [5]
    assert [step.context_tokens for step in report_of(9000).decode] == [128, 2048, 8192]


def test_json_holds_the_whole_report(report_of: Callable[..., Report], tmp_path: Path) -> None:
    report = report_of(64)
    write_report(report, tmp_path)
    content = (tmp_path / "report.json").read_bytes()
    assert msgspec.json.decode(content, type=Report) == report
    assert json.loads(content)["arena_bytes"] == 123_456


def test_each_matrix_has_its_compiled_precision_and_its_loss(
    report_of: Callable[..., Report],
) -> None:
    """Q, K and V are merged in the engine, gate and up not: they have two grids."""
    row, groups = WeightGrid(8, 0, True), WeightGrid(4, 32, False)
    qkv = [f"layers.0.attention.{part}_proj.weight" for part in "qkv"]
    up, head = "layers.0.mlp.up_proj.weight", "lm_head.weight"
    plan = QuantPlan({**dict.fromkeys(qkv, row), up: groups, head: row}, dict.fromkeys(qkv, 64))
    report = report_of(
        64,
        plan,
        ({qkv[1]: 0.25}, {up: 0.5, head: 0.0}),
        hidden_size=64,
        num_layers=1,
        windows=(0,),
        layer_ropes=(0,),
    )
    found = {m.name: (m.code, m.bits, m.loss, m.loss_of) for m in report.matrices}
    assert len(report.matrices) == len(found) == 9
    assert found == {
        "embed.weight": ("bf16", 16, None, ""),
        qkv[0]: ("w8 row s, a8", 8, None, ""),
        qkv[1]: ("w8 row s, a8", 8, 0.25, "products"),
        qkv[2]: ("w8 row s, a8", 8, None, ""),
        "layers.0.attention.o_proj.weight": ("bf16", 16, None, ""),
        "layers.0.mlp.gate_proj.weight": ("bf16", 16, None, ""),
        up: ("w4 g32 m", 4, 0.5, "weights"),
        "layers.0.mlp.down_proj.weight": ("bf16", 16, None, ""),
        head: ("w8 row s", 8, 0.0, "weights"),
    }
    activations = {m.name: m.activations for m in report.matrices}
    assert activations["embed.weight"] == ""
    assert activations[qkv[0]] == "int8, groups of 64, dynamic scales"
    assert activations[up] == "fp32"


def test_kv_plan_is_stated_by_layer_and_head_with_its_bytes(
    report_of: Callable[..., Report],
) -> None:
    """Two heads of 4 items: int8 takes 4 bytes and a scale of 4, int4 takes 2 and 4."""
    report = report_of(64, kv=(("int8", "bf16"), ("bf16", "int4")))
    assert report.kv == [KVDtypes(["int8", "bf16"], ["bf16", "int4"])] * 2
    assert report.bf16_kv_bytes_per_token == 2 * 2 * 2 * 4 * 2
    assert report.kv_bytes_per_token == 2 * ((4 + 4) + 8 + 8 + (2 + 4))


def test_unquantised_weights_are_those_of_the_same_model_without_a_plan(
    report_of: Callable[..., Report],
) -> None:
    """Also where the plan gives a tied head a matrix of its own."""
    sizes: dict[str, Any] = {"hidden_size": 64, "tie_embeddings": True}
    plain = report_of(64, **sizes)
    matrices = [f"layers.1.mlp.{part}_proj.weight" for part in ("gate", "up")]
    for head in ("embed.weight", "lm_head.weight"):
        plan = on_grids(dict.fromkeys([*matrices, head], WeightGrid(4, 32, True)))
        report = report_of(64, plan, **sizes)
        padding_bytes = 11 * 64 * 2 if head == "embed.weight" else 0  # of 37 rows in tiles of 16
        expected = plain.weights_bytes - 11 * 64 * 2 + padding_bytes
        assert report.unquantised_weights_bytes == expected > report.weights_bytes, head
    assert plain.unquantised_weights_bytes == plain.weights_bytes


def test_gate_and_calibration_are_kept_where_they_ran(report_of: Callable[..., Report]) -> None:
    assert report_of(64).gate == GATE.rows
    assert report_of(64).calibration is None
    needy = QuantPlan(methods={"layers.0.attention.q_proj.weight": "gptq"})
    expected = CalibrationData("some.txt", 3, 7, 11)
    assert report_of(64, needy).calibration == expected
