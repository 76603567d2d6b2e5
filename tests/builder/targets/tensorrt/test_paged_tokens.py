"""The network with our plugins, which Triton's interpreter runs, gives the reference's tokens."""

from collections.abc import Callable
from typing import Any

import network_models
import numpy as np
import pytest
from network_models import Model
from paged_steps import Network, Reference, Sequences, paged_limits

from llmbuild.builder.targets.tensorrt.emulation.emulate import emulate_paged

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 16,
}
FAMILIES: dict[str, dict[str, Any]] = {
    **network_models.FAMILIES,
    "llama": {"num_heads": 4, "num_kv_heads": 2},
}
PROMPT_LENGTHS = (4, 2, 1)
# Tokens of each sequence, step by step: chunks of a prompt, prompts that join, and decoding.
STEPS = ({0: 3}, {0: 1, 1: 1}, {1: 1}, {0: 1, 2: 1}, {2: 1}, {1: 1, 0: 1}, {2: 1}, {0: 1, 1: 1})
KINDS = {
    "fp16": ("", ("fp16", "fp16")),
    "int8 KV": ("", ("int8", "int8")),
    "w4a16": ("w4a16", ("fp16", "fp16")),
}
# Of prompts after which the likeliest token leads by more than 1% of the largest logit, so that
# it's not for fp16's rounding to decide.
SEEDS = {
    ("llama", "fp16"): 4,
    ("llama", "int8 KV"): 4,
    ("llama", "w4a16"): 1,
    ("qwen3", "fp16"): 3,
    ("qwen3", "int8 KV"): 6,
    ("qwen3", "w4a16"): 2,
    ("gemma", "fp16"): 5,
    ("gemma", "int8 KV"): 8,
    ("gemma", "w4a16"): 0,
}
QUICK = (("llama", "fp16"), ("qwen3", "int8 KV"), ("gemma", "w4a16"))  # each of both once
MARGIN = 0.01
# Of the largest logit. What fp16 has changed moves some of the int8 KV cache to the next code.
TOLERANCES = {"fp16": 0.005, "int8 KV": 0.03, "w4a16": 0.005}

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where a row is padding


def prompts(seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, SIZES["vocab_size"], length).tolist() for length in PROMPT_LENGTHS]


def run(engine: Any, seed: int) -> tuple[list[list[int]], list[Any]]:
    sequences, logits = Sequences(prompts(seed)), []
    for counts in STEPS:
        logits.append(engine.logits(sequences.batch(counts)))
        sequences.advance(counts, logits[-1])
    return sequences.made, logits


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow, id=" ".join(case))
        for case in SEEDS
    ],
)
def test_greedy_tokens_are_the_references(
    model_of: Callable[..., Model], family: str, kind: str
) -> None:
    (scheme, kv_dtypes), seed = KINDS[kind], SEEDS[family, kind]
    model = model_of(scheme, **{**SIZES, **FAMILIES[family]})
    limits = paged_limits(model, *kv_dtypes)
    emulated = emulate_paged(model.step, model.config, limits, "fp16", model.read)
    num_blocks = Sequences(prompts(seed)).num_blocks
    expected, logits = run(Reference(model, limits, num_blocks), seed)
    made, got = run(Network(model, limits, num_blocks, emulated), seed)
    assert made == expected
    largest = max(np.abs(each).max() for each in logits)
    error = max(np.abs(a - b).max() for a, b in zip(got, logits, strict=True)) / largest
    margin = min(np.diff(np.sort(each)[:, -2:]).min() for each in logits) / largest
    assert error < TOLERANCES[kind]
    assert margin > MARGIN
