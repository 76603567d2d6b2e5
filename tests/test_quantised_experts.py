"""Mixtures whose experts are quantised: compiled, verified, and held to transformers with experts
that are rounded by plain loops."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from llmbuild import LLM, SamplingParams
from llmbuild.errors import RecipeError
from llmbuild.runtime.manifest import read_manifest

MIXTURE = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
    "experts_implementation": "eager",
}
STACKS = [f"layers.{layer}.mlp.experts.{part}" for layer in (0, 1) for part in ("gate_up", "down")]
CALIBRATION = ("calibration.sequences=4", "calibration.length=24")
SCHEMES: dict[str, tuple[str, ...]] = {
    "w4a8": ("scheme=w4a8", "method=rtn"),
    "w4a16 with minima, gptq": ("scheme=w4a16", "symmetric=false", "method=gptq"),
    "w8a8": ("scheme=w8a8", "group_size=row"),
    "w8a8-static, smoothquant": ("scheme=w8a8-static", "group_size=row"),
    "awq, rotated": ("scheme=w4a8", "method=awq", "rotation=true"),
}
QUICK = ("w4a8", "w4a16 with minima, gptq")


def settings(*chosen: str) -> tuple[str, ...]:
    given = {"group_size": "32"} | dict(each.split("=") for each in chosen)
    return tuple(f"quantisation.{key}={value}" for key, value in given.items())


@pytest.mark.parametrize(
    "scheme",
    [
        pytest.param(scheme, id=name, marks=() if name in QUICK else pytest.mark.slow)
        for name, scheme in SCHEMES.items()
    ],
)
def test_experts_are_on_the_recipes_grid_and_the_engine_is_verified(
    hf_model: Callable[..., Any], compile_engine: Callable[..., Path], scheme: tuple[str, ...]
) -> None:
    needs_tokens = "method=rtn" not in scheme and "scheme=w8a8" not in scheme
    more = CALIBRATION if needs_tokens else ()
    engine = compile_engine(hf_model("qwen3_moe", **MIXTURE), *settings(*scheme), *more)
    report = json.loads((engine / "report.json").read_text())
    assert all(worst is not None for worst in report["verified"].values())
    quantised = read_manifest(engine).quantised
    bits = 8 if "scheme=w8a8" in scheme[0] else 4
    assert {quantised[name].bits for name in STACKS} == {bits}
    assert not any("router" in name for name in quantised)
    losses = {each["name"]: each["loss"] for each in report["matrices"]}
    assert all(0 < losses[name] < 0.05 for name in STACKS)


def rounded_by_loops(matrix: np.ndarray, group: int) -> np.ndarray:
    """int8, symmetric: each value the nearest multiple of its group's largest magnitude / 127."""
    out = np.empty_like(matrix)
    for row in range(len(matrix)):
        for begin in range(0, matrix.shape[1], group):
            values = matrix[row, begin : begin + group].astype(np.float64)
            scale = np.float64(np.float16(np.abs(values).max() / 127))
            out[row, begin : begin + group] = np.clip(np.rint(values / scale), -128, 127) * scale
    return out


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_tokens_are_those_of_transformers_with_rounded_experts(
    hf_model: Callable[..., Any], compile_engine: Callable[..., Path], ranks: int
) -> None:
    saved = hf_model("qwen3_moe", **MIXTURE)
    override = '[{"match": "*.mlp.experts.*", "scheme": "w8a16", "group_size": 32}]'
    engine = compile_engine(
        saved,
        "quantisation.scheme=none",
        f"quantisation.overrides={override}",
        f"parallel.tp={ranks}",
    )
    assert sorted(read_manifest(engine).quantised) == sorted(STACKS)
    for layer in saved.model.model.layers:
        for stack in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
            for expert in stack.data:
                expert.copy_(torch.from_numpy(rounded_by_loops(expert.numpy(), 32)))
    prompt = [3, 14, 15, 9, 2, 6]
    with torch.no_grad():
        expected = saved.model.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None
        )[0].tolist()
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    with LLM(engine) as llm:
        (got,) = llm.generate([prompt], params)
    assert [*prompt, *got.token_ids] == expected


@pytest.mark.slow
def test_static_scales_of_experts_are_cut_for_ranks(
    hf_model: Callable[..., Any], compile_engine: Callable[..., Path]
) -> None:
    scheme = settings("scheme=w8a8-static", "group_size=32")
    engine = compile_engine(
        hf_model("qwen3_moe", **MIXTURE), *scheme, *CALIBRATION, "parallel.tp=2"
    )
    report = json.loads((engine / "report.json").read_text())
    assert all(worst is not None for worst in report["verified"].values())


def test_experts_alone_are_nothing_to_distil(
    hf_model: Callable[..., Any], compile_engine: Callable[..., Path]
) -> None:
    override = (
        '[{"match": "*.mlp.experts.*", "scheme": "w4a8", "group_size": 32, "method": "gptq"}]'
    )
    chosen = (f"quantisation.overrides={override}", "quantisation.scheme=none")
    with pytest.raises(RecipeError, match="distillation: given; no matrix that it could train"):
        compile_engine(hf_model("qwen3_moe", **MIXTURE), *chosen, "distillation={steps: 1}")


def test_a_group_that_does_not_fit_experts_is_refused_with_those_that_do(
    hf_model: Callable[..., Any], compile_engine: Callable[..., Path]
) -> None:
    with pytest.raises(RecipeError) as refused:
        compile_engine(hf_model("qwen3_moe", **MIXTURE), *settings("scheme=w4a8", "group_size=64"))
    lines = str(refused.value).splitlines()[1:]
    assert [line.split(":")[0].strip() for line in lines] == STACKS[1::2]
    assert all("on rows of 96 columns, which allow group sizes 32, 96" in line for line in lines)


@pytest.mark.slow
def test_a_plan_counts_of_experts_what_a_token_reads(
    hf_model: Callable[..., Any],
    compile_engine: Callable[..., Path],
    run_llmbuild: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
) -> None:
    saved = hf_model("qwen3_moe", **MIXTURE)
    compile_engine(saved)  # leaves the recipe
    chosen = [each for key in settings("scheme=w8a16") for each in ("--set", key)]
    asked = ("--out", tmp_path / "plan.yaml", "--weight-ratio", 0.5, "--sequences", 1)
    done = run_llmbuild("plan", tmp_path / "recipe.yaml", *asked, *chosen)
    assert done.returncode == 0, done.stderr
    figures = yaml.safe_load((tmp_path / "plan.yaml").read_text())["measured"]["quantisation"]
    attention, router, experts = 2 * 64 * 64 + 2 * 32 * 64, 5 * 64, 2 * 3 * 96 * 64
    full_bytes = 4 * (2 * (attention + router + experts) + 97 * 64)
    assert figures["ratio"] == pytest.approx(figures["bytes_a_step"] / full_bytes, abs=1e-4)
    assert figures["ratio"] <= 0.5
    assert any(match.startswith("layers.0.mlp.") for match in figures["kl_nats"])
