"""Makes a plan file: measures what each part's precision costs the model, chooses, and writes."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from llmbuild.builder.assemble import Model
from llmbuild.builder.calibration.calibrate import Calibration
from llmbuild.builder.calibration.sensitivity import keeping
from llmbuild.builder.checkpoint.tokenizer import write_tokenizer
from llmbuild.builder.open_model import check_calibration_data, open_model
from llmbuild.builder.planning.kv import kv_overrides, kv_part
from llmbuild.builder.planning.part import Aim, Bench, Part
from llmbuild.builder.planning.weights import check_has_scheme, weight_overrides, weights_part
from llmbuild.builder.recipe.kv_cache import KVOverride
from llmbuild.builder.recipe.quantisation import Override
from llmbuild.builder.recipe.recipe import ResolvedRecipe, load_recipe
from llmbuild.builder.sources.progress import PlainProgress, Progress
from llmbuild.builder.stages import Stages
from llmbuild.errors import BuildError, RecipeError
from llmbuild.runtime.target import CPU

SCORED_TOKENS = 64  # of each, the last ones: those with the longest context
KEPT_BYTES = 1 << 30  # of tensors that are read more than once

PLAN_VERSION = 1


def make_plan(
    recipe_path: Path,
    out: Path,
    overrides: Sequence[str] = (),
    *,
    kv: Aim | None = None,
    weights: Aim | None = None,
    sequences: int,
    per_head: bool = False,
    progress: Progress | None = None,
) -> list[Part]:
    """Measure, choose, and write a plan file; returns what was found of each part with an aim.

    overrides: "key.path=value", applied to the recipe, whose own plan is left out. sequences: of
    the recipe's calibration tokens. per_head: choose for KV heads one by one. Raises UserError
    for what the user can mend; then nothing is written.
    """
    recipe = load_recipe(recipe_path, (*overrides, "plan=null"))
    if recipe.target.kind != CPU:
        raise RecipeError(
            f"recipe {recipe.name}: target: given {recipe.target.kind}; plans are measured for cpu"
        )
    if weights is not None:
        check_has_scheme(recipe.quantisation)
    if not out.parent.is_dir() or out.is_dir():
        raise BuildError(f"--out: given {out}; give a file in a folder that is there")
    check_calibration_data(recipe, recipe_path.parent)
    stages = Stages(progress or PlainProgress())
    model = open_model(recipe, recipe_path.parent, stages)
    resolved = recipe.resolve(model.config.max_position)
    tokens = _tokens(model, resolved, recipe_path.parent, stages)[:sequences]
    scored = min(SCORED_TOKENS, tokens.shape[1])
    read = keeping(model.weights.read, KEPT_BYTES)
    bench = Bench(model, recipe, resolved, tokens, scored, read, stages)
    content: dict[str, Any] = {"version": PLAN_VERSION}
    figures: dict[str, Any] = {
        "model": resolved.name,
        "tokens": {
            "sequences": len(tokens),
            "length": tokens.shape[1],
            "scored": len(tokens) * scored,
        },
    }
    parts: dict[str, Part] = {}
    if kv is not None:
        part = parts["kv_cache"] = kv_part(bench, kv, per_head=per_head)
        content["kv_cache"] = _rows(kv_overrides(part.choice))
    if weights is not None:
        part = parts["quantisation"] = weights_part(bench, weights)
        scheme = resolved.quantisation.scheme
        content["quantisation"] = _rows(weight_overrides(part.choice, scheme))
    figures |= {key: _figures(part) for key, part in parts.items()}
    _write(out, content | {"measured": figures})
    return [*parts.values()]


def _tokens(
    model: Model, resolved: ResolvedRecipe, base_dir: Path, stages: Stages
) -> NDArray[np.int32]:
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "engine"
        root.mkdir()
        write_tokenizer(model.path, root)
        return Calibration(model, resolved, base_dir, root, stages).tokens()


def _rows(overrides: Sequence[KVOverride | Override]) -> list["_Row"]:
    return [_Row({"match": each.match} | each.model_dump(exclude_none=True)) for each in overrides]


def _figures(part: Part) -> dict[str, Any]:
    return {
        f"bytes_a_{part.unit}": _shortened(part.bytes_each),
        "ratio": _shortened(part.ratio),
        "expected_kl_nats": _shortened(part.expected_kl_nats),
        "measured_kl_nats": _shortened(part.together_kl_nats),
        "kl_nats": {
            match: _Row({option.precision: _shortened(option.kl_nats) for option in options})
            for match, options in part.items.items()
        },
    }


def _shortened(number: float) -> float:
    return float(f"{number:.6g}")


class _Row(dict[str, Any]):
    """A mapping on one line of the file."""


class _Dumper(yaml.SafeDumper):
    def row(self, row: _Row) -> yaml.Node:
        return self.represent_mapping("tag:yaml.org,2002:map", row, flow_style=True)


_Dumper.add_representer(_Row, _Dumper.row)


def _write(path: Path, content: dict[str, Any]) -> None:
    """In one step, so that no half of a plan is ever there."""
    text = yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        beside.write_text(text)
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise BuildError(f"--out: {path} can't be written: {error.strerror}") from error
