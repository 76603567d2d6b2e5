"""What the tests of the passes ask of a graph."""

from collections.abc import Callable

import pytest

from llmbuild.builder.graph.step_graph import StepGraph


@pytest.fixture(scope="session")
def kinds() -> Callable[[StepGraph], list[str]]:
    """kinds(step): the graph's op types in order, after a sort that would refuse a cycle."""

    def of(step: StepGraph) -> list[str]:
        step.graph.sort()
        return [node.op_type for node in step.graph]

    return of
