"""KL and agreement against their definitions, between models that see their KV content."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from llmbuild.errors import InternalError, RequestError
from llmbuild.quant.evaluation.compare import (
    CompareResult,
    Contestant,
    Totals,
    check_same_vocabulary,
    compare,
    compare_engines,
)
from llmbuild.quant.evaluation.perplexity import measure_perplexity
from llmbuild.quant.evaluation.windows import slots_for
from llmbuild.runtime.manifest import Manifest
from llmbuild.runtime.tokenizer import GenerationConfig, Tokenizer


def softmax(logits: NDArray[np.float32]) -> list[float]:
    top = max(float(x) for x in logits)
    exps = [math.exp(float(x) - top) for x in logits]
    total = math.fsum(exps)
    return [x / total for x in exps]


def kl(p: list[float], q: list[float]) -> float:
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a)


@pytest.mark.parametrize("context", [3, 13, 31])
@pytest.mark.parametrize(
    ("max_step_tokens", "block_sizes"), [(40, (4, 4)), (1, (1, 16)), (29, (5, 3))]
)
def test_comparison_equals_its_definition(
    make_manifest: Callable[..., Manifest],
    history_executor: Callable[..., Any],
    predict: Callable[..., NDArray[np.float32]],
    context: int,
    max_step_tokens: int,
    block_sizes: tuple[int, int],
) -> None:
    windows = np.random.default_rng(context).integers(0, 9, (5, context)).astype(np.int32)

    def like(history: list[int]) -> NDArray[np.float32]:
        return predict(history) + np.float32(0.2) * predict(history, 1)

    contestants = []
    for block_size, model in zip(block_sizes, (like, predict), strict=True):
        manifest = make_manifest(max_step_tokens=max_step_tokens, block_size=block_size)
        slots = slots_for(manifest.limits, block_size, windows.shape)
        executor = history_executor(manifest, slots.num_blocks, model)
        contestants.append(Contestant(executor, block_size, slots))
    totals = compare(*contestants, max_step_tokens, windows)
    rows = [
        (like(tokens[:position]), predict(tokens[:position]), tokens[position])
        for tokens in windows.tolist()
        for position in range(context // 2 + 1, context)
    ]
    assert totals.num_scored == len(rows)
    divergences = [kl(softmax(theirs), softmax(ours)) for ours, theirs, _ in rows]
    assert totals.kl_nats == pytest.approx(math.fsum(divergences), rel=1e-9)
    assert totals.agreeing == sum(a.argmax() == b.argmax() for a, b, _ in rows)
    nll = [-math.log(softmax(ours)[token]) for ours, _, token in rows]
    assert totals.nll == pytest.approx(math.fsum(nll), rel=1e-12)
    nll = [-math.log(softmax(theirs)[token]) for _, theirs, token in rows]
    assert totals.reference_nll == pytest.approx(math.fsum(nll), rel=1e-12)


@given(st.integers(0, 2**32 - 1), st.integers(1, 70))
def test_divergence_is_never_negative_and_from_itself_zero(seed: int, num_rows: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = (9 * rng.standard_normal((num_rows, 17)).astype(np.float32) for _ in range(2))
    targets = rng.integers(0, 17, num_rows).astype(np.int32)
    apart, same = Totals(), Totals()
    apart.add(a, b, targets)
    same.add(a, a + np.float32(0), targets)
    assert apart.kl_nats > 0
    assert (same.kl_nats, same.agreeing) == (0, num_rows)
    assert same.nll == same.reference_nll


def words(*tokens: str) -> Tokenizer:
    backend = Backend(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token=tokens[0]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Tokenizer(backend, GenerationConfig(None, [], False))


def test_other_vocabularies_are_refused_with_what_differs() -> None:
    ours = words("a", "b", "c")
    check_same_vocabulary(ours, words("a", "b", "c"), 4, 4)
    with pytest.raises(RequestError, match=r"vocabulary of 3 tokens .* one of 4"):
        check_same_vocabulary(ours, words("a", "b", "c", "d"), 3, 4)
    with pytest.raises(RequestError, match="token 1 is 'b' to the engine and 'c' to the reference"):
        check_same_vocabulary(ours, words("a", "c", "b"), 3, 3)


@pytest.fixture(scope="module")
def other_engine(
    tmp_path_factory: pytest.TempPathFactory,
    save_tiny_llama: Callable[..., Path],
    run_llmbuild: Callable[..., Any],
) -> Path:
    """The tiny model's weights with another activation, and other limits."""
    folder = tmp_path_factory.mktemp("other")
    recipe = save_tiny_llama(folder, hidden_act="gelu")
    changes = ("--set", "limits.max_step_tokens=17", "--set", "kv_cache.block_size=8")
    done = run_llmbuild("compile", recipe, "-o", folder / "engine", *changes)
    assert done.returncode == 0, done.stderr
    return folder / "engine"


