"""The gate holds figures to limits, says all of them when one is exceeded, and measures by the
commands that anyone may repeat."""

import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmbuild.builder import gate as module
from llmbuild.builder.gate import (
    GateResult,
    Row,
    check_texts,
    evaluate,
    reference_recipe,
    run_gate,
)
from llmbuild.builder.recipe.gate import ResolvedGate
from llmbuild.builder.recipe.recipe import Recipe, load_recipe
from llmbuild.builder.sources.progress import PlainProgress
from llmbuild.builder.stages import Stages
from llmbuild.errors import BuildError, InternalError, RecipeError
from llmbuild.quant.evaluation.compare import CompareResult, compare_engines
from llmbuild.quant.evaluation.perplexity import PerplexityResult, measure_perplexity
from llmbuild.quant.evaluation.retrieval import RetrievalResult, Retrieved

ENGINE, REFERENCE = Path("engine"), Path("reference")


@pytest.mark.parametrize(
    ("measured", "allowed", "at_least", "passed"),
    [
        (0.1, 0.1, False, True),
        (0.1, 0.09, False, False),
        (-0.1, 0.0, False, True),
        (0.9, 0.9, True, True),
        (0.89, 0.9, True, False),
        (math.nan, 0.1, False, False),
        (math.nan, 0.1, True, False),
        (5.0, None, False, True),
    ],
)
def test_figure_passes_up_to_its_limit(
    measured: float, allowed: float | None, at_least: bool, passed: bool
) -> None:
    assert Row("loss", measured, allowed, at_least, "").passed is passed


def test_failed_gate_says_every_figure_measured_and_allowed() -> None:
    rows = [
        Row("perplexity increase", 0.0412, 0.03, False, "12.2 became 12.7"),
        Row("token agreement", 0.953, 0.9, True, "16 windows"),
        Row("KL in nats a token", 0.0213, None, False, "16 windows"),
    ]
    with pytest.raises(BuildError) as refused:
        GateResult(rows).require()
    heading, *lines, advice = str(refused.value).splitlines()
    assert "nothing was published" in heading
    assert [line.strip() for line in lines] == [
        "perplexity increase 0.0412, at most 0.03 is allowed: FAILED (12.2 became 12.7)",
        "token agreement 0.953, at least 0.9 is allowed (16 windows)",
        "KL in nats a token 0.0213, no limit (16 windows)",
    ]
    assert advice
    GateResult(rows[1:]).require()


