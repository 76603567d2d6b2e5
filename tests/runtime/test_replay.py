"""Verification steps in a file, the measure of a difference, and `llmbuild verify`."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from llmbuild.runtime.batch import ARRAYS, StepBatch
from llmbuild.runtime.engine import sha256
from llmbuild.runtime.manifest import MANIFEST_NAME, File, encode, read_manifest, seal
from llmbuild.runtime.replay import (
    STEPS_FILE,
    VerificationSteps,
    load_steps,
    relative_difference,
    save_steps,
)


def batch(tokens: int, sequences: int, seed: int) -> StepBatch:
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "token_ids": (tokens,),
        "positions": (tokens,),
        "query_start": (sequences + 1,),
        "kv_lengths": (sequences,),
        "block_tables": (sequences, 3),
        "logit_rows": (sequences,),
    }
    return StepBatch(**{n: rng.integers(0, 99, s).astype(np.int32) for n, s in shapes.items()})


@pytest.mark.parametrize("count", [1, 11])  # past ten, names sort otherwise than numbers
def test_steps_are_the_same_after_saving_and_loading(tmp_path: Path, count: int) -> None:
    rng = np.random.default_rng(0)
    steps = VerificationSteps(
        batches=[batch(index + 2, index + 1, index) for index in range(count)],
        logits=[rng.standard_normal((index + 1, 4)).astype(np.float32) for index in range(count)],
        columns=np.array([0, 3, 7, 30]),
        num_blocks=17,
        tolerance=3e-4,
    )
    save_steps(steps, tmp_path / STEPS_FILE)
    loaded = load_steps(tmp_path / STEPS_FILE)
    assert (loaded.num_blocks, loaded.tolerance) == (17, 3e-4)
    np.testing.assert_array_equal(loaded.columns, steps.columns)
    assert len(loaded.batches) == len(loaded.logits) == count
    for got, want in zip(loaded.batches, steps.batches, strict=True):
        for name in ARRAYS:
            one, other = getattr(got, name), getattr(want, name)
            assert one.dtype == np.int32
            np.testing.assert_array_equal(one, other)
    for one, other in zip(loaded.logits, steps.logits, strict=True):
        assert one.dtype == np.float32
        np.testing.assert_array_equal(one, other)


def array(*rows: list[float]) -> np.ndarray:
    return np.array(rows, np.float32)


def test_difference_is_of_a_rows_largest_value_and_the_worst_row_counts() -> None:
    want = array([4.0, -8.0], [0.5, 0.25])
    assert relative_difference(want, want) == 0.0
    assert relative_difference(want + array([0.0, 2.0], [0.0, 0.0]), want) == 0.25
    assert relative_difference(want + array([1.0, 0.0], [0.0, -0.25]), want) == 0.5


def test_difference_from_a_row_of_zeros_is_zero_for_zeros_and_huge_for_others() -> None:
    zeros = array([0.0, 0.0])
    assert relative_difference(zeros, zeros) == 0.0
    assert relative_difference(array([0.0, 1e-30]), zeros) > 1.0


def test_no_rows_differ_by_nothing() -> None:
    assert relative_difference(np.zeros((0, 3), np.float32), np.zeros((0, 3), np.float32)) == 0.0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", ["got", "want", "both"])
def test_difference_is_infinite_where_either_side_is_not_finite(value: float, side: str) -> None:
    """So that max() over steps keeps it: max(0.0, nan) is 0.0."""
    sound, broken = array([1.0, 2.0], [3.0, 4.0]), array([1.0, 2.0], [3.0, value])
    got = sound if side == "want" else broken
    want = sound if side == "got" else broken
    assert max(0.0, relative_difference(got, want)) == np.inf


@pytest.fixture
def engine(hf_model: Callable[..., Any], compile_engine: Callable[..., Path]) -> Path:
    return compile_engine(
        hf_model(
            "llama",
            vocab_size=31,
            hidden_size=24,
            intermediate_size=17,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
        )
    )


def replace_steps(engine: Path, steps: VerificationSteps) -> None:
    """Other steps in the engine, in a manifest that vouches for them."""
    path = engine / STEPS_FILE
    save_steps(steps, path)
    manifest = read_manifest(engine)
    file = File(sha256=sha256(path), size_bytes=path.stat().st_size)
    files = manifest.files | {STEPS_FILE: file}
    sealed = seal(msgspec.structs.replace(manifest, files=files))
    (engine / MANIFEST_NAME).write_bytes(encode(sealed))


def test_verify_passes_a_sound_engine_and_refuses_one_of_other_logits(
    engine: Path, run_llmbuild: Callable[..., Any]
) -> None:
    sound = run_llmbuild("verify", engine)
    assert sound.returncode == 0, sound.stderr
    steps = load_steps(engine / STEPS_FILE)
    assert sound.stdout.count("logits differ by") == len(steps.batches)
    assert "verified: at most" in sound.stdout

    logits = [rows.copy() for rows in steps.logits]
    rows = logits[-1]
    rows[0, 0] += 0.5 * np.abs(rows[0]).max()
    replace_steps(engine, replace(steps, logits=logits))
    altered = run_llmbuild("verify", engine)
    assert altered.returncode == 2, altered.stderr
    expected = relative_difference(steps.logits[-1], rows)
    assert f"they differ by {expected:.1e}, and 1.0e-04 is allowed" in altered.stderr
    assert "verified" not in altered.stdout


def test_verify_refuses_an_engine_whose_reference_is_not_a_number(
    engine: Path, run_llmbuild: Callable[..., Any]
) -> None:
    steps = load_steps(engine / STEPS_FILE)
    logits = [*steps.logits[:-1], np.full_like(steps.logits[-1], np.nan)]
    replace_steps(engine, replace(steps, logits=logits))
    refused = run_llmbuild("verify", engine)
    assert refused.returncode == 2, refused.stderr
    assert "they differ by inf" in refused.stderr
