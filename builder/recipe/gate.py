"""The recipe's gate: how much of the model quantisation may cost, measured against the engine of
the same recipe without any. A limit that isn't given isn't held to."""

from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from llmbuild.builder.recipe.problems import problem
from llmbuild.builder.recipe.section import Section, listed
from llmbuild.quant.evaluation.defaults import (
    COMPARE_WINDOWS,
    CONTEXT,
    MIN_CONTEXT,
    PERPLEXITY_WINDOWS,
    RETRIEVAL_SAMPLES,
    default_contexts,
)

_TEXT = "a file of UTF-8 text, relative to the recipe's folder"
_CONTEXT = f"an integer from {MIN_CONTEXT} to limits.max_sequence_length"
_COUNT = "an integer from 1"
_SHARE = "a number from 0 to 1"


class OverText(Section):
    """A measurement over the windows of a text."""

    text: str = Field(min_length=1, description=_TEXT)
    context: int | None = Field(default=None, ge=MIN_CONTEXT, description=_CONTEXT)

    def resolved(self, longest: int) -> dict[str, Any]:
        return self.model_dump() | {"context": self.context or min(CONTEXT, longest)}


class PerplexityGate(OverText):
    """max_increase: of the perplexity, relative to the unquantised engine's."""

    windows: int = Field(default=PERPLEXITY_WINDOWS, ge=1, description=_COUNT)
    max_increase: float = Field(ge=0, allow_inf_nan=False, description="a number from 0")


class CompareGate(OverText):
    """max_kl: nats a token. min_agreement: share of tokens with the same likeliest one."""

    windows: int = Field(default=COMPARE_WINDOWS, ge=1, description=_COUNT)
    max_kl: float | None = Field(
        default=None, ge=0, allow_inf_nan=False, description="a number from 0"
    )
    min_agreement: float | None = Field(
        default=None, ge=0, le=1, allow_inf_nan=False, description=_SHARE
    )

    @model_validator(mode="after")
    def _has_a_limit(self) -> Self:
        if self.max_kl is None and self.min_agreement is None:
            raise problem("give the limits max_kl, min_agreement or both")
        return self


def _contexts(value: Any) -> Any:
    """Refused as one value: which item is wrong is plain to see."""
    contexts = listed(value)
    if contexts is not None and not (
        isinstance(contexts, tuple)
        and contexts
        and all(type(context) is int and context > 0 for context in contexts)
        and len(set(contexts)) == len(contexts)
    ):
        raise ValueError("no contexts")
    return contexts


class RetrievalGate(Section):
    """max_drop: of the share of facts found at each context, both places together."""

    contexts: Annotated[tuple[int, ...] | None, BeforeValidator(_contexts)] = Field(
        default=None,
        description="a list of distinct integers from 1 to limits.max_sequence_length",
    )
    samples: int = Field(default=RETRIEVAL_SAMPLES, ge=1, description=_COUNT)
    max_drop: float = Field(ge=0, le=1, allow_inf_nan=False, description=_SHARE)

    def resolved(self, longest: int) -> dict[str, Any]:
        return self.model_dump() | {"contexts": self.contexts or default_contexts(longest)}


class Gate(Section):
    perplexity: PerplexityGate | None = None
    compare: CompareGate | None = None
    retrieval: RetrievalGate | None = None

    @model_validator(mode="after")
    def _measures_something(self) -> Self:
        if not (self.perplexity or self.compare or self.retrieval):
            raise problem("give perplexity, compare or retrieval, or leave the gate out")
        return self

    def check_fits(self, longest: int) -> None:
        """Raises a recipe's problem for a context of more than the engine's longest sequence."""
        contexts = {
            ("perplexity", "context"): self.perplexity and self.perplexity.context,
            ("compare", "context"): self.compare and self.compare.context,
            ("retrieval", "contexts"): self.retrieval and max(self.retrieval.contexts or (0,)),
        }
        for keys, context in contexts.items():
            if context and context > longest:
                text = f"at most limits.max_sequence_length, {longest}, is allowed"
                raise problem(text, loc=("gate", *keys))

    def resolved(self, longest: int) -> dict[str, Any]:
        """As written, with defaults filled that depend on the engine's longest sequence."""
        sections = {"perplexity": self.perplexity, "compare": self.compare}
        content = {name: each and each.resolved(longest) for name, each in sections.items()}
        return content | {"retrieval": self.retrieval and self.retrieval.resolved(longest)}


class ResolvedPerplexityGate(PerplexityGate):
    context: int


class ResolvedCompareGate(CompareGate):
    context: int


class ResolvedRetrievalGate(RetrievalGate):
    contexts: Annotated[tuple[int, ...], BeforeValidator(_contexts)]


class ResolvedGate(Gate):
    """A gate in which nothing is left open."""

    perplexity: ResolvedPerplexityGate | None = None
    compare: ResolvedCompareGate | None = None
    retrieval: ResolvedRetrievalGate | None = None
