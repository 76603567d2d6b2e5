"""Holds a compiled engine to its recipe's gate: what it may lose to the unquantised engine.

Each figure is measured by the command that a user would give, `llmbuild eval`, in a process of
its own: a crash of native code is seen as one, and mapped weights aren't the builder's memory.
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from llmbuild.builder.recipe.gate import (
    Gate,
    ResolvedCompareGate,
    ResolvedGate,
    ResolvedPerplexityGate,
    ResolvedRetrievalGate,
)
from llmbuild.builder.recipe.kv_cache import KVCache
from llmbuild.builder.recipe.quantisation import Quantisation
from llmbuild.builder.recipe.recipe import Parallel, Recipe
from llmbuild.builder.stages import Stages
from llmbuild.errors import BuildError, InternalError, RecipeError
from llmbuild.quant.evaluation.compare import CompareResult
from llmbuild.quant.evaluation.facts import FACTS_TOGETHER, PLACES
from llmbuild.quant.evaluation.perplexity import PerplexityResult
from llmbuild.quant.evaluation.retrieval import RetrievalResult

CHANCE = 1 / (FACTS_TOGETHER * len(PLACES))  # of a guess among the facts of a text
# Differences of shares are rounded to this many decimals, so that 0.78 - 0.76 is 0.02.
SHARE_DECIMALS = 9

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of the gate. allowed: None where the recipe sets no limit, the most there may be
    otherwise, or the least where `at_least`."""

    what: str
    measured: float
    allowed: float | None
    at_least: bool
    basis: str  # what was measured, over what

    @property
    def passed(self) -> bool:
        if self.allowed is None:
            return True
        if self.at_least:
            return self.measured >= self.allowed
        return self.measured <= self.allowed  # false of NaN

    def describe(self) -> str:
        limit = "no limit"
        if self.allowed is not None:
            limit = f"at {'least' if self.at_least else 'most'} {self.allowed:g} is allowed"
        verdict = "" if self.passed else ": FAILED"
        return f"{self.what} {self.measured:.6g}, {limit}{verdict} ({self.basis})"


@dataclass(frozen=True, slots=True)
class GateResult:
    """What the gate measured."""

    rows: list[Row]

    def require(self) -> None:
        """Raises BuildError with every figure, measured and allowed, unless all have passed."""
        if not all(row.passed for row in self.rows):
            lines = "".join(f"\n  {row.describe()}" for row in self.rows)
            raise BuildError(
                f"the engine doesn't pass the recipe's gate, and nothing was published:{lines}\n"
                "Quantise less, calibrate, or allow more."
            )


def reference_recipe(recipe: Recipe) -> Recipe:
    """The recipe of the engine to measure against: the same without quantisation and gate, its KV
    cache in the recipe's precision. Raises RecipeError when that is the same engine."""
    kv_cache = KVCache(dtype=recipe.precision, block_size=recipe.kv_cache.block_size)
    own_kv_cache = recipe.kv_cache.model_copy(
        update={"dtype": recipe.kv_cache.dtype or recipe.precision}
    )
    if not recipe.quantisation.quantises and own_kv_cache == kv_cache:
        raise RecipeError(
            f"recipe {recipe.name}:\n  gate: given, and neither quantisation nor kv_cache "
            "quantises anything that it could be held to; leave the gate out"
        )
    return recipe.model_copy(
        update={
            "quantisation": Quantisation(),
            "kv_cache": kv_cache,
            "distillation": None,
            "gate": None,
            "parallel": Parallel(),
        }
    )


def check_texts(gate: Gate, base_dir: Path, recipe_name: str) -> None:
    """Raises RecipeError for a text that isn't there: better known before a compile than after."""
    sections = {"perplexity": gate.perplexity, "compare": gate.compare}
    missing = [
        f"\n  gate.{name}.text: given {section.text}; {base_dir / section.text} isn't a file"
        for name, section in sections.items()
        if section is not None and not (base_dir / section.text).is_file()
    ]
    if missing:
        raise RecipeError(f"recipe {recipe_name}:{''.join(missing)}")


