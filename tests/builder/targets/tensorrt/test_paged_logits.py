"""One step of the network with our plugins, run by Triton's interpreter, against the reference's
logits, for what families and quantisation schemes ask for besides."""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
from network_models import FAMILIES, SCHEMES, Model
from numpy.typing import NDArray
from paged_steps import Network, Reference, Sequences, paged_limits

from llmbuild.builder.graph.pipeline import run_passes
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.targets.tensorrt.emulation.emulate import emulate_paged
from llmbuild.quant.grid import WeightGrid

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 16,
}
PROMPTS = ([3, 36, 7, 7, 20], [17])
FP16 = ("fp16", "fp16")
MINIMA = WeightGrid(4, 32, symmetric=False)
W8A16 = SCHEMES["w8a16"]
# Arguments of model_of, dtypes of K and V, and the tolerance, of the largest logit. Where what is
# rounded to codes has changed with fp16, some go to the next code.
CASES: dict[str, tuple[dict[str, Any], tuple[str, str], float]] = {
    "layer norms, biases, no rotary": (FAMILIES["gpt2"], FP16, 0.005),
    "parallel MLP, int4 KV": (FAMILIES["cohere"], ("int4", "int4"), 0.05),
    "window, cap and sinks": (
        {"windows": (0, 4), "attention_soft_cap": 5.0, "attention_sinks": True},
        FP16,
        0.005,
    ),
    "minima, tied table": (
        {"scheme": "w4a16", "grid": MINIMA, "tie_embeddings": True},
        FP16,
        0.005,
    ),
    "w8a8, static": ({"scheme": "w8a8-static", "tie_embeddings": True}, FP16, 0.05),
    "fp8": ({"scheme": "fp8_w8a8"}, FP16, 0.1),
    "w8a8, dynamic": ({"scheme": "w8a8-dynamic", "grid": W8A16}, FP16, 0.05),
}

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where a row is padding


@pytest.mark.parametrize("case", CASES)
def test_a_step_gives_the_references_logits(model_of: Callable[..., Model], case: str) -> None:
    asked, kv_dtypes, tolerance = CASES[case]
    assert logits_error(model_of(**{**SIZES, **asked}), kv_dtypes) < tolerance


@pytest.mark.parametrize(
    ("parts", "dtypes"),
    [
        ("kv", ("int8-static", "int8-static")),
        ("k", ("int4", "fp16")),
        ("v", ("int8", "int8-static")),
    ],
)
def test_channel_scales_of_the_kv_cache_are_taken(
    decoder_config: Callable[..., DecoderConfig],
    traced: Callable[..., StepGraph],
    random_tensors: Callable[..., dict[str, NDArray[np.generic]]],
    parts: str,
    dtypes: tuple[str, str],
) -> None:
    step = traced(**SIZES)
    tensors = random_tensors(step)
    scales = {
        f"layers.{layer}.{of}_scale": np.tile(np.linspace(0.02, 0.05, 8, dtype=np.float32), 2)
        for layer in range(2)
        for of in parts
    }
    run_passes(step, kv_scales=scales)
    model = Model(step, decoder_config(**SIZES), tensors.__getitem__)
    assert logits_error(model, dtypes) < 0.05


@pytest.mark.parametrize(
    ("asked", "kv_dtypes"),
    [
        ({}, ("bf16", "bf16")),
        ({"scheme": "w4a16", "grid": MINIMA, "qk_norm": "head"}, ("int8", "int4")),
        ({"scheme": "w8a8-dynamic", "grid": W8A16}, ("bf16", "int8")),
    ],
    ids=["unquantised", "w4a16", "w8a8"],
)
def test_activations_in_bf16_give_the_references_logits(
    model_of: Callable[..., Model], asked: dict[str, Any], kv_dtypes: tuple[str, str]
) -> None:
    error = logits_error(model_of(**{**SIZES, **asked}), kv_dtypes, activations="bf16")
    assert 0.0005 < error < 0.05  # rounded to 8 bits, and no more than that


@pytest.mark.parametrize("sm", [80, 89])
def test_fp8_is_kept_whether_the_gpu_converts_it_or_the_kernel(
    model_of: Callable[..., Model], sm: int
) -> None:
    model = model_of(**SIZES)
    assert 0.002 < logits_error(model, ("fp8", "fp8"), sm) < 0.05


def logits_error(
    model: Model,
    kv_dtypes: tuple[str, str],
    sm: int = 80,
    activations: Literal["fp16", "bf16"] = "fp16",
) -> float:
    """The largest, of the largest logit."""
    limits = paged_limits(model, *kv_dtypes, sm)
    sequences = Sequences(PROMPTS)
    batch = sequences.batch({0: 5, 1: 1})
    emulated = emulate_paged(model.step, model.config, limits, activations, model.read)
    got = Network(model, limits, sequences.num_blocks, emulated).logits(batch)
    expected = Reference(model, limits, sequences.num_blocks).logits(batch)
    return float(np.abs(got - expected).max() / np.abs(expected).max())
