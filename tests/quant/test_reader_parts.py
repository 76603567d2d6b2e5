"""Parts of planned tensors: cuts of the whole as it is quantised, read a few MB at a time."""

import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from llmbuild.builder.calibration.store import TensorStore
from llmbuild.builder.checkpoint import open_checkpoint
from llmbuild.quant import reader as reader_module
from llmbuild.quant.grid import QuantisedMatrix, WeightGrid
from llmbuild.quant.plan import QuantPlan
from llmbuild.quant.reader import PartReader, PlannedReader, Ranges, Tensor, open_rows
from llmbuild.quant.rtn import round_to_nearest

ROWS, COLUMNS, EXPERTS = 37, 192, 5
STORED = WeightGrid(4, 32, True)
GRIDS = {
    "groups": WeightGrid(4, 32, False),
    "wide groups": WeightGrid(8, 64, True),
    "rows": WeightGrid(8, 0, True),
    "rows with minima": WeightGrid(4, 0, False),
}


class Model:
    """Tensors of which "codes" are stored on STORED, and those of `whole` only come whole."""

    def __init__(self, whole: frozenset[str] = frozenset()) -> None:
        rng = np.random.default_rng(0)
        self.tensors: dict[str, NDArray[np.generic]] = {
            "plain": rng.standard_normal((ROWS, COLUMNS)).astype(ml_dtypes.bfloat16),
            "vector": rng.standard_normal(ROWS, np.float32),
            "gate_up": rng.standard_normal((EXPERTS, 22, 7), np.float32),
            "down": rng.standard_normal((EXPERTS, 7, 11), np.float32),
        }
        self.codes = round_to_nearest(rng.standard_normal((ROWS, COLUMNS), np.float32), STORED)
        self.tensors["codes"] = self.codes.dequantised()
        self.whole = whole | {"vector"}
        self.reads: list[tuple[str, int]] = []  # and how many rows

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def has_rows(self, name: str) -> bool:
        return name not in self.whole

    def read(self, name: str) -> NDArray[np.generic]:
        self.reads.append((name, len(self.tensors[name])))
        return self.tensors[name]

    def read_rows(self, name: str, begin: int, end: int) -> NDArray[np.generic]:
        assert name not in self.whole
        self.reads.append((name, end - begin))
        return self.tensors[name][begin:end]

    def stored_grid(self, name: str) -> WeightGrid | None:
        return STORED if name == "codes" else None

    def read_codes(self, name: str, rows: tuple[int, int] | None = None) -> QuantisedMatrix:
        assert name == "codes"
        begin, end = rows or (0, ROWS)
        self.reads.append((name, end - begin))
        return self.codes.take_rows(slice(begin, end))


def taken(array: NDArray[np.generic], parts: list[Ranges]) -> NDArray[np.generic]:
    """The ranges of each axis, picked one by one."""
    for axis, ranges in enumerate(parts):
        numbers = [number for begin, end in ranges for number in range(begin, end)]
        array = np.take(array, numbers, axis)
    return array


