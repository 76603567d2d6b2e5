"""The ordered list of passes that turns a traced graph into the one that targets lower."""

from collections.abc import Callable
from pathlib import Path

from llmbuild.builder.graph.passes.add_rms_norm import place_add_rms_norm
from llmbuild.builder.graph.passes.fold import fold
from llmbuild.builder.graph.passes.gated_activation import place_gated_activation
from llmbuild.builder.graph.passes.gather_rows import place_gather_rows
from llmbuild.builder.graph.passes.merge_linears import merge_linears
from llmbuild.builder.graph.passes.rope_kv_write import place_rope_kv_write
from llmbuild.builder.graph.passes.verify import verify
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.errors import BuildError

PASSES: tuple[Callable[[StepGraph], None], ...] = (
    fold,
    place_gather_rows,
    place_gated_activation,
    place_rope_kv_write,
    place_add_rms_norm,
    merge_linears,
)


def run_passes(step: StepGraph, dump_dir: Path | None = None) -> None:
    """Run every pass in place, checking the graph's contract after each.

    dump_dir: where to write the graph after each pass, as NN-<pass>.onnx. Raises BuildError when
    nothing can be written there.
    """
    for index, run in enumerate(PASSES):
        run(step)
        step.graph.sort()
        verify(step)
        if dump_dir is not None:
            _dump(step, dump_dir / f"{index:02d}-{run.__name__}.onnx")


def _dump(step: StepGraph, path: Path) -> None:
    try:
        step.save(path)
    except OSError as error:
        raise BuildError(
            f"can't dump the step graph as {path}: {error}; give another folder"
        ) from error