def retrieved(at: dict[int, tuple[float, float]]) -> RetrievalResult:
    """at: by context, what is found at the start and in the middle."""
    rows = [
        Retrieved(context, place, 50, accuracy, -1.0)
        for context, both in at.items()
        for place, accuracy in zip(("start", "middle"), both, strict=True)
    ]
    return RetrievalResult(0.5, -1.0, rows, 0, 1.0)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The measurements that a gate asks for; each has an answer of its own."""
    answers: dict[tuple[Any, ...], Any] = {
        ("perplexity", ENGINE): PerplexityResult(12.566, 10, 500, 60, 1.0),
        ("perplexity", REFERENCE): PerplexityResult(12.2, 10, 500, 60, 1.0),
        ("compare", ENGINE): CompareResult(0.04, 0.93, 12.5, 12.2, 1.02, 10, 512, 16, 1.0),
        ("retrieval", ENGINE): retrieved({512: (0.9, 0.8), 2048: (0.74, 0.78)}),
        ("retrieval", REFERENCE): retrieved({512: (0.8, 0.8), 2048: (0.78, 0.78)}),
    }
    asked: list[tuple[Any, ...]] = []

    def answer(kind: type[Any], *arguments: Any) -> Any:
        asked.append(arguments)
        result = answers[arguments[:2]]
        assert type(result) is kind
        return result

    monkeypatch.setattr(module, "evaluate", answer)
    return asked


def run(content: dict[str, Any], base_dir: Path = Path("base")) -> GateResult:
    gate = ResolvedGate.model_validate(content)
    return run_gate(gate, base_dir, ENGINE, REFERENCE, Stages(PlainProgress()))


ALL: dict[str, Any] = {
    "perplexity": {"text": "p.txt", "context": 500, "windows": 60, "max_increase": 0.031},
    "compare": {"text": "c.txt", "context": 512, "windows": 16, "min_agreement": 0.9},
    "retrieval": {"contexts": (512, 2048), "samples": 50, "max_drop": 0.02},
}


def test_gate_measures_both_engines_and_gives_every_figure(
    measured: list[tuple[Any, ...]],
) -> None:
    rows = run(ALL).rows
    windows = ("--context", 500, "--windows", 60)
    assert measured == [
        ("perplexity", ENGINE, "--text", Path("base/p.txt"), *windows),
        ("perplexity", REFERENCE, "--text", Path("base/p.txt"), *windows),
        (
            *("compare", ENGINE, REFERENCE, "--text", Path("base/c.txt")),
            *("--context", 512, "--windows", 16),
        ),
        ("retrieval", ENGINE, "--samples", 50, "--contexts", "512,2048"),
        ("retrieval", REFERENCE, "--samples", 50, "--contexts", "512,2048"),
    ]
    assert [(row.what, row.measured, row.allowed, row.at_least) for row in rows] == [
        ("perplexity increase", pytest.approx(0.03), 0.031, False),
        ("KL in nats a token", 0.04, None, False),
        ("token agreement", 0.93, 0.9, True),
        ("retrieval drop at 512 tokens", -0.05, 0.02, False),
        ("retrieval drop at 2048 tokens", 0.02, 0.02, False),  # 0.78 - 0.76, whatever its last bit
    ]


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("perplexity", {"max_increase": 0.029}),
        ("compare", {"max_kl": 0.039}),
        ("compare", {"min_agreement": 0.931}),
        ("retrieval", {"max_drop": 0.019}),
    ],
)
def test_each_limit_can_fail_a_gate(
    measured: list[tuple[Any, ...]], name: str, limit: dict[str, float]
) -> None:
    with pytest.raises(BuildError, match="FAILED"):
        run(ALL | {name: ALL[name] | limit})


def test_only_what_the_gate_names_is_measured(measured: list[tuple[Any, ...]]) -> None:
    run({"retrieval": ALL["retrieval"]})
    assert {arguments[0] for arguments in measured} == {"retrieval"}


def test_retrieval_that_the_unquantised_engine_can_not_do_is_no_gate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results = {ENGINE: retrieved({512: (0.3, 0.3)}), REFERENCE: retrieved({512: (0.08, 0.1)})}
    monkeypatch.setattr(module, "evaluate", lambda kind, command, engine, *rest: results[engine])
    with pytest.raises(BuildError, match=r"says nothing .* finds 9\.0% .* 512 tokens"):
        run({"retrieval": {"contexts": (512,), "samples": 50, "max_drop": 1.0}})


def test_figures_are_those_of_the_functions_behind_the_commands(
    tiny_engine: Path, checkout: Path
) -> None:
    text = checkout / "tests" / "data" / "genesis.txt"
    size = ("--context", 31, "--windows", 3)
    perplexity = evaluate(PerplexityResult, "perplexity", tiny_engine, "--text", text, *size)
    alone = measure_perplexity(tiny_engine, text, context=31, windows=3)
    assert (perplexity.perplexity, perplexity.windows) == (alone.perplexity, 3)
    both = (tiny_engine, tiny_engine)
    comparison = evaluate(CompareResult, "compare", *both, "--text", text, *size)
    alone_comparison = compare_engines(*both, text, context=31, windows=3)
    assert comparison.perplexity == alone_comparison.perplexity == alone.perplexity
    assert (comparison.kl_nats, comparison.agreement) == (0, 1)


def test_what_can_not_be_measured_fails_the_build_with_the_reason(
    tiny_engine: Path, tmp_path: Path
) -> None:
    with pytest.raises(BuildError, match=r"can't be measured: .*absent\.txt can't be read"):
        evaluate(
            PerplexityResult,
            *("perplexity", tiny_engine, "--text", tmp_path / "absent.txt", "--context", 31),
        )


def test_crash_of_a_measurement_is_our_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, -11, "", "trace\nlast words\n")

    monkeypatch.setattr(subprocess, "run", crash)
    with pytest.raises(InternalError, match="`eval compare` ended with status -11: last words"):
        evaluate(CompareResult, "compare", ENGINE, REFERENCE)


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Recipe]:
    """recipe(key=value): of a tiny model in bf16."""

    def make(**content: Any) -> Recipe:
        start = {"version": 1, "name": "tiny", "model": {"source": "path:m"}, "precision": "bf16"}
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(start | content))
        return load_recipe(path)

    return make


@pytest.mark.parametrize(
    "content",
    [
        {"quantisation": "w4a8"},
        {"quantisation": {"overrides": [{"match": "*", "scheme": "w8a8"}]}},
        {"kv_cache": {"dtype": "int8", "block_size": 32}},
        {"kv_cache": {"dtype": "fp32"}},
    ],
)
def test_reference_is_the_same_recipe_without_quantisation(
    recipe: Callable[..., Recipe], content: dict[str, Any]
) -> None:
    limits = {"max_sequence_length": 99}
    reference = reference_recipe(recipe(**content, limits=limits))
    plain = recipe(limits=limits, kv_cache=content.get("kv_cache", {}) | {"dtype": "bf16"})
    assert reference.resolve(100) == plain.resolve(100)


@pytest.mark.parametrize("content", [{}, {"kv_cache": {"dtype": "bf16", "block_size": 32}}])
def test_gate_of_a_recipe_that_quantises_nothing_is_refused(
    recipe: Callable[..., Recipe], content: dict[str, Any]
) -> None:
    with pytest.raises(RecipeError, match=r"recipe tiny:\n  gate: .* leave the gate out"):
        reference_recipe(recipe(**content))


def test_missing_texts_are_refused_before_anything_is_built(tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_text("In the beginning")
    gate = ResolvedGate.model_validate(ALL)
    with pytest.raises(RecipeError) as refused:
        check_texts(gate, tmp_path, "tiny")
    assert str(refused.value).splitlines() == [
        "recipe tiny:",
        f"  gate.perplexity.text: given p.txt; {tmp_path / 'p.txt'} isn't a file",
    ]
    (tmp_path / "p.txt").touch()
    check_texts(gate, tmp_path, "tiny")
