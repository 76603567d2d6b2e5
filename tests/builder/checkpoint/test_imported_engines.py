"""Engines of quantised Hugging Face checkpoints: their codes are kept, and they compute what
transformers does with the weights that the codes stand for."""

import json

import numpy as np
import pytest
import torch
import yaml
from hf_encoders import (
    awq,
    gptq,
    int_quantized,
    of_module,
    pack_quantized,
    rounded_linear,
    save_checkpoint,
)
from safetensors.numpy import load_file

from llmbuild import LLM, SamplingParams
from llmbuild.builder.compile import compile
from llmbuild.runtime.isa import supported_levels

LEVELS = supported_levels()
CONFIG = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}
CONFIG |= {"num_hidden_layers": 1, "vocab_size": 264, "tie_word_embeddings": False}
ROUNDING = 1e-5  # the largest difference from the reference that is only rounding
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
GROUP = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None}
INT8 = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
    "input_activations": {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"},
}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": []}
COMPRESSED |= {"config_groups": {"group_0": GROUP}}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}
# What its linears are, how they are stored, and whether the head is one of them.
CASES = {
    "gptq": (GPTQ, {"group_size": 32, "lowest_zero": 1}, gptq, True),
    "gptq, symmetric": (GPTQ | {"sym": True}, {"group_size": 32, "symmetric": True}, gptq, False),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64}, {"group_size": 64}, awq, False),
    "int4": (
        COMPRESSED,
        {"group_size": 32, "symmetric": True},
        lambda linear: pack_quantized(linear, True),
        True,
    ),
    "int8": (
        COMPRESSED | {"format": "int-quantized", "config_groups": {"group_0": INT8}},
        {"bits": 8, "symmetric": True},
        int_quantized,
        False,
    ),
}


@pytest.fixture
def save_quantised(tmp_path, save_tiny_llama):
    """save_quantised(case, scheme, level): a tiny Llama in the case's format, and its recipe. Gives
    the recipe's path, and the model with the weights that its codes stand for."""

    def save(case, scheme, level):
        from transformers import LlamaConfig, LlamaForCausalLM

        section, kind, encode, with_head = CASES[case]
        recipe = save_tiny_llama(tmp_path / "source", **CONFIG)
        path = recipe.parent / "model"
        config = json.loads((path / "config.json").read_text())
        tensors = load_file(path / "model.safetensors")
        rng = np.random.default_rng(2)
        tensors["lm_head.weight"] = rng.standard_normal((264, 64), np.float32) / 8
        values, stored = {}, {}
        for name, weight in tensors.items():
            if "_proj" in name or (with_head and "lm_head" in name):
                linear = rounded_linear(weight, **kind)
                values[name] = linear.values()
                stored |= of_module(name.removesuffix(".weight"), encode(linear))
            else:
                values[name] = stored[name] = weight
        save_checkpoint(path, stored, section, **config)
        content = yaml.safe_load(recipe.read_text())
        content |= {"quantisation": scheme, "target": {"isa": [level]}}
        recipe.write_text(yaml.safe_dump(content))
        model = LlamaForCausalLM(LlamaConfig(**config)).eval()
        model.load_state_dict({name: torch.from_numpy(weight) for name, weight in values.items()})
        return recipe, model

    return save


def check(engine, model):
    """Greedy tokens are transformers', wherever its best two logits aren't as good as equal."""
    prompt = list(range(5, 18))
    with LLM(engine, num_threads=2) as llm:
        given = SamplingParams(max_tokens=30, ignore_eos=True)
        generated = list(llm.generate(prompt, given).token_ids)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *generated]])).logits[0].numpy()
    logits = logits[len(prompt) - 1 : -1]
    top_two = np.sort(logits, axis=1)[:, -2:]
    is_clear = top_two[:, 1] - top_two[:, 0] > 2 * ROUNDING * np.abs(logits).max(axis=1)
    assert is_clear.sum() >= 25
    assert (logits.argmax(axis=1) == generated)[is_clear].all()


@pytest.mark.parametrize(
    ("case", "scheme"),
    [
        ("gptq", "stored-a16"),
        ("gptq", "none"),
        *(
            pytest.param(case, "stored-a16", marks=pytest.mark.slow)
            for case in CASES
            if case != "gptq"
        ),
    ],
)
def test_an_engine_computes_what_the_codes_stand_for(
    save_quantised, tmp_path, capsys, case, scheme
):
    level = LEVELS[list(CASES).index(case) % len(LEVELS)]
    recipe, model = save_quantised(case, scheme, level)
    engine = compile(recipe, tmp_path / "engine")
    report = json.loads((engine / "report.json").read_text())
    assert max(report["verified"].values()) <= ROUNDING
    _, kind, _, with_head = CASES[case]
    manifest = json.loads((engine / "manifest.json").read_text())
    quantised = manifest["quantised"].values() if scheme != "none" else []
    assert len(manifest["quantised"]) == (7 + with_head if scheme != "none" else 0)
    for tensor in quantised:
        assert tensor["bits"] == kind.get("bits", 4)
        assert tensor["symmetric"] == kind.get("symmetric", False)
        assert tensor["zero_points"] == (not tensor["symmetric"])
    check(engine, model)
    told = capsys.readouterr().err
    assert ("input_activations of int8 (dynamic)" in told) == (case == "int8")
    zero_points = scheme != "none" and not kind.get("symmetric", False)
    assert ("with zero points, unrounded activations" in told) == zero_points


def test_int8_activations_meet_codes_with_zero_points(save_quantised, tmp_path):
    """The build verifies the engine against the torch reference, which rounds activations alike."""
    recipe, _ = save_quantised("awq", "stored-a8", LEVELS[0])
    engine = compile(recipe, tmp_path / "engine")
    report = json.loads((engine / "report.json").read_text())
    assert max(report["verified"].values()) <= 2e-2


def test_a_mixtures_experts_keep_their_codes(hf_model, compile_engine):
    sizes = {"moe_intermediate_size": 96, "experts_implementation": "eager"}
    sizes |= {"hidden_size": 64, "num_experts": 3, "num_experts_per_tok": 2}
    saved = hf_model("qwen3_moe", **sizes, max_position_embeddings=64)
    stored = {}
    for name, weight in load_file(saved.path / "model.safetensors").items():
        if ".experts." not in name:
            stored[name] = weight
            continue
        linear = rounded_linear(weight, group_size=32)
        stored |= of_module(name.removesuffix(".weight"), gptq(linear, version=2))
        layer, expert, part = (name.split(".")[index] for index in (2, 5, 6))
        experts = saved.model.model.layers[int(layer)].mlp.experts
        own = experts.down_proj if part == "down_proj" else experts.gate_up_proj
        rows = slice(96, None) if part == "up_proj" else slice(len(weight))
        own.data[int(expert), rows] = torch.from_numpy(linear.values())
    config = saved.config
    (saved.path / "model.safetensors").unlink()
    save_checkpoint(saved.path, stored, GPTQ | {"checkpoint_format": "gptq_v2"}, **config)
    for scheme in ("stored-a16", "none"):
        engine = compile_engine(saved, f"quantisation.scheme={scheme}")
        manifest = json.loads((engine / "manifest.json").read_text())
        stacks = [each for each in manifest["quantised"].values() if each["zero_points"]]
        assert len(stacks) == (2 * len(saved.model.model.layers) if scheme != "none" else 0)
        check(engine, saved.model)
