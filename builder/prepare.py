"""From an open model to what is lowered: its step graph, and every precision decided."""

from dataclasses import dataclass
from pathlib import Path

from llmbuild.builder.assemble import Model, traced_precision
from llmbuild.builder.calibration.calibrate import Calibration
from llmbuild.builder.calibration.distil import trained_names
from llmbuild.builder.calibration.store import TensorStore
from llmbuild.builder.checkpoint.tokenizer import write_tokenizer
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.builder.graph.trace import trace
from llmbuild.builder.quantisation import kv_layout, plan_quantisation, untie_head
from llmbuild.builder.recipe.distillation import NOTHING_TO_TRAIN
from llmbuild.builder.recipe.recipe import ResolvedRecipe
from llmbuild.builder.shard.localise import Scales
from llmbuild.builder.stages import Stages
from llmbuild.errors import RecipeError
from llmbuild.quant.kv import needs_channel_scales
from llmbuild.quant.plan import QuantPlan
from llmbuild.quant.reader import PlannedReader, planned_reader
from llmbuild.runtime.manifest import KVLayout


@dataclass(frozen=True)
class Prepared:
    """A model that is traced, and calibrated where its plan asks for it; no pass has run. read:
    gives tensors as the plan has them. calibrated: None where nothing asked for it."""

    step: StepGraph
    plan: QuantPlan
    kv: KVLayout
    kv_scales: Scales
    read: PlannedReader
    calibrated: TensorStore | None


def prepare(
    model: Model, resolved: ResolvedRecipe, base_dir: Path, root: Path, stages: Stages
) -> Prepared:
    """Trace, plan and calibrate, and write the tokenizer below `root`. Raises RecipeError for
    precisions that don't fit the model."""
    write_tokenizer(model.path, root)
    with stages.stage("trace"):
        step = trace(model.config, traced_precision(resolved))
    plan = plan_quantisation(resolved.quantisation, step, model.weights, resolved.target.kind)
    untie_head(step, plan)
    if resolved.distillation is not None and not trained_names(step, plan):
        raise RecipeError(f"recipe {resolved.name}:\n  distillation: given; {NOTHING_TO_TRAIN}")
    calibration = Calibration(model, resolved, base_dir, root, stages)
    calibrated = calibration.tensors(plan) if plan.needs_calibration else None
    if calibrated is not None:
        plan = calibrated.with_scales(plan)
    kv = kv_layout(resolved, model.config)
    kv_scales: Scales = {}
    if needs_channel_scales(kv):
        kv_scales = calibration.kv_scales(kv, plan, calibrated)
    read = planned_reader(model.weights, plan, calibrated)
    return Prepared(step, plan, kv, kv_scales, read, calibrated)
