"""What a decode step reads of a model with experts, worked out by hand."""

from collections.abc import Callable
from typing import Any

import numpy as np
from manifests import whole_rank

from llmbuild.builder.assemble import Assembled
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.builder.models.config import DecoderConfig, MoeConfig
from llmbuild.builder.recipe.calibration import ResolvedCalibration
from llmbuild.builder.report.report import make_report
from llmbuild.builder.targets.cpu.lower import lower
from llmbuild.quant.plan import QuantPlan
from llmbuild.runtime.manifest import (
    ALONE,
    SCHEMA_VERSION,
    KVLayout,
    Limits,
    Manifest,
)
from llmbuild.runtime.target import CpuTarget


def _manifest(config: DecoderConfig, kv: KVLayout) -> Manifest:
    return Manifest(
        schema_version=SCHEMA_VERSION,
        llmbuild_version="0",
        name="m",
        model={},
        vocab_size=config.vocab_size,
        precision="bf16",
        quantised={},
        target=CpuTarget(machine="m", isa_levels=[], compiler="c", compiler_flags={}),
        limits=Limits(max_sequence_length=1, max_step_tokens=8, max_sequences=2),
        buckets=[1],
        kv=kv,
        parallel=ALONE,
        ranks=[whole_rank(kv, config.vocab_size)],
        files={},
    )


def test_decode_step_reads_the_chosen_experts_alone(
    lowerable: Callable[..., StepGraph],
    decoder_config: Callable[..., DecoderConfig],
    kv_layout: Callable[..., KVLayout],
) -> None:
    """Hidden 20, vocabulary 37, Q 24 wide, K and V 8; 3 of 7 experts 9 wide in the first layer, an
    MLP 19 wide in the second. Rows come in tiles of 16."""
    overrides: dict[str, Any] = {"moe": MoeConfig(7, 3, 9), "moe_layers": (True, False)}
    config = decoder_config(**overrides)
    kv = kv_layout(config, ("bf16", "bf16"))
    step = lowerable("bf16", **overrides)
    plan = lower(step, config, kv)
    assembled = Assembled(
        *(_manifest(config, kv), step, QuantPlan(), plan, lambda name: np.empty(0)),
        graphs=[],
        rank_plans=[plan],
    )
    calibration = ResolvedCalibration(length=1)
    report = make_report(
        assembled, config, {}, None, 1e-4, {}, rounding_losses={}, calibration=calibration
    )
    (step,) = report.decode
    attention, head = 48 * 20 + 32 * 24, 48 * 20
    expert = 32 * 20 + 32 * 9
    dense, router = 48 * 20 + 32 * 19, 16 * 20
    assert step.weight_bytes == 2 * (2 * attention + router + 3 * expert + dense + head)
    macs = 2 * (40 * 20 + 20 * 24) + 7 * 20 + 3 * (18 * 20 + 20 * 9) + 38 * 20 + 20 * 19 + 37 * 20
    attention_macs = 2 * 6 * 4 * 2  # scores and sums of two layers, one token
    assert step.operations == 2 * (macs + attention_macs)
    assert report.weights_bytes > step.weight_bytes + 2 * 4 * expert  # the file has them all
