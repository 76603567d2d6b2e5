"""Some rows of a stored tensor are those of the whole; formats by rows read no other bytes."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from hf_encoders import (
    awq,
    gptq,
    int_quantized,
    of_module,
    pack_quantized,
    random_linear,
    save_checkpoint,
)
from safetensors.numpy import save_file

from llmbuild.builder.checkpoint import files, gguf, open_checkpoint, safetensors

ROWS, COLUMNS = 17, 96
RANGES = [(0, 17), (0, 1), (16, 17), (3, 11), (1, 16), (5, 5), (17, 17)]
SHAPES = {"matrix": (ROWS, COLUMNS), "vector": (ROWS,), "stack": (ROWS, 3, 32)}
BLOCK_TYPES = [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0]
SUPER_BLOCK_TYPES = [Type.Q4_K, Type.Q5_K, Type.Q6_K]
GROUPED = {"bits": 4, "group_size": 32}


@pytest.fixture
def read_bytes(monkeypatch):
    """The sizes of the reads that checkpoints make, in bytes."""
    sizes = []

    def read(path, offset, num_bytes):
        sizes.append(num_bytes)
        return files.read_bytes(path, offset, num_bytes)

    for module in (safetensors, gguf):
        monkeypatch.setattr(module, "read_bytes", read)
    return sizes


def assert_rows_equal(part, whole, rows):
    assert part.grid == whole.grid
    for ours, all_rows in zip(part.arrays, whole.arrays, strict=True):
        np.testing.assert_array_equal(ours, all_rows[slice(*rows)])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("rows", RANGES)
def test_rows_of_safetensors_are_read_alone(tmp_path, read_bytes, dtype, rows):
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.standard_normal(shape).astype(dtype)
        for name, shape in ({"before": (3,)} | SHAPES | {"then": (5, 2)}).items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_checkpoint(tmp_path)
    for name in SHAPES:
        expected = tensors[name][slice(*rows)]
        read_bytes.clear()
        values = checkpoint.read_rows(name, *rows)
        assert (values.dtype, values.shape) == (expected.dtype, expected.shape)
        assert values.tobytes() == expected.tobytes()
        assert sum(read_bytes) == expected.nbytes
        assert checkpoint.tensors[name].by_rows


@pytest.mark.parametrize("rows", RANGES)
@pytest.mark.parametrize(
    ("kind", "columns"),
    [(kind, 96) for kind in BLOCK_TYPES] + [(kind, 512) for kind in SUPER_BLOCK_TYPES],
    ids=lambda value: getattr(value, "name", value),
)
def test_rows_of_gguf_blocks_are_read_alone(
    write_gguf, llama_metadata, quantised, read_bytes, kind, columns, rows
):
    packed = quantised(kind, ROWS, columns)
    tensors = {"token_embd.weight": np.zeros((10, 32), np.float32), "m": (kind, packed)}
    checkpoint = open_checkpoint(write_gguf(llama_metadata, tensors))
    whole = checkpoint.read("m")
    read_bytes.clear()
    np.testing.assert_array_equal(checkpoint.read_rows("m", *rows), whole[slice(*rows)])
    assert sum(read_bytes) == packed[slice(*rows)].nbytes
    if checkpoint.tensors["m"].grid is not None:
        matrix = checkpoint.read_codes("m")
        read_bytes.clear()
        assert_rows_equal(checkpoint.read_codes("m", rows), matrix, rows)
        assert sum(read_bytes) == packed[slice(*rows)].nbytes


@pytest.mark.parametrize("rows", RANGES)
def test_rows_of_unquantised_gguf_tensors_and_of_stacks_are_those_of_the_whole(
    write_gguf, llama_metadata, quantised, rows
):
    stored = {
        name: np.random.default_rng(1).standard_normal(shape).astype(np.float32)
        for name, shape in SHAPES.items()
    }
    blocks = quantised(Type.Q8_0, ROWS * 3, 32).reshape(ROWS, 3, -1)
    tensors = {"token_embd.weight": np.zeros((10, 32), np.float32), "experts": (Type.Q8_0, blocks)}
    checkpoint = open_checkpoint(write_gguf(llama_metadata, tensors | stored))
    for name, values in stored.items():
        np.testing.assert_array_equal(checkpoint.read_rows(name, *rows), values[slice(*rows)])
    expected = checkpoint.read("experts")[slice(*rows)]
    assert expected.shape[1:] == (3, 32)
    np.testing.assert_array_equal(checkpoint.read_rows("experts", *rows), expected)


def compressed(form: str, bits: int) -> dict:
    weights = {"num_bits": bits, "type": "int", "symmetric": False, "strategy": "channel"}
    weights |= {"strategy": "group", "group_size": 32} if bits == 4 else {}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"g": {"targets": ["Linear"], "weights": weights}},
    }


LINEARS = {
    "gptq": (gptq, random_linear(24, COLUMNS, **GROUPED, lowest_zero=1), None),
    "awq": (awq, random_linear(24, COLUMNS, **GROUPED), None),
    "pack-quantized": (pack_quantized, random_linear(17, COLUMNS, **GROUPED), 4),
    "int-quantized": (
        lambda linear: int_quantized(linear, symmetric=False),
        random_linear(17, COLUMNS, bits=8),
        8,
    ),
}


@pytest.mark.parametrize("rows", RANGES)
@pytest.mark.parametrize("form", LINEARS)
def test_rows_of_linears_that_are_not_stored_by_rows_are_those_of_the_whole(tmp_path, form, rows):
    encode, linear, bits = LINEARS[form]
    section = {"quant_method": form, **GROUPED} if bits is None else compressed(form, bits)
    tensors = of_module("a", encode(linear)) | {"norm": np.arange(17, dtype=np.float32)}
    checkpoint = open_checkpoint(save_checkpoint(tmp_path, tensors, section))
    expected = linear.values()[slice(*rows)]
    np.testing.assert_array_equal(checkpoint.read_rows("a.weight", *rows), expected)
    matrix = checkpoint.read_codes("a.weight")
    np.testing.assert_array_equal(matrix.codes, linear.codes)
    assert_rows_equal(checkpoint.read_codes("a.weight", rows), matrix, rows)
    assert not checkpoint.tensors["a.weight"].by_rows
    norm = checkpoint.read_rows("norm", *rows)
    np.testing.assert_array_equal(norm, np.arange(17.0)[slice(*rows)])


def test_a_dtype_that_is_not_supported_is_refused_by_rows_too(tmp_path: Path):
    save_file({"a": np.zeros((3, 2), np.int64)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(safetensors.CheckpointError, match="'a' is stored as I64; weights can be"):
        open_checkpoint(tmp_path).read_rows("a", 0, 1)
