import numpy as np
import pytest
from kernel_harness import EACH_LEVEL, KernelCompiler, Library, Step, bits, make_step
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

HALVES = [1, 3, 10, 32, 64]
HALVES_BY_LENGTH = [3, 32]

SOURCE = '#include "rope_table/cpu.h"\n' + "".join(
    f"""
extern "C" void rope_table_{half}(int threads, const int32_t* positions, const float* inv_freq,
                                  float scale, float* table, int rows) {{
  with_team(threads, [&](const Worker& worker) {{
    rope_table<{half}>(worker, positions, inv_freq, scale, table, rows);
  }});
}}
"""
    for half in HALVES
)
SOURCE += "".join(
    f"""
extern "C" void switched_{half}(int threads, const Step* step, const float* inv_freq,
                                int switch_length, float scale, float* table) {{
  with_team(threads, [&](const Worker& worker) {{
    switched_rope_table<{half}>(worker, *step, inv_freq, switch_length, scale, table);
  }});
}}
extern "C" void dynamic_{half}(int threads, const Step* step, float theta, float factor,
                               int original_length, float scale, float* table) {{
  with_team(threads, [&](const Worker& worker) {{
    dynamic_rope_table<{half}>(worker, *step, theta, factor, original_length, scale, table);
  }});
}}
"""
    for half in HALVES_BY_LENGTH
)


@pytest.fixture(params=EACH_LEVEL)
def library(request: pytest.FixtureRequest, compiler: KernelCompiler) -> Library:
    return compiler.library(SOURCE, request.param)


@pytest.mark.parametrize("scale", [1.0, 1.25])
@pytest.mark.parametrize("half", HALVES)
def test_table_holds_cosines_and_sines_of_the_fp32_angle(
    library: Library, half: int, scale: float
) -> None:
    positions = np.array([0, 1, 5, 8191, 131071, 16777215, 2], np.int32)
    inv_freq = (1 / 10000 ** (np.arange(half) / half)).astype(np.float32)
    angle = (positions.astype(np.float32)[:, None] * inv_freq).astype(np.float64)
    expected = np.concatenate([np.cos(angle), np.sin(angle)], axis=1) * scale
    for rows in (0, 1, 7):
        table = np.empty((rows, 2 * half), np.float32)
        library.call(f"rope_table_{half}", 2, positions[:rows].copy(), inv_freq, scale, table, rows)
        assert (np.abs(table - expected[:rows]) <= 2.0**-23 * scale).all()


def test_table_does_not_depend_on_the_team(library: Library) -> None:
    positions = np.arange(1000, 1013, dtype=np.int32)
    inv_freq = (1 / 500000 ** (np.arange(32) / 32)).astype(np.float32)
    tables = [np.empty((13, 64), np.float32) for _ in range(3)]
    for threads, table in enumerate(tables, 1):
        library.call("rope_table_32", threads, positions, inv_freq, 1.0, table, 13)
        np.testing.assert_array_equal(bits(table), bits(tables[0]))


# Lengths below, at and above 64, in an order that goes back and forth.
SEQUENCES = [(0, 5), (70, 3), (63, 1), (64, 1), (200, 2), (60, 9), (2, 1)]


def sequence_of_token(step: Step) -> np.ndarray:
    return np.repeat(np.arange(len(step.kv_lengths)), np.diff(step.query_start))


def angles_of(step: Step, inv_freq: np.ndarray) -> np.ndarray:
    """The cosines and sines of fp32 angles, in float64; inv_freq: [tokens, HALF] fp32."""
    angle = (step.positions.astype(np.float32)[:, None] * inv_freq).astype(np.float64)
    return np.concatenate([np.cos(angle), np.sin(angle)], axis=1)


@pytest.mark.parametrize("half", HALVES_BY_LENGTH)
def test_switched_table_takes_the_long_row_above_the_switch_length(
    library: Library, half: int
) -> None:
    step, _ = make_step(SEQUENCES, 16, np.random.default_rng(0))
    rows = (1 / 10000 ** (np.arange(half) / half) / [[1], [7]]).astype(np.float32)
    is_long = step.kv_lengths[sequence_of_token(step)] > 64
    assert set(is_long) == {False, True}
    expected = angles_of(step, rows[is_long.astype(int)]) * 1.25
    for threads in (1, 2, 3):
        table = np.empty((len(step.positions), 2 * half), np.float32)
        library.call(f"switched_{half}", threads, step, rows, 64, 1.25, table)
        assert (np.abs(table - expected) <= 2.0**-23 * 1.25).all()


@pytest.mark.parametrize("half", HALVES_BY_LENGTH)
def test_dynamic_table_stretches_the_base_with_the_length_as_transformers(
    library: Library, half: int
) -> None:
    step, _ = make_step(SEQUENCES, 16, np.random.default_rng(0))
    theta, factor, original = 10000.0, 2.5, 64
    rope = {"rope_type": "dynamic", "rope_theta": theta, "factor": factor}
    config = LlamaConfig(
        hidden_size=2 * half,
        num_attention_heads=1,
        max_position_embeddings=original,
        rope_parameters=rope,
    )
    compute = ROPE_INIT_FUNCTIONS["dynamic"]
    frequencies = [compute(config, None, seq_len=int(length))[0] for length in step.kv_lengths]
    inv_freq = np.stack([f.numpy() for f in frequencies])[sequence_of_token(step)]
    # transformers computes the frequencies in fp32, some 16 roundings off at these bases.
    bound = 2.0**-23 + step.positions[:, None] * np.tile(inv_freq, 2) * 16 * 2.0**-24
    for threads in (1, 3):
        table = np.empty((len(step.positions), 2 * half), np.float32)
        library.call(f"dynamic_{half}", threads, step, theta, factor, original, 1.0, table)
        assert (np.abs(table - angles_of(step, inv_freq)) <= bound).all()


@pytest.mark.parametrize("half", HALVES_BY_LENGTH)
def test_a_token_of_a_dynamic_table_has_the_same_bits_in_any_batch_and_team(
    library: Library, half: int
) -> None:
    def table_of(sequences: list[tuple[int, int]], threads: int) -> np.ndarray:
        step, _ = make_step(sequences, 16, np.random.default_rng(0))
        table = np.empty((len(step.positions), 2 * half), np.float32)
        library.call(f"dynamic_{half}", threads, step, 500000.0, 4.0, 64, 1.0, table)
        return bits(table)

    together = table_of(SEQUENCES, 1)
    np.testing.assert_array_equal(table_of(SEQUENCES, 3), together)
    alone = [table_of([sequence], 2) for sequence in SEQUENCES]
    np.testing.assert_array_equal(np.concatenate(alone), together)


def test_tables_by_length_of_an_empty_step_write_nothing(library: Library) -> None:
    step, _ = make_step([], 16, np.random.default_rng(0))
    table = np.ones((1, 6), np.float32)
    library.call("switched_3", 2, step, np.ones((2, 3), np.float32), 64, 1.0, table)
    library.call("dynamic_3", 2, step, 10000.0, 2.0, 64, 1.0, table)
    assert (table == 1).all()
