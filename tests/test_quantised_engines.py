"""Whole path of a quantised model: compiled from a checkpoint, verified at this processor's levels,
and generating what the reference would."""

import json
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import yaml
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from tokenizers import pre_tokenizers

from llmbuild import LLM, SamplingParams
from llmbuild.builder.checkpoint import open_checkpoint
from llmbuild.builder.compile import compile
from llmbuild.builder.graph.pipeline import run_passes
from llmbuild.builder.graph.reference import run_steps
from llmbuild.builder.graph.trace import trace
from llmbuild.builder.models.families import family_of
from llmbuild.builder.models.weights import ModelWeights
from llmbuild.builder.quantisation import plan_quantisation
from llmbuild.builder.recipe.recipe import load_recipe
from llmbuild.errors import CheckpointError, RecipeError
from llmbuild.plugins.common.kv_pools import LayerPools
from llmbuild.quant.reader import planned_reader
from llmbuild.runtime.batch import StepBatch
from llmbuild.runtime.isa import supported_levels

LEVELS = supported_levels()
# Rows of 64 and 128 columns, 4 heads in 2 groups.
WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}
WIDE |= {"num_hidden_layers": 1, "vocab_size": 258}
GGUF_TYPES = {
    "attn_q": Type.Q4_0,
    "attn_k": Type.Q4_0,
    "attn_v": Type.Q4_1,
    "attn_output": Type.Q8_0,
    "ffn_gate": Type.Q4_1,
    "ffn_up": Type.Q4_1,
    "ffn_down": Type.Q5_1,  # of no grid of ours
    "token_embd": Type.Q8_0,
}
# The largest difference from the reference that is only rounding, of the largest logit. Where a
# value lies between two int8 codes, engine and reference may round it to either, which moves it by
# 1 / 127 of its group's largest.
ROUNDING, TIES = 1e-5, 2e-2

# Quick: each kind of grid and activations at one of this processor's levels. Slow: all at all.
CASES: dict[str, dict[str, Any]] = {
    "w4a8, with minima": {"scheme": "w4a8", "group_size": 32, "symmetric": False, "method": "rtn"},
    "w8a8": {"scheme": "w8a8"},
    "w4a16": {"scheme": "w4a16", "group_size": 32, "method": "rtn"},
    "stored-a8": {"scheme": "stored-a8"},
}
MORE: dict[str, dict[str, Any]] = {
    "w4a8": {"scheme": "w4a8", "method": "rtn"},
    "w8a8, groups": {"scheme": "w8a8", "group_size": 32, "symmetric": False},
    "w8a16": {"scheme": "w8a16"},
    "stored-a16": {"scheme": "stored-a16"},
}


@pytest.fixture
def save_model(tmp_path: Path, save_tiny_llama: Callable[..., Path]) -> Callable[..., Path]:
    """save_model(quantisation, levels, **config): a tiny Llama as safetensors, or as a GGUF of
    several types where codes are to be kept, and a recipe of it."""

    def save(quantisation: Any, levels: Iterable[str] = LEVELS, **config: Any) -> Path:
        recipe = save_tiny_llama(tmp_path / "source", **(WIDE | config))
        content = yaml.safe_load(recipe.read_text())
        content |= {"quantisation": quantisation, "target": {"isa": list(levels)}}
        if str(quantisation).find("stored") >= 0:
            write_gguf(recipe.parent)
            content["model"]["source"] = "path:model.gguf"
        recipe.write_text(yaml.safe_dump(content))
        return recipe

    return save