def test_comparison_of_engines_equals_transformers(
    tiny_engine: Path, other_engine: Path, checkout: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    text = checkout / "tests" / "data" / "genesis.txt"
    result = compare_engines(other_engine, tiny_engine, text, context=31, windows=5, num_threads=2)
    tokens = torch.tensor(list(text.read_bytes()[: 5 * 31])).reshape(5, 31)
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(engine.parent / "model", dtype=torch.float32)
        for engine in (other_engine, tiny_engine)
    )
    with torch.no_grad():
        q, p = (
            model.eval()(_byte_ids(tiny_engine, tokens)).logits[:, 15:30].double().log_softmax(-1)
            for model in (ours, theirs)
        )
    assert result.num_scored_tokens == p[..., 0].numel()
    assert result.kl_nats == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-4)
    assert result.agreement == float((p.argmax(-1) == q.argmax(-1)).double().mean())
    assert 0 < result.agreement < 1
    for engine, perplexity in (
        (other_engine, result.perplexity),
        (tiny_engine, result.reference_perplexity),
    ):
        alone = measure_perplexity(engine, text, context=31, windows=5, num_threads=2)
        assert perplexity == pytest.approx(alone.perplexity, rel=1e-12)
    assert result.perplexity_ratio == pytest.approx(
        result.perplexity / result.reference_perplexity, rel=1e-12
    )


def _byte_ids(engine: Path, tokens: Any) -> Any:
    """The engine's ids of bytes."""
    import torch

    from llmbuild.runtime.tokenizer import load_tokenizer

    text = bytes(tokens.flatten().tolist()).decode()
    ids = load_tokenizer(engine).encode(text, with_bos=False)
    return torch.tensor(ids).reshape(tokens.shape)


def test_logits_that_are_not_a_number_are_our_fault(
    monkeypatch: pytest.MonkeyPatch, tiny_engine: Path, checkout: Path
) -> None:
    text = checkout / "tests" / "data" / "genesis.txt"
    monkeypatch.setattr(
        "llmbuild.runtime.executors.cpu.CpuExecutor.step",
        lambda self, batch: np.full((batch.num_logit_rows, 257), np.nan, np.float32),
    )
    with pytest.raises(InternalError, match="nan"):
        compare_engines(tiny_engine, tiny_engine, text, context=9, windows=1, num_threads=1)


def test_command_prints_a_line_and_with_json_one_object(
    tiny_engine: Path, other_engine: Path, checkout: Path, run_llmbuild: Callable[..., Any]
) -> None:
    text = checkout / "tests" / "data" / "genesis.txt"
    asked = ("eval", "compare", other_engine, tiny_engine, "--text", text)
    size = ("--context", 32, "--windows", 5)
    said = run_llmbuild(*asked, *size).stdout
    [line] = run_llmbuild(*asked, *size, "--json").stdout.splitlines()
    result = msgspec.json.decode(line, type=CompareResult)
    assert (result.context, result.windows, result.num_scored_tokens) == (32, 5, 75)
    assert said.startswith(f"KL {result.kl_nats:.6f} nats a token")
    assert f"{result.agreement:.2%}" in said
    assert len(said.splitlines()) == 1
    refused = run_llmbuild(*asked)  # by default windows of 512
    assert refused.returncode == 2
    assert refused.stderr.startswith("Error: context is 512 tokens")
