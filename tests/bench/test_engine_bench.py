"""The engine benchmark on a tiny engine: what it counts, and that its numbers are sound."""

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from bench import engine, machine, report, serving
from bench.engine import EngineReport
from bench.roofline import Work
from bench.step_work import StepWork
from llmbuild.errors import UserError
from llmbuild.runtime.batch import StepBatch
from llmbuild.runtime.manifest import QuantisedTensor, read_manifest


@pytest.fixture(scope="module")
def result(tiny_engine: Path, short_samples: None) -> EngineReport:
    return engine.measure(tiny_engine, threads=2)


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_steps_cover_decode_and_prefill_within_the_limits(result: EngineReport) -> None:
    assert [step.name for step in result.steps] == [
        "decode batch 1 at 64",
        "decode batch 8 at 64",
        "prefill 24",
    ]


def test_numbers_are_finite_and_positive(result: EngineReport) -> None:
    roofs = machine.best_roofs(result.before, result.after)
    numbers = [n for s in result.steps for n in (s.tokens_per_s, roofs.fraction(s.work, s.seconds))]
    for run in result.servings:
        numbers += [run.output_tokens_per_s, run.ttft_p50_ms, run.ttft_p99_ms, run.tpot_p50_ms]
        numbers += [run.tpot_p99_ms, run.python_share, run.bound_s(roofs)]
        assert run.python_share < 1
    assert all(math.isfinite(n) and n > 0 for n in numbers)
    assert len(engine.step_table(result.steps, roofs).splitlines()) == 2 + len(result.steps)
    assert len(engine.serving_table(result.servings, roofs).splitlines()) == 2 + 5


def test_equal_requests_take_one_step_a_token(result: EngineReport) -> None:
    (alone,) = (run for run in result.servings if run.load.name == "1 equal")
    ((prompt, output),) = alone.load.requests
    assert (prompt, output) == (16, 32)
    assert len(alone.steps) == output


def test_command_prints_the_tables_and_writes_json(
    result: EngineReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "measure", lambda root, threads: result)
    written = tmp_path / "engine.json"
    arguments = ["somewhere", "--json", str(written)]
    done = CliRunner().invoke(engine.main, arguments, catch_exceptions=False)
    roofs = machine.best_roofs(result.before, result.after)
    assert engine.step_table(result.steps, roofs) in done.output
    assert engine.serving_table(result.servings, roofs) in done.output
    assert msgspec.json.decode(written.read_bytes(), type=EngineReport) == result


def test_step_work_is_that_of_the_real_sequences(tiny_engine: Path) -> None:
    """Two sequences of 5 and 9 tokens and a padding one, each with one new token; fp32."""
    batch = StepBatch(
        token_ids=int32(1, 2, 0),
        positions=int32(4, 8, 0),
        query_start=int32(0, 1, 2, 3),
        kv_lengths=int32(5, 9, 1),
        block_tables=int32(1, 2, 0, 3, 4, 5, 0, 0, 0).reshape(3, 3),
        logit_rows=int32(0, 1, 2),
    )
    layer = 48 * (6 + 2 + 2) * 14 + 6 * 14 * 48 + 3 * 48 * 80
    weights_bytes = (tiny_engine / "rank0" / "weights.safetensors").stat().st_size
    head = 257 * 48
    kv_bytes = (5 + 9) * 2 * 2 * 2 * 14 * 4  # tokens, layers, K and V, heads, head_dim, fp32
    expected = Work(
        cold_bytes=weights_bytes + kv_bytes,  # tied: the embedding is read as lm_head
        operations=2 * (2 * 2 * layer + 2 * head) + 2 * (5 + 9) * 6 * 14 * 4,
    )
    assert StepWork(read_manifest(tiny_engine))(batch) == expected


def test_linears_of_int8_activations_multiply_bytes(tiny_engine: Path) -> None:
    """Two tokens and one logit row; hidden 48, MLP 80, 6 heads of 14, 257 tokens."""
    batch = StepBatch(
        token_ids=int32(1, 2),
        positions=int32(0, 1),
        query_start=int32(0, 2),
        kv_lengths=int32(2),
        block_tables=int32(1).reshape(1, 1),
        logit_rows=int32(1),
    )
    rounded = QuantisedTensor(8, 0, True, False, activation_group=48, static_activations=False)
    exact = msgspec.structs.replace(rounded, activation_group=0)
    manifest = read_manifest(tiny_engine)
    quantised = {
        "embed.weight": rounded,
        "layers.0.mlp.up_proj.weight": rounded,
        "layers.0.mlp.down_proj.weight": exact,
        "layers.1.attention.q_proj.weight": rounded,
    }
    plain = StepWork(manifest)(batch)
    work = StepWork(msgspec.structs.replace(manifest, quantised=quantised))(batch)
    assert work.int8_operations == 2 * (2 * (48 * 80 + 48 * 6 * 14) + 257 * 48)
    assert work.all_operations == plain.all_operations


def test_mixture_of_experts_is_refused(tiny_engine: Path) -> None:
    manifest = read_manifest(tiny_engine)
    mixture = msgspec.structs.replace(manifest, model=manifest.model | {"moe": {"top_k": 2}})
    with pytest.raises(UserError, match="mixture of experts"):
        StepWork(mixture)


def test_python_share_is_the_time_between_steps() -> None:
    # From 2 to 12: steps of 3 and 4, so 3 of 10 lie outside.
    assert serving.python_share([(0.0, 2.0), (3.0, 6.0), (8.0, 12.0)]) == pytest.approx(0.3)


def test_table_aligns_numbers_right_and_words_left() -> None:
    drawn = report.table(("name", "us"), [["a", "1.5"], ["long name", "120"]])
    assert drawn.splitlines() == [
        "name        us",
        "---------  ---",
        "a          1.5",
        "long name  120",
    ]


def test_output_in_a_missing_folder_is_refused_before_measuring(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="doesn't exist"):
        report.check_output(tmp_path / "missing" / "out.json")


def test_later_step_of_a_decode_has_longer_sequences() -> None:
    batch = StepBatch(
        token_ids=int32(1, 2),
        positions=int32(4, 8),
        query_start=int32(0, 1, 2),
        kv_lengths=int32(5, 9),
        block_tables=int32(1, 2, 0, 3, 4, 5).reshape(2, 3),
        logit_rows=int32(0, 1),
    )
    later = serving.later(batch, 3)
    assert later.positions.tolist() == [7, 11]
    assert later.kv_lengths.tolist() == [8, 12]
    assert later.block_tables.tolist() == batch.block_tables.tolist()
    assert serving.later(batch, 0).data == batch.data