def write_gguf(folder: Path) -> None:
    """folder/model as folder/model.gguf, as llama.cpp's converter writes and quantises it."""
    config = json.loads((folder / "model" / "config.json").read_text())
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "</s>", "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token == "</s>" else 1 for token in tokens])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(tokens.index("</s>"))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in load_file(folder / "model" / "model.safetensors").items():
        stored = names.get_name(name, (".weight",))
        assert stored is not None
        if "attn_q." in stored or "attn_k." in stored:
            halves = tensor.reshape(-1, 2, config["head_dim"] // 2, tensor.shape[1])
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        kind = GGUF_TYPES.get(stored.split(".")[-2])
        data = tensor if kind is None else gguf.quants.quantize(np.ascontiguousarray(tensor), kind)
        writer.add_tensor(stored, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def packed(bits: int, group: int, records: int, *shapes: tuple[int, int]) -> int:
    """Bytes of matrices in tiles of 16 rows, each padded to 64 bytes; records: scales, minima."""
    sizes = (
        -(-n // 16) * 16 * (k // (group or k)) * ((group or k) * bits // 8 + 2 * records)
        for n, k in shapes
    )
    return sum(-(-size // 64) * 64 for size in sizes)


# Q, K and V, and gate and up are merged; the embedding is the head.
MERGED = ((128, 64), (64, 64), (256, 64), (64, 128), (258, 64))
WEIGHT_BYTES = {
    "w4a8, with minima": {"int4": packed(4, 32, 2, *MERGED)},
    "w8a8": {"int8": packed(8, 0, 1, *MERGED)},
    "w4a16": {"int4": packed(4, 32, 1, *MERGED)},
    "stored-a8": {  # Q and K; V, gate and up, which are one; o and the embedding
        "int4": packed(4, 32, 1, (96, 64)) + packed(4, 32, 2, (32, 64), (256, 64)),
        "int8": packed(8, 32, 1, (64, 64), (258, 64)),
    },
}


def reference_logits(recipe_path: Path, tokens: list[int]) -> NDArray[np.float32]:
    """The torch reference's logits of every token of a sequence, as one prefill."""
    recipe = load_recipe(recipe_path)
    source = recipe.model.source.removeprefix("path:")
    checkpoint = open_checkpoint(recipe_path.parent / source)
    family = family_of(checkpoint.config)
    config = family.translate(checkpoint.config)
    weights, step = ModelWeights(checkpoint, family, config), trace(config, "fp32")
    plan = plan_quantisation(recipe.resolve(config.max_position).quantisation, step, weights)
    run_passes(step, plan=plan)
    count = len(tokens)
    rows = np.arange(count, dtype=np.int32)
    batch = StepBatch(
        token_ids=np.array(tokens, np.int32),
        positions=rows,
        query_start=np.array([0, count], np.int32),
        kv_lengths=np.array([count], np.int32),
        block_tables=np.arange(1, 2 + count // 4, dtype=np.int32)[None],
        logit_rows=rows,
    )
    shape = (2 + count // 4, config.num_kv_heads, 4, config.head_dim)
    dtypes = ["fp32"] * config.num_kv_heads
    pools = [LayerPools.filled(shape, dtypes, dtypes) for _ in config.windows]
    (logits,) = run_steps(step, planned_reader(weights, plan), [batch], pools)
    return logits


def check(recipe: Path, quantisation: dict[str, Any], engine: Path) -> dict[str, Any]:
    """Verification at each level it was compiled for, and greedy tokens; returns the report."""
    report = json.loads((engine / "report.json").read_text())
    has_int8_activations = quantisation["scheme"].endswith("a8")
    bound = TIES if has_int8_activations else ROUNDING
    for level, worst in report["verified"].items():
        assert worst is not None, level
        assert worst <= bound, level
    with LLM(engine, num_threads=2) as llm:
        prompt = list(range(5, 18))
        given = SamplingParams(max_tokens=40, ignore_eos=True)
        generated = list(llm.generate(prompt, given).token_ids)
    assert len(generated) == 40
    logits = reference_logits(recipe, [*prompt, *generated])[len(prompt) - 1 : -1]
    top_two = np.sort(logits, axis=1)[:, -2:]
    is_clear = top_two[:, 1] - top_two[:, 0] > 2 * bound * np.abs(logits).max(axis=1)
    assert is_clear.sum() >= 20
    assert (logits.argmax(axis=1) == generated)[is_clear].all()
    return report


@pytest.mark.parametrize("case", CASES)
def test_a_quantised_engine_computes_what_its_reference_does(
    save_model: Callable[..., Path],
    run_llmbuild: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
    case: str,
) -> None:
    level = LEVELS[list(CASES).index(case) % len(LEVELS)]
    recipe, engine = save_model(CASES[case], [level]), tmp_path / "engine"
    compile(recipe, engine)
    report = check(recipe, CASES[case], engine)
    by_dtype = report["weights_by_dtype"]
    assert {dtype: size for dtype, size in by_dtype.items() if "int" in dtype} == WEIGHT_BYTES[case]
    kept_in_fp32 = 64 * 128 * 4 if "stored" in case else 0  # down_proj
    assert by_dtype["fp32"] == kept_in_fp32 + 3 * 64 * 4 + 64  # norms, rotary frequencies
    inspected = json.loads(run_llmbuild("inspect", engine, "--json").stdout)
    assert (
        sum(by_dtype.values())
        < inspected["derived"]["weights_bytes"]
        < sum(by_dtype.values()) + 4096
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES | MORE)
def test_every_scheme_is_verified_at_every_level_of_this_processor(
    save_model: Callable[..., Path], tmp_path: Path, case: str
) -> None:
    quantisation = (CASES | MORE)[case]
    recipe, engine = save_model(quantisation, num_hidden_layers=2), tmp_path / "engine"
    compile(recipe, engine)
    assert list(check(recipe, quantisation, engine)["verified"]) == LEVELS


@pytest.mark.parametrize(
    ("quantisation", "config", "words"),
    [
        (
            {"scheme": "w4a8", "group_size": 96},
            {},
            ["layers.0.mlp.down_proj.weight", "32, 64, 128"],
        ),
        (
            "w8a8",
            {"intermediate_size": 80},
            ["layers.0.mlp.down_proj.weight: int8", "rows of 80 columns, which 32 doesn't divide"],
        ),
    ],
    ids=["group size", "width"],
)
def test_a_grid_that_does_not_fit_is_refused_and_publishes_nothing(
    save_model: Callable[..., Path],
    tmp_path: Path,
    quantisation: Any,
    config: dict[str, Any],
    words: list[str],
) -> None:
    with pytest.raises(RecipeError) as refused:
        compile(save_model(quantisation, **config), tmp_path / "engines" / "out")
    for word in words:
        assert word in str(refused.value)
    assert not list((tmp_path / "engines").iterdir())


def test_stored_codes_of_safetensors_are_refused_and_publish_nothing(
    save_model: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=r"stores no linear.s weights on a grid"):
        compile(save_model("none"), tmp_path / "engines" / "out", ["quantisation.scheme=stored-a8"])
    assert not list((tmp_path / "engines").iterdir())


def test_a_weight_that_is_no_number_is_refused_by_name(
    save_model: Callable[..., Path], tmp_path: Path
) -> None:
    recipe = save_model(CASES["w4a8, with minima"], LEVELS[:1])  # compiled above, so cached
    path = recipe.parent / "model" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.up_proj.weight"][3, 6] = np.nan
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj\.weight holds .* NaN"):
        compile(recipe, tmp_path / "engines" / "out")
    assert not list((tmp_path / "engines").iterdir())