def check_part(part: Tensor, whole: Tensor, parts: list[Ranges]) -> None:
    if not isinstance(whole, QuantisedMatrix):
        assert isinstance(part, np.ndarray)
        expected = taken(whole, parts)
        assert (part.dtype, part.shape) == (expected.dtype, expected.shape)
        assert part.flags.c_contiguous
        np.testing.assert_array_equal(part, expected)
        return
    assert isinstance(part, QuantisedMatrix)
    assert part.grid == whole.grid
    np.testing.assert_array_equal(part.codes, taken(whole.codes, parts))
    rows, columns = parts
    size = whole.grid.group_size
    groups: Ranges = tuple((b // size, e // size) for b, e in columns) if size else ((0, 1),)
    for ours, theirs in zip(part.arrays[1:], whole.arrays[1:], strict=True):
        np.testing.assert_array_equal(ours, taken(theirs, [rows, groups]))


CUTS: list[list[Ranges]] = [
    [((0, ROWS),), ((0, COLUMNS),)],
    [((3, 4),), ((0, COLUMNS),)],
    [((36, 37),), ((64, 192),)],
    [((5, 31),), ((64, 128),)],
    [((30, 37), (0, 11)), ((0, COLUMNS),)],
    [((2, 3), (9, 30)), ((128, 192), (0, 64))],
]


@pytest.mark.parametrize(
    "whole", [frozenset(), frozenset({"plain", "codes"})], ids=["rows", "whole"]
)
@pytest.mark.parametrize("block_items", [1, 5 * COLUMNS, 1 << 20])
@pytest.mark.parametrize("parts", CUTS, ids=str)
@pytest.mark.parametrize("grid", [None, *GRIDS.values()], ids=["as stored", *GRIDS])
def test_a_part_is_cut_out_of_the_whole_as_it_is_quantised(
    monkeypatch: pytest.MonkeyPatch,
    grid: WeightGrid | None,
    parts: list[Ranges],
    block_items: int,
    whole: frozenset[str],
) -> None:
    monkeypatch.setattr(reader_module, "_BLOCK_ITEMS", block_items)
    plans = {"codes": STORED} if grid is None else {"plain": grid, "codes": grid}
    read = PlannedReader(Model(whole), QuantPlan(plans))
    for name in ("plain", "codes"):
        assert read.has_rows(name) == (not whole)
        check_part(read.read_part(name, parts), read(name), parts)


def test_columns_within_a_row_of_one_group_keep_the_rows_scale() -> None:
    read = PlannedReader(Model(), QuantPlan({"plain": GRIDS["rows with minima"]}))
    parts: list[Ranges] = [((0, ROWS),), ((7, 12), (100, 101))]
    check_part(read.read_part("plain", parts), read("plain"), parts)


def test_a_cut_within_a_group_is_a_fault() -> None:
    read = PlannedReader(Model(), QuantPlan({"plain": GRIDS["wide groups"]}))
    with pytest.raises(AssertionError):
        read.read_part("plain", [((0, 1),), ((0, 32),)])


@pytest.mark.parametrize("whole", [frozenset(), frozenset({"gate_up", "down"})])
def test_vectors_and_stacks_are_cut_along_any_axis(whole: frozenset[str]) -> None:
    """An MLP's columns 3 to 7 of each expert: rows of gate, then of up, and columns of down."""
    model = Model(whole)
    read = PlannedReader(model, QuantPlan())
    cuts: dict[str, list[Ranges]] = {
        "vector": [((5, 11), (30, 37))],
        "gate_up": [((0, EXPERTS),), ((3, 8), (14, 19)), ((0, 7),)],
        "down": [((0, EXPERTS),), ((0, 7),), ((3, 8),)],
    }
    for name, parts in cuts.items():
        check_part(read.read_part(name, parts), model.tensors[name], parts)


@pytest.mark.parametrize("block_items", [1, 3 * 22 * 96, 1 << 20])
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_quantised_stacks_are_cut_along_any_axis(
    monkeypatch: pytest.MonkeyPatch, grid: WeightGrid, block_items: int
) -> None:
    monkeypatch.setattr(reader_module, "_BLOCK_ITEMS", block_items)
    model = Model()
    model.tensors["stack"] = np.random.default_rng(1).standard_normal(
        (EXPERTS, 22, 192), np.float32
    )
    read = PlannedReader(model, QuantPlan({"stack": grid}))
    whole = read("stack")
    assert isinstance(whole, QuantisedMatrix)
    for expert, values in enumerate(model.tensors["stack"]):
        alone = round_to_nearest(values, grid)
        for ours, theirs in zip(whole.take_rows(expert).arrays, alone.arrays, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    for experts in (((0, EXPERTS),), ((4, 5), (1, 3))):
        parts: list[Ranges] = [experts, ((3, 8), (14, 19)), ((64, 192),)]
        part = read.read_part("stack", parts)
        assert isinstance(part, QuantisedMatrix)
        np.testing.assert_array_equal(part.dequantised(), taken(whole.dequantised(), parts))


def test_rows_are_read_a_block_at_a_time_and_others_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reader_module, "_BLOCK_ITEMS", 5 * COLUMNS)
    model = Model(frozenset({"codes"}))
    read = PlannedReader(model, QuantPlan({"plain": GRIDS["rows"], "codes": STORED}))
    read.read_part("plain", [((3, 15), (30, 31)), ((0, 64),)])
    assert model.reads == [("plain", 5), ("plain", 5), ("plain", 2), ("plain", 1)]
    model.reads.clear()
    read.read_part("codes", [((3, 15), (30, 31)), ((0, 64),)])
    assert model.reads == [("codes", ROWS)]  # once, as each part would cost the whole


def test_calibrated_tensors_are_cut_too(tmp_path: Path) -> None:
    model = Model()
    store = TensorStore(tmp_path, {"plain": GRIDS["groups"]})
    store.put("plain", round_to_nearest(2 * model.codes.dequantised(), GRIDS["groups"]))
    store.put("vector", np.arange(ROWS, dtype=np.float32))
    read = PlannedReader(model, QuantPlan({"plain": GRIDS["groups"]}), store)
    for parts in CUTS:
        check_part(read.read_part("plain", parts), read("plain"), parts)
    part = read.read_part("vector", [((7, 9),)])
    assert isinstance(part, np.ndarray)
    assert part.tolist() == [7, 8]
    assert model.reads == []
    assert read.has_rows("vector")
    assert not PlannedReader(model, QuantPlan()).has_rows("vector")


def test_rows_can_be_had_of_any_reader() -> None:
    model, plan = Model(), QuantPlan({"plain": GRIDS["groups"]})
    read = PlannedReader(model, plan)
    assert isinstance(read, PartReader)
    for each in (read, lambda name: read(name)):
        for name in ("plain", "vector", "gate_up"):
            whole = read(name)
            shape, rows = open_rows(name, each)
            assert shape == whole.shape
            others = [((0, size),) for size in shape[1:]]
            for begin, end in [(0, shape[0]), (1, 4)]:
                check_part(rows(begin, end), whole, [((begin, end),), *others])


LARGE = 4096, 4096
QUARTERS: dict[str, list[Ranges]] = {
    "rows": [((1024, 2048),), ((0, 4096),)],
    "columns": [((0, 4096),), ((1024, 2048),)],
    "both": [((0, 1024), (3072, 4096)), ((2048, 4096),)],
}


class Stored:
    """One tensor of 64 MB in a safetensors file."""

    def __init__(self, folder: Path) -> None:
        save_file({"a": np.ones(LARGE, np.float32)}, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")
        self._checkpoint = open_checkpoint(folder)
        self.read, self.read_rows = self._checkpoint.read, self._checkpoint.read_rows

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.tensors[name].shape

    def has_rows(self, name: str) -> bool:
        return self._checkpoint.tensors[name].by_rows

    def stored_grid(self, name: str) -> WeightGrid | None:
        return None

    def read_codes(self, name: str, rows: tuple[int, int] | None = None) -> QuantisedMatrix:
        raise AssertionError(name)


@pytest.mark.parametrize("cut", QUARTERS)
@pytest.mark.parametrize("grid", [None, *GRIDS.values()], ids=["plain", *GRIDS])
def test_reading_a_quarter_holds_little_beside_it(
    tmp_path_factory: pytest.TempPathFactory, cut: str, grid: WeightGrid | None
) -> None:
    tensors = Stored(tmp_path_factory.mktemp("stored"))
    read = PlannedReader(tensors, QuantPlan({} if grid is None else {"a": grid}))
    tracemalloc.start()
    try:
        part = read.read_part("a", QUARTERS[cut])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    arrays = part.arrays if isinstance(part, QuantisedMatrix) else [part]
    share_bytes = sum(array.nbytes for array in arrays)
    assert share_bytes >= (16 << 20 if grid is None else 4 << 20)
    assert share_bytes < peak < share_bytes + (16 << 20)
