"""What a part's precision costs, against whole runs with and without the change; and which part is
found to be the most sensitive one."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from llmbuild.builder.calibration.batch import calibration_batch, pools_of
from llmbuild.builder.calibration.kv import measure_reaches
from llmbuild.builder.calibration.sensitivity import (
    Change,
    KVChange,
    WeightChange,
    keeping,
    measure_changes,
    with_neutral_kv_scales,
)
from llmbuild.builder.graph.passes.kv_scales import place_kv_scales
from llmbuild.builder.graph.pipeline import run_passes
from llmbuild.builder.graph.reference import run_steps
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.builder.models.config import DecoderConfig, MoeConfig
from llmbuild.quant.evaluation.likelihood import mean_kl
from llmbuild.quant.grid import QuantisedMatrix, WeightGrid
from llmbuild.quant.kv import channel_scales
from llmbuild.quant.plan import QuantPlan
from llmbuild.quant.reader import value_reader
from llmbuild.quant.rtn import round_to_nearest
from llmbuild.runtime.manifest import KVLayer, KVLayout

Tensors = dict[str, NDArray[np.generic]]
LAYERS = 3
SHAPE = {"num_layers": LAYERS, "layer_ropes": (0,) * LAYERS, "windows": (0, 5, 0)}
WIDE = SHAPE | {"hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "head_dim": 16}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": SHAPE,
    "tied, QK-norm": SHAPE | {"tie_embeddings": True, "qk_norm": "head"},
    "parallel, biases": SHAPE
    | {"parallel_residual": True, "shared_norm": True, "qkv_bias": True, "mlp_bias": True},
}
QUICK = "tied, QK-norm"
TOKENS = np.random.default_rng(3).integers(0, 37, (3, 13)).astype(np.int32)
SCORED = 5


def layout(config: DecoderConfig, dtypes: Mapping[int, tuple[str, str]]) -> KVLayout:
    """K's and V's dtypes of some layers; the others are in fp32."""
    return KVLayout(
        block_size=4,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        layers=[
            KVLayer.of_heads([dtypes.get(layer, ("fp32", "fp32"))] * config.num_kv_heads)
            for layer in range(config.num_layers)
        ],
    )


def whole_run(step: StepGraph, read: Callable[[str], Any], kv: KVLayout) -> NDArray[np.float32]:
    batch = calibration_batch(TOKENS, SCORED)
    (logits,) = run_steps(step, read, [batch], pools_of(kv, TOKENS.shape))
    assert logits.shape == (len(TOKENS) * SCORED, 37)
    return logits


def kl_in_torch(reference: NDArray[np.float32], logits: NDArray[np.float32]) -> float:
    theirs, ours = (torch.from_numpy(x).double().log_softmax(-1) for x in (reference, logits))
    return float(torch.nn.functional.kl_div(ours, theirs, reduction="batchmean", log_target=True))


def measure(
    step: StepGraph, config: DecoderConfig, read: Callable[[str], Any], changes: Sequence[Change]
) -> list[float]:
    return measure_changes(step, config, read, TOKENS, SCORED, changes, lambda _: None)


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(variant, id=name, marks=() if name == QUICK else pytest.mark.slow)
        for name, variant in VARIANTS.items()
    ],
)
def test_kl_of_a_kv_dtype_is_that_of_two_whole_runs(
    traced: Callable[..., StepGraph],
    decoder_config: Callable[..., DecoderConfig],
    random_tensors: Callable[[StepGraph], Tensors],
    variant: dict[str, Any],
) -> None:
    """To the bit of the logits, so that what is computed before the change is what it was."""
    config, plain = decoder_config(**variant), traced(**variant)
    read = random_tensors(plain).__getitem__
    reaches = measure_reaches(traced(**variant), config, read, TOKENS)
    pairs = [("int8", "fp32"), ("fp32", "int8"), ("int4", "fp32"), ("fp32", "int4")]
    layouts = [layout(config, {layer: pair}) for layer in range(LAYERS) for pair in pairs]
    layouts.append(layout(config, {0: ("int4", "int8"), 2: ("fp32", "int4")}))
    changes = [KVChange(kv, channel_scales(kv, reaches)) for kv in layouts]
    step = with_neutral_kv_scales(traced(**variant), config)
    found = measure(step, config, read, changes)
    reference = whole_run(plain, read, layout(config, {}))
    for change, kl_nats in zip(changes, found, strict=True):
        changed = traced(**variant)
        place_kv_scales(changed, change.scales)
        logits = whole_run(changed, read, change.kv)
        assert kl_nats == mean_kl(reference, logits)
        assert kl_nats == pytest.approx(kl_in_torch(reference, logits), rel=1e-9)
        assert kl_nats > 1e-9


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("activation_group", [0, 32])
def test_kl_of_rounded_matrices_is_that_of_two_whole_runs(
    traced: Callable[..., StepGraph],
    decoder_config: Callable[..., DecoderConfig],
    random_tensors: Callable[[StepGraph], Tensors],
    tied: bool,
    activation_group: int,
) -> None:
    """Against the graph whose matrices and activations the pass quantised. It fuses nodes, which
    sum in another order."""
    moe = MoeConfig(5, 2, 32, normalise=True)
    mixture = {"moe": moe, "moe_layers": tuple(layer == 2 for layer in range(LAYERS))}
    variant = WIDE | mixture | {"tie_embeddings": tied, "o_bias": True}
    config, plain = decoder_config(**variant), traced(**variant)
    tensors, grid = random_tensors(plain), WeightGrid(4, 32, True)
    items = [
        *([f"layers.{n}.attention.{name}_proj.weight" for name in "qkvo"] for n in range(LAYERS)),
        ["layers.1.mlp.down_proj.weight"],
        ["layers.2.mlp.experts.gate_up", "layers.2.mlp.experts.down"],
        ["embed.weight" if tied else "lm_head.weight"],
    ]
    plans = [
        QuantPlan(
            dict.fromkeys(names, grid),
            dict.fromkeys(names, activation_group) if activation_group else {},
        )
        for names in items
    ]

    def reader(plan: QuantPlan) -> Callable[[str], NDArray[np.generic] | QuantisedMatrix]:
        return lambda name: (
            round_to_nearest(tensors[name], plan.weights[name])
            if name in plan.weights
            else tensors[name]
        )

    changes = [WeightChange(plan, value_reader(reader(plan))) for plan in plans]
    found = measure(traced(**variant), config, tensors.__getitem__, changes)
    reference = whole_run(plain, tensors.__getitem__, layout(config, {}))
    for plan, kl_nats in zip(plans, found, strict=True):
        step = traced(**variant)
        run_passes(step, plan=plan)
        logits = whole_run(step, reader(plan), layout(config, {}))
        assert kl_nats == pytest.approx(kl_in_torch(reference, logits), rel=1e-3)
        assert kl_nats > 1e-5


def test_planted_sensitive_layer_is_found_first(
    traced: Callable[..., StepGraph],
    decoder_config: Callable[..., DecoderConfig],
    random_tensors: Callable[[StepGraph], Tensors],
) -> None:
    """One channel of V is a thousand times stronger in a layer, whose output doesn't change."""
    config, step = decoder_config(**SHAPE), traced(**SHAPE)
    tensors = random_tensors(step)
    strong, queries_a_head = 1, config.num_heads // config.num_kv_heads
    value, output = (f"layers.1.attention.{name}_proj.weight" for name in "vo")
    tensors[value] = tensors[value].copy()
    tensors[value][strong] *= 1000
    tensors[output] = tensors[output].copy()
    for head in range(queries_a_head):
        tensors[output][:, head * config.head_dim + strong] /= 1000
    names = [
        (layer, pair) for layer in range(LAYERS) for pair in (("int8", "fp32"), ("fp32", "int8"))
    ]
    changes = [KVChange(layout(config, dict([name])), {}) for name in names]
    found = measure(with_neutral_kv_scales(step, config), config, tensors.__getitem__, changes)
    ranked = [names[index] for index in np.argsort(found)[::-1]]
    assert ranked[0] == (1, ("fp32", "int8"))
    assert max(found) > 10 * sorted(found)[-2]


