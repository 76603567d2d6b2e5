"""The recipe's gate: what is accepted and completed, and what each refusal says."""

from typing import Any

import pytest
from pydantic import ValidationError

from llmbuild.builder.recipe.gate import Gate, ResolvedGate
from llmbuild.builder.recipe.problems import known_keys, problem_lines
from llmbuild.builder.recipe.section import Section

LONGEST = 1000


class Holder(Section):
    """What a recipe is to its gate."""

    gate: Gate | None = None


def gate_of(content: Any) -> Gate | None:
    return Holder.model_validate({"gate": content}).gate


PERPLEXITY = {"text": "a.txt", "max_increase": 0.03}
COMPARE = {"text": "a.txt", "max_kl": 0.05}
RETRIEVAL = {"max_drop": 0.02}

BAD: dict[str, tuple[Any, str, list[str]]] = {
    "a word": ("strict", "gate", ["given strict", "perplexity, compare, retrieval"]),
    "empty": ({}, "gate", ["given {}", "perplexity, compare or retrieval"]),
    "unknown": ({"perplexty": {}}, "gate.perplexty", ["nearest", "gate.perplexity"]),
    "no limit on perplexity": (
        {"perplexity": {"text": "a.txt"}},
        "gate.perplexity.max_increase",
        ["missing", "a number from 0"],
    ),
    "no limit on KL or agreement": (
        {"compare": {"text": "a.txt"}},
        "gate.compare",
        ["given {text: a.txt}", "max_kl, min_agreement"],
    ),
    "no limit on retrieval": ({"retrieval": {}}, "gate.retrieval.max_drop", ["missing"]),
    "no text": ({"compare": {"max_kl": 1.0}}, "gate.compare.text", ["missing", "UTF-8"]),
    "negative limit": (
        {"perplexity": PERPLEXITY | {"max_increase": -0.1}},
        "gate.perplexity.max_increase",
        ["given -0.1", "from 0"],
    ),
    "infinite limit": (
        {"compare": COMPARE | {"max_kl": float("inf")}},
        "gate.compare.max_kl",
        ["given .inf"],
    ),
    "agreement in percent": (
        {"compare": COMPARE | {"min_agreement": 90}},
        "gate.compare.min_agreement",
        ["given 90", "from 0 to 1"],
    ),
    "context that scores nothing": (
        {"compare": COMPARE | {"context": 2}},
        "gate.compare.context",
        ["given 2", "from 3"],
    ),
    "no windows": (
        {"perplexity": PERPLEXITY | {"windows": 0}},
        "gate.perplexity.windows",
        ["given 0", "from 1"],
    ),
    "no contexts": (
        {"retrieval": RETRIEVAL | {"contexts": []}},
        "gate.retrieval.contexts",
        ["given []", "distinct"],
    ),
    "a context twice": (
        {"retrieval": RETRIEVAL | {"contexts": [512, 512]}},
        "gate.retrieval.contexts",
        ["given [512, 512]", "distinct"],
    ),
    "contexts as text": (
        {"retrieval": RETRIEVAL | {"contexts": ["512", 3]}},
        "gate.retrieval.contexts",
        ["given ['512', 3]", "a list of distinct integers"],
    ),
    "one context": (
        {"retrieval": RETRIEVAL | {"contexts": 512}},
        "gate.retrieval.contexts",
        ["given 512", "a list"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_gate_is_refused_with_the_key_and_what_is_allowed(case: str) -> None:
    content, key, named = BAD[case]
    with pytest.raises(ValidationError) as refused:
        gate_of(content)
    [line] = problem_lines(refused.value, Holder, {"gate": content})
    assert line.startswith(f"{key}: ")
    assert all(text in line for text in named), line


def test_gate_may_be_left_out() -> None:
    assert gate_of(None) is None


def test_keys_of_a_section_that_may_be_left_out_are_known() -> None:
    assert {"gate", "gate.compare", "gate.compare.max_kl"} <= {*known_keys(Holder)}


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ({"perplexity": PERPLEXITY | {"context": 1001}}, ("gate", "perplexity", "context")),
        ({"compare": COMPARE | {"context": 1001}}, ("gate", "compare", "context")),
        ({"retrieval": RETRIEVAL | {"contexts": [9, 1001]}}, ("gate", "retrieval", "contexts")),
    ],
)
def test_context_longer_than_a_sequence_is_refused(content: Any, key: tuple[str, ...]) -> None:
    gate = gate_of(content)
    assert gate is not None
    with pytest.raises(Exception, match=r"at most .*, 1000, is allowed") as refused:
        gate.check_fits(LONGEST)
    assert refused.value.context["loc"] == key  # type: ignore[attr-defined]
    gate.check_fits(LONGEST + 1)


@pytest.mark.parametrize(
    ("longest", "context", "contexts"),
    [(64, 64, (64,)), (600, 512, (512,)), (1024, 512, (512, 1024)), (9999, 512, (512, 1024, 2048))],
)
def test_defaults_are_cut_to_the_longest_sequence(
    longest: int, context: int, contexts: tuple[int, ...]
) -> None:
    gate = gate_of({"perplexity": PERPLEXITY, "compare": COMPARE, "retrieval": RETRIEVAL})
    assert gate is not None
    gate.check_fits(longest)
    resolved = ResolvedGate.model_validate(gate.resolved(longest))
    assert resolved.perplexity is not None
    assert resolved.compare is not None
    assert resolved.retrieval is not None
    assert (resolved.perplexity.context, resolved.perplexity.windows) == (context, 64)
    assert (resolved.compare.context, resolved.compare.windows) == (context, 16)
    assert (resolved.retrieval.contexts, resolved.retrieval.samples) == (contexts, 50)
    assert ResolvedGate.model_validate(resolved.resolved(longest)) == resolved


def test_what_is_given_stays() -> None:
    content = {
        "perplexity": PERPLEXITY | {"context": 7, "windows": 3},
        "compare": COMPARE | {"context": 9, "windows": 2, "min_agreement": 0.5},
        "retrieval": RETRIEVAL | {"contexts": (400, 300), "samples": 2},
    }
    gate = gate_of(content)
    assert gate is not None
    assert gate.resolved(LONGEST) == content