def run_gate(
    gate: ResolvedGate, base_dir: Path, engine_dir: Path, reference_dir: Path, stages: Stages
) -> GateResult:
    """Measure all that the gate names, of both engines.

    base_dir: what texts are relative to. Raises BuildError when the engine loses more than is
    allowed or something can't be measured, InternalError when an engine crashes.
    """
    rows: list[Row] = []
    if gate.perplexity is not None:
        with stages.stage("gate: perplexity"):
            rows += _perplexity_rows(gate.perplexity, base_dir, engine_dir, reference_dir)
    if gate.compare is not None:
        with stages.stage("gate: compare"):
            rows += _compare_rows(gate.compare, base_dir, engine_dir, reference_dir)
    if gate.retrieval is not None:
        with stages.stage("gate: retrieval"):
            rows += _retrieval_rows(gate.retrieval, engine_dir, reference_dir)
    result = GateResult(rows)
    result.require()
    for row in rows:
        stages.progress.note(f"gate: {row.describe()}")
    return result


def _perplexity_rows(
    gate: ResolvedPerplexityGate, base_dir: Path, engine_dir: Path, reference_dir: Path
) -> list[Row]:
    ours, theirs = (
        evaluate(
            PerplexityResult,
            *("perplexity", each, "--text", base_dir / gate.text),
            *("--context", gate.context, "--windows", gate.windows),
        )
        for each in (engine_dir, reference_dir)
    )
    basis = (
        f"{theirs.perplexity:.4f} became {ours.perplexity:.4f} over {ours.windows} windows of "
        f"{ours.context} tokens of {gate.text}"
    )
    increase = ours.perplexity / theirs.perplexity - 1
    return [Row("perplexity increase", increase, gate.max_increase, False, basis)]


def _compare_rows(
    gate: ResolvedCompareGate, base_dir: Path, engine_dir: Path, reference_dir: Path
) -> list[Row]:
    result = evaluate(
        CompareResult,
        *("compare", engine_dir, reference_dir, "--text", base_dir / gate.text),
        *("--context", gate.context, "--windows", gate.windows),
    )
    basis = f"{result.windows} windows of {result.context} tokens of {gate.text}"
    return [
        Row("KL in nats a token", result.kl_nats, gate.max_kl, False, basis),
        Row("token agreement", result.agreement, gate.min_agreement, True, basis),
    ]


def _retrieval_rows(
    gate: ResolvedRetrievalGate, engine_dir: Path, reference_dir: Path
) -> list[Row]:
    ours, theirs = (
        evaluate(
            RetrievalResult,
            *("retrieval", each, "--samples", gate.samples),
            *("--contexts", ",".join(map(str, gate.contexts))),
        )
        for each in (engine_dir, reference_dir)
    )
    rows = []
    for context in gate.contexts:
        now, before = ours.accuracy_at(context), theirs.accuracy_at(context)
        if before <= CHANCE:
            raise BuildError(
                f"gate.retrieval says nothing about this model: even unquantised it finds "
                f"{before:.1%} of the facts in contexts of {context} tokens, and a guess "
                f"{CHANCE:.0%}; give other contexts, or leave gate.retrieval out"
            )
        basis = f"{before:.2%} became {now:.2%} of {len(PLACES) * gate.samples} facts"
        drop = round(before - now, SHARE_DECIMALS)
        rows.append(Row(f"retrieval drop at {context} tokens", drop, gate.max_drop, False, basis))
    return rows


def evaluate(result: type[Result], *arguments: object) -> Result:
    """What `llmbuild eval` with the arguments measures. Raises BuildError for what it refuses,
    InternalError when it fails otherwise."""
    command = [sys.executable, "-m", "llmbuild", "eval", *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stderr.strip().removeprefix("Error: ")
    if done.returncode == 2:
        raise BuildError(f"the recipe's gate can't be measured: {said}")
    if done.returncode != 0:
        last = " ".join(said.splitlines()[-1:])
        raise InternalError(f"`eval {arguments[0]}` ended with status {done.returncode}: {last}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=result)