def test_what_comes_before_a_change_is_not_run_again(
    traced: Callable[..., StepGraph],
    decoder_config: Callable[..., DecoderConfig],
    random_tensors: Callable[[StepGraph], Tensors],
) -> None:
    config, step = decoder_config(**SHAPE), traced(**SHAPE)
    tensors, reads, steps = random_tensors(step), Counter[str](), Counter[str]()

    def read(name: str) -> NDArray[np.generic]:
        reads[name] += 1
        return tensors[name]

    changes = [KVChange(layout(config, {layer: ("int8", "int8")}), {}) for layer in (2, 2, 1)]
    with_scales = with_neutral_kv_scales(step, config)
    measure_changes(
        with_scales, config, read, TOKENS, SCORED, changes, lambda n: steps.update(done=n)
    )
    assert steps["done"] == 3
    once, walk = 1, 1  # for the reference, and up to where the changes begin
    assert reads["layers.0.mlp.down_proj.weight"] == once + walk
    assert reads["layers.1.attention.o_proj.weight"] == once + walk + 1
    assert reads["layers.2.attention.q_proj.weight"] == once + walk + 1
    assert reads["layers.2.attention.o_proj.weight"] == once + 3  # the last change begins before
    assert reads["lm_head.weight"] == once + 3


def test_logits_that_are_no_numbers_are_an_infinite_loss(
    traced: Callable[..., StepGraph],
    decoder_config: Callable[..., DecoderConfig],
    random_tensors: Callable[[StepGraph], Tensors],
) -> None:
    config, step = decoder_config(**SHAPE), traced(**SHAPE)
    tensors = random_tensors(step)
    broken = tensors | {"lm_head.weight": tensors["lm_head.weight"] * np.float32(np.inf)}
    plan = QuantPlan({"lm_head.weight": WeightGrid(4, 32, True)})
    change = WeightChange(plan, broken.__getitem__)
    assert measure(step, config, tensors.__getitem__, [change]) == [math.inf]


def test_tensors_are_kept_up_to_the_limit() -> None:
    reads: Counter[str] = Counter()

    def read(name: str) -> NDArray[np.generic]:
        reads[name] += 1
        return np.zeros({"small": 2, "large": 9, "last": 1}[name], np.float32)

    kept = keeping(read, 12)
    for _ in range(3):
        for name in ("small", "large", "last"):
            kept(name)
    assert reads == {"small": 1, "large": 3, "last": 1}
