"""Perplexity through a compiled engine, against transformers on the same weights."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from llmbuild.quant.evaluation.perplexity import measure_perplexity
from llmbuild.runtime.tokenizer import load_tokenizer


@pytest.mark.parametrize(("context", "windows"), [(31, 9), (64, 3)])
def test_perplexity_equals_transformers(
    tiny_engine: Path, checkout: Path, context: int, windows: int
) -> None:
    """Windows of 30 and 63 computed tokens don't fit steps of 24, so some are cut by a step."""
    text = checkout / "tests" / "data" / "genesis.txt"
    result = measure_perplexity(tiny_engine, text, context=context, windows=windows, num_threads=2)
    model = AutoModelForCausalLM.from_pretrained(
        tiny_engine.parent / "model", dtype=torch.float32
    ).eval()
    ids = load_tokenizer(tiny_engine).encode(text.read_text(), with_bos=False)
    tokens = torch.from_numpy(np.array(ids[: context * windows]).reshape(windows, context))
    with torch.no_grad():
        log_probabilities = model(tokens).logits.double().log_softmax(dim=-1)
    scored = range(context // 2 + 1, context)
    nll = [
        -float(log_probabilities[window, position - 1, tokens[window, position]])
        for window in range(windows)
        for position in scored
    ]
    assert result.num_scored_tokens == len(nll)
    assert result.perplexity == pytest.approx(math.exp(math.fsum(nll) / len(nll)), rel=1e-5)
