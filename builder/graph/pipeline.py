"""The ordered list of passes that turns a traced graph into the one that targets lower."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmbuild.builder.graph.passes.add_rms_norm import place_add_rms_norm
from llmbuild.builder.graph.passes.fold import fold
from llmbuild.builder.graph.passes.gated_activation import place_gated_activation
from llmbuild.builder.graph.passes.gather_rows import place_gather_rows
from llmbuild.builder.graph.passes.kv_scales import place_kv_scales
from llmbuild.builder.graph.passes.merge_linears import merge_linears
from llmbuild.builder.graph.passes.quantise import quantise
from llmbuild.builder.graph.passes.rope_kv_write import place_rope_kv_write
from llmbuild.builder.graph.passes.verify import verify
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.errors import BuildError
from llmbuild.quant.plan import QuantPlan


def passes(
    plan: QuantPlan, kv_scales: Mapping[str, NDArray[np.float32]]
) -> dict[str, Callable[[StepGraph], None]]:
    """All passes by name, in order."""
    return {
        "fold": fold,
        "place_gather_rows": place_gather_rows,
        "place_gated_activation": place_gated_activation,
        "place_rope_kv_write": place_rope_kv_write,
        "place_kv_scales": partial(place_kv_scales, scales=kv_scales),
        "place_add_rms_norm": place_add_rms_norm,
        "quantise": partial(quantise, plan=plan),
        "merge_linears": merge_linears,
    }


def run_passes(
    step: StepGraph,
    dump_dir: Path | None = None,
    plan: QuantPlan | None = None,
    kv_scales: Mapping[str, NDArray[np.float32]] | None = None,
) -> None:
    """Run every pass in place, checking the graph's contract after each.

    plan: which weights to quantise; by default none. kv_scales: channel scales of the KV cache, as
    place_kv_scales takes them. dump_dir: where to write the graph after each
    pass, as NN-<pass>.onnx. Raises BuildError when nothing can be written there.
    """
    for index, (name, run) in enumerate(passes(plan or QuantPlan(), kv_scales or {}).items()):
        run(step)
        step.graph.sort()
        verify(step)
        if dump_dir is not None:
            _dump(step, dump_dir / f"{index:02d}-{name}.onnx")


def _dump(step: StepGraph, path: Path) -> None:
    try:
        step.save(path)
    except OSError as error:
        raise BuildError(
            f"can't dump the step graph as {path}: {error}; give another folder"
        ) from error
