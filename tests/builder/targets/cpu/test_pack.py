"""The weights file against a layout written out by loops, and as others read it."""

import json
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from numpy.typing import NDArray

from llmbuild.builder.targets.cpu import pack as pack_module
from llmbuild.builder.targets.cpu.pack import pack, packed_bytes, weight_offsets, write_weights
from llmbuild.builder.targets.cpu.plan import Buffer, Layout, PackedWeight, Rows, StepPlan
from llmbuild.quant.grid import QuantisedMatrix, WeightGrid
from llmbuild.quant.rtn import round_to_nearest
from llmbuild.runtime.manifest import KVLayout

DTYPES = {"fp32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16)}
TILES, ROWS, CODES = Layout.TILES_OF_16, Layout.ROWS, Layout.CODES


NO_KV = KVLayout(block_size=4, num_kv_heads=1, head_dim=2, layers=[])


def plan_of(*weights: PackedWeight, shared: Sequence[str] = ()) -> StepPlan:
    logits = Buffer("logits", Rows.LOGIT_ROWS, 1)
    return StepPlan((), weights, logits, NO_KV, hidden_size=1, shared=frozenset(shared))


def values_of(weight: PackedWeight) -> Any:
    values = np.random.default_rng(len(weight.name)).standard_normal(weight.shape)
    if weight.grid is not None:
        return round_to_nearest(values, weight.grid)
    return values.astype(DTYPES[weight.dtype])


def whole(weight: PackedWeight) -> list[Any]:
    """The values in one block."""
    return [values_of(weight)]


def packed(
    weight: PackedWeight, values: NDArray[np.generic] | QuantisedMatrix
) -> NDArray[np.generic]:
    raw = b"".join(part.tobytes() for part in pack(weight, [values]))
    return np.frombuffer(raw, DTYPES.get(weight.dtype, np.uint8))


def tiled_by_loops(values: NDArray[np.generic]) -> list[float]:
    """Tiles of 16 rows, in each tile columns one after the other, in each column 16 rows."""
    rows, columns = values.shape
    return [
        float(values[tile + lane, column]) if tile + lane < rows else 0.0
        for tile in range(0, rows, 16)
        for column in range(columns)
        for lane in range(16)
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 7])
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 4097])
def test_tiles_are_those_of_a_loop_and_padding_is_zero(rows: int, columns: int, dtype: str) -> None:
    weight = PackedWeight("w", (rows, columns), dtype, TILES)
    values = values_of(weight)
    got, expected = packed(weight, values), tiled_by_loops(values)
    assert got.nbytes == packed_bytes(weight)
    assert got.nbytes % 64 == 0
    assert got[: len(expected)].astype(np.float32).tolist() == expected
    assert not got[len(expected) :].astype(np.float32).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 16, 7), (5, 17, 3), (2, 33, 1), (4, 1, 7)])
def test_stack_is_its_matrices_tiles_one_after_the_other(
    shape: tuple[int, int, int], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each expert's rows are padded by themselves, so that all begin at a tile."""
    monkeypatch.setattr(pack_module, "PART_BYTES", 1)
    weight = PackedWeight("w", shape, dtype, TILES)
    values = values_of(weight)
    expected = [number for matrix in values for number in tiled_by_loops(matrix)]
    got = packed(weight, values)
    assert got.nbytes == packed_bytes(weight)
    assert got.nbytes % 64 == 0
    assert got[: len(expected)].astype(np.float32).tolist() == expected
    assert not got[len(expected) :].astype(np.float32).any()


def test_parts_join_where_they_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = PackedWeight("w", (100, 7), "fp32", TILES)
    values = values_of(weight)
    for part_bytes in (1, 16 * 7 * 4, 3 * 16 * 7 * 4, 1 << 20):
        monkeypatch.setattr(pack_module, "PART_BYTES", part_bytes)
        assert packed(weight, values)[: 112 * 7].tolist() == tiled_by_loops(values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (15,), (16,), (33,), (5, 3)])
def test_rows_are_as_they_were_then_zeros(shape: tuple[int, ...], dtype: str) -> None:
    weight = PackedWeight("w", shape, dtype, ROWS)
    values = values_of(weight)
    got = packed(weight, values)
    assert got.nbytes == packed_bytes(weight)
    assert got.nbytes % 64 == 0
    assert got[: values.size].tolist() == values.flatten().tolist()
    assert not got[values.size :].astype(np.float32).any()


@pytest.fixture
def weights_file(tmp_path: Path) -> tuple[Path, StepPlan]:
    plan = plan_of(
        PackedWeight("embed.weight", (5, 3), "bf16", ROWS),
        PackedWeight("a.weight+b.weight", (17, 7), "fp32", TILES),
        PackedWeight("norm", (3,), "fp32", ROWS),
        PackedWeight("codes", (17, 96), "int4", CODES, WeightGrid(4, 32, False)),
        PackedWeight("more codes", (1, 32), "int8", CODES, WeightGrid(8, 0, True)),
        PackedWeight("head", (33, 3), "bf16", TILES),
    )
    written: list[int] = []
    total = write_weights(plan.weights, whole, tmp_path / "w.safetensors", written.append)
    assert total == sum(written) == sum(map(packed_bytes, plan.weights))
    return tmp_path / "w.safetensors", plan


def test_the_safetensors_library_opens_the_file(weights_file: tuple[Path, StepPlan]) -> None:
    path, plan = weights_file
    tensors = safetensors.numpy.load_file(path)
    assert sorted(tensors) == sorted(weight.name for weight in plan.weights)
    for weight in plan.weights:
        expected = packed(weight, values_of(weight))
        assert tensors[weight.name].dtype == expected.dtype
        np.testing.assert_array_equal(tensors[weight.name], expected)


def test_every_tensor_starts_aligned_where_the_code_looks_for_it(
    weights_file: tuple[Path, StepPlan],
) -> None:
    path, plan = weights_file
    raw = path.read_bytes()
    data = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:data])
    offsets = weight_offsets(plan)
    assert list(offsets) == [weight.name for weight in plan.weights]
    end = 0
    for weight in plan.weights:
        begin = offsets[weight.name]
        assert begin == end  # no hole, no overlap
        assert (data + begin) % 64 == 0
        end = begin + packed_bytes(weight)
        assert header[weight.name]["data_offsets"] == [begin, end]
        assert raw[data + begin : data + end] == packed(weight, values_of(weight)).tobytes()
    assert len(raw) == data + end


def test_shared_weights_are_counted_by_themselves() -> None:
    a, b, c, d = (PackedWeight(name, (n, 16), "fp32", ROWS) for n, name in enumerate("abcd", 1))
    assert weight_offsets(plan_of(a, b, c, d, shared="bd")) == {"a": 0, "c": 64, "b": 0, "d": 128}
    assert weight_offsets(plan_of(a, b, shared="ab")) == {"a": 0, "b": 64}


@pytest.mark.parametrize(
    "shape", [(2048, 16384), (16384, 2048), (65536, 512), (16, 2048, 1024), (64, 1024, 512)]
)
@pytest.mark.parametrize("layout", [TILES, ROWS])
def test_packing_a_big_tensor_makes_no_second_whole_one(
    tmp_path: Path, shape: tuple[int, ...], layout: Layout
) -> None:
    weight = PackedWeight("w", shape, "bf16", layout)
    values = np.zeros(shape, DTYPES["bf16"])  # 64 MiB
    tracemalloc.start()
    try:
        write_weights([weight], lambda _: [values], tmp_path / "w", lambda _: None)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 0.25 * values.nbytes  # a few parts of 4 MiB
