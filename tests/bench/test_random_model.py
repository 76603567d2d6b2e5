"""A random model is one that the builder and transformers read."""

import json
from pathlib import Path

import msgspec
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench import random_model
from bench.cases import Shape
from bench.step_work import StepWork
from llmbuild.builder.compile import compile
from llmbuild.builder.targets.cpu.pack_quantised import quantised_bytes
from llmbuild.errors import UserError
from llmbuild.quant.grid import WeightGrid
from llmbuild.runtime.inspect_cli import derive
from llmbuild.runtime.manifest import read_manifest
from llmbuild.runtime.vocab_matrices import head_bytes

SHAPE = Shape("tiny", 64, 96, 4, 2, 16, vocab=300, layers=2)


def test_a_random_model_loads_in_transformers_without_a_tensor_missing_or_left(
    tmp_path: Path,
) -> None:
    random_model.write(SHAPE, tmp_path / "model")
    model, told = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", output_loading_info=True, dtype=torch.float32
    )
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    assert model.model.layers[1].mlp.up_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert AutoTokenizer.from_pretrained(tmp_path / "model").decode([40, 41])


def test_the_benchmarks_recipe_compiles_it_and_its_embedding_is_gathered(
    checkout: Path, tmp_path: Path
) -> None:
    random_model.write(SHAPE, tmp_path / "model")
    recipe = tmp_path / "recipe.yaml"
    text = (checkout / "bench" / "recipes" / "llama-1.1b.yaml").read_text()
    recipe.write_text(text.replace("path:../../build/llama-1.1b", "path:model"))
    changes = ["quantisation.group_size=32", "limits.max_sequence_length=64"]
    out = compile(recipe, tmp_path / "engine", changes)
    manifest, report = read_manifest(out), json.loads((out / "report.json").read_text())
    read_bytes = report["decode"][-1]["weight_bytes"]  # by the compiled calls
    header_bytes = 4096  # of the weights' file, at most
    derived = derive(manifest, 64)
    inspected_bytes = derived.decode_bytes_per_token - 64 * derived.kv_bytes_per_token
    assert read_bytes <= inspected_bytes < read_bytes + header_bytes
    work = StepWork(manifest)
    assert work.body_bytes + work.head_bytes == inspected_bytes
    for symmetric in (True, False):
        grid = WeightGrid(4, 32, symmetric)
        head = msgspec.structs.replace(manifest.quantised["lm_head.weight"], symmetric=symmetric)
        quantised = manifest.quantised | {"lm_head.weight": head}
        packed_bytes = quantised_bytes(grid, SHAPE.vocab, SHAPE.hidden)
        assert head_bytes(msgspec.structs.replace(manifest, quantised=quantised)) == packed_bytes


def test_a_folder_that_exists_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(random_model.main, ["smollm2-135m", str(tmp_path)])
    assert isinstance(done.exception, UserError)
    assert "give a new folder" in str(done.exception)
