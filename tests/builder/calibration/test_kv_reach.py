"""Static scales of the KV cache hold where calibration never looked."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from llmbuild.builder.calibration import calibrate
from llmbuild.builder.calibration.kv import measure_reaches
from llmbuild.builder.checkpoint import open_checkpoint
from llmbuild.builder.compile import compile
from llmbuild.builder.graph.trace import trace
from llmbuild.builder.models.families import family_of
from llmbuild.builder.models.weights import ModelWeights
from llmbuild.errors import BuildError
from llmbuild.quant.kv import channel_scales
from llmbuild.runtime.batch import StepBatch
from llmbuild.runtime.engine import open_engine
from llmbuild.runtime.executors.cpu import CpuExecutor
from llmbuild.runtime.isa import supported_levels
from llmbuild.runtime.manifest import KVLayer, KVLayout

LENGTH = 16  # of calibration
FARTHER = 4  # times as many positions
HEAD_DIM, KV_HEADS = 16, 2
WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": HEAD_DIM}
WIDE |= {"num_hidden_layers": 2, "vocab_size": 258, "num_key_value_heads": KV_HEADS}
OUTLIER = 3  # a channel of each head's keys, forty times as strong as the others


@pytest.fixture
def recipe(
    tmp_path: Path, save_tiny_llama: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Of a random model with an outlier channel in K."""
    monkeypatch.setattr(calibrate, "cache_root", lambda: tmp_path / "cache")
    path = save_tiny_llama(tmp_path / "source", **WIDE)
    model = path.parent / "model" / "model.safetensors"
    tensors = load_file(model)
    for name, tensor in tensors.items():
        if name.endswith("k_proj.weight"):
            tensor[OUTLIER::HEAD_DIM] *= 40
    save_file(tensors, model)
    content = yaml.safe_load(path.read_text())
    content |= {"target": {"isa": supported_levels()[0]}, "limits": {"max_sequence_length": 64}}
    content["calibration"] = {"sequences": 8, "length": LENGTH, "seed": 1}
    path.write_text(yaml.safe_dump(content))
    return path


def logits(engine_dir: Path, tokens: np.ndarray) -> np.ndarray:
    """Of every token of a sequence, in one prefill."""
    engine = open_engine(engine_dir)
    size, count = engine.manifest.kv.block_size, len(tokens)
    rows = np.arange(count, dtype=np.int32)
    blocks = -(-count // size)
    batch = StepBatch(
        token_ids=tokens,
        positions=rows,
        query_start=np.array([0, count], np.int32),
        kv_lengths=np.array([count], np.int32),
        block_tables=np.arange(1, blocks + 1, dtype=np.int32)[None],
        logit_rows=rows,
    )
    executor = CpuExecutor(engine, blocks + 1, 1)
    try:
        return executor.step(batch).astype(np.float64)
    finally:
        executor.close()


@pytest.mark.slow
def test_static_int8_keys_stay_near_four_times_beyond_the_calibration(
    recipe: Path, tmp_path: Path
) -> None:
    exact = compile(recipe, tmp_path / "exact")
    static = compile(recipe, tmp_path / "static", ["kv_cache.dtype=int8-static"])
    tokens = np.random.default_rng(5).integers(0, 256, LENGTH * FARTHER).astype(np.int32)
    want, got = logits(exact, tokens), logits(static, tokens)
    errors = np.abs(got - want).max(1) / np.abs(want).max(1)
    within, beyond = np.median(errors[:LENGTH]), np.median(errors[LENGTH:])
    assert within < 0.1
    assert beyond < 2 * within


def test_no_position_takes_a_key_beyond_its_reach(recipe: Path) -> None:
    checkpoint = open_checkpoint(recipe.parent / "model")
    family = family_of(checkpoint.config)
    config = family.translate(checkpoint.config)
    weights, step = ModelWeights(checkpoint, family, config), trace(config, "fp32")
    # One token, again and again: its keys are those of position 0, turned.
    tokens = np.full((1, 1), 7, np.int32)
    reach = measure_reaches(step, config, weights.read, tokens)["layers.0.k"]
    embedding = weights.read("embed.weight")[7].astype(np.float64)
    norm = weights.read("layers.0.attn_norm.weight").astype(np.float64)
    normed = embedding / np.sqrt(np.square(embedding).mean() + config.norm.eps) * norm
    key = (weights.read("layers.0.attention.k_proj.weight") @ normed).reshape(KV_HEADS, HEAD_DIM)
    low, high = key[:, : HEAD_DIM // 2], key[:, HEAD_DIM // 2 :]
    frequencies = config.ropes[0].theta ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    largest = np.zeros_like(key)
    for position in range(5000):
        cos, sin = np.cos(position * frequencies), np.sin(position * frequencies)
        turned = np.concatenate((low * cos - high * sin, high * cos + low * sin), axis=1)
        largest = np.maximum(largest, np.abs(turned))
    assert (largest <= reach * (1 + 1e-5)).all()
    fast = frequencies > 0.01  # pairs that have come all the way round
    both = np.concatenate((fast, fast))
    np.testing.assert_allclose(largest[:, both], reach[:, both], rtol=0.05)


def test_scales_that_are_zero_are_refused_by_name() -> None:
    layer = KVLayer.of_heads([("int8-static", "bf16"), ("bf16", "int8-static")])
    kv = KVLayout(block_size=4, num_kv_heads=2, head_dim=4, layers=[layer])
    reach = np.ones((2, 4), np.float32)
    found = channel_scales(kv, {"layers.0.k": reach * 127, "layers.0.v": reach * 254})
    np.testing.assert_array_equal(found["layers.0.k_scale"], np.ones(8))
    np.testing.assert_array_equal(found["layers.0.v_scale"], [1, 1, 1, 1, 2, 2, 2, 2])
    dead = reach.copy()
    dead[1, 2] = 0
    with pytest.raises(BuildError, match=r"layers\.0\.v\.1 \(int8-static\): 1 of 4 channels"):
        channel_scales(kv, {"layers.0.k": dead, "layers.0.v": dead})


def test_equalised_keys_reach_equally_far() -> None:
    layer = KVLayer.of_heads([("int4", "int4")])
    kv = KVLayout(block_size=4, num_kv_heads=1, head_dim=4, layers=[layer])
    reach = np.array([[1, 40, 2, 5]], np.float32)
    found = channel_scales(kv, {"layers.0.k": reach, "layers.0.v": reach})
    assert found.keys() == {"layers.0.k_scale"}
    np.testing.assert_allclose(reach[0] / found["layers.0.k_scale"], reach.mean(), rtol=1e-6)
