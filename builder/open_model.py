"""What a build begins with: the recipe's model, fetched and opened."""

from pathlib import Path

from llmbuild.builder.assemble import Model
from llmbuild.builder.checkpoint import open_checkpoint
from llmbuild.builder.models.families import family_of
from llmbuild.builder.models.rotated import RotatedTensors, rotated_config
from llmbuild.builder.models.weights import ModelWeights
from llmbuild.builder.recipe.calibration import SELF
from llmbuild.builder.recipe.recipe import Recipe, ResolvedRecipe, effective_yaml
from llmbuild.builder.sources import fetch, parse_source
from llmbuild.builder.sources.progress import Progress
from llmbuild.builder.stages import Stages
from llmbuild.cache import cache_root
from llmbuild.errors import RecipeError


def check_calibration_data(recipe: Recipe, base_dir: Path) -> None:
    """Raises RecipeError for a file that isn't there: better known before a fetch than after."""
    data = recipe.calibration.data
    if data != SELF and not (base_dir / data).is_file():
        raise RecipeError(
            f"recipe {recipe.name}:\n  calibration.data: given {data}; {base_dir / data} isn't a "
            "file"
        )


def open_model(recipe: Recipe, base_dir: Path, stages: Stages) -> Model:
    """Fetch and open the recipe's model, and rotate it where the recipe asks for that. Raises
    RecipeError for one that can't be rotated."""
    with stages.stage("fetch", shows_bars=True):
        path = fetch(
            parse_source(recipe.model.source),
            recipe.model.sha256,
            base_dir=base_dir,
            cache_dir=cache_root(),
            progress=stages.progress,
        )
    with stages.stage("read checkpoint"):
        checkpoint = open_checkpoint(path)
        family = family_of(checkpoint.config)
        config = family.translate(checkpoint.config)
        weights = ModelWeights(checkpoint, family, config)
    for note in checkpoint.notes:
        stages.progress.note(note)
    model = Model(path, config, weights)
    if not recipe.quantisation.rotation:
        return model
    if not recipe.quantisation.quantises and recipe.kv_cache.bits >= 16:
        stages.progress.note(
            "quantisation.rotation: nothing of the recipe is rounded, so it is idle"
        )
    return Model(path, rotated_config(config), RotatedTensors(weights, config), model)


def state_recipe(resolved: ResolvedRecipe, root: Path, progress: Progress) -> None:
    """Print the effective recipe, and keep it in the engine."""
    text = effective_yaml(resolved)
    progress.note("effective recipe:\n" + "".join(f"  {line}\n" for line in text.splitlines()))
    (root / "recipe.yaml").write_text(text)
