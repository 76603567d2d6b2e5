"""Codes of a GGUF file, kept as they are stored, against the gguf package's values of them."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from llmbuild.builder.checkpoint import gguf as gguf_module
from llmbuild.builder.checkpoint import open_checkpoint
from llmbuild.builder.checkpoint.base import StoresCodes
from llmbuild.quant.grid import WeightGrid

GRIDS = {
    Type.Q4_0: WeightGrid(4, 32, True),
    Type.Q4_1: WeightGrid(4, 32, False),
    Type.Q8_0: WeightGrid(8, 32, True),
}
NAME = "blk.0.ffn_up.weight"


def with_embedding(**tensors):
    return {"token_embd.weight": np.zeros((10, 32), np.float32)} | tensors


@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (7, 96), (33, 256), (3, 2048)])
@pytest.mark.parametrize("kind", GRIDS, ids=lambda kind: kind.name)
def test_codes_stand_for_the_values_of_the_gguf_package(
    kind, rows, columns, write_gguf, llama_metadata, quantised, monkeypatch
):
    """Bit for bit, of any codes and scales of either sign, in reads of a row or of all at once."""
    packed = quantised(kind, rows, columns)
    checkpoint = open_checkpoint(
        write_gguf(llama_metadata, with_embedding(**{NAME: (kind, packed)}))
    )
    assert checkpoint.tensors[NAME].grid == GRIDS[kind]
    expected = gguf.quants.dequantize(packed, kind)
    for elements in (32, 2 * columns, 1 << 18):
        monkeypatch.setattr(gguf_module, "_ELEMENTS_PER_READ", elements)
        matrix = checkpoint.read_codes(NAME)
        assert matrix.grid == GRIDS[kind]
        values = matrix.dequantised()
        assert (values.dtype, values.shape) == (np.float32, (rows, columns))
        np.testing.assert_array_equal(values, expected)
        np.testing.assert_array_equal(values, checkpoint.read(NAME))


@pytest.mark.parametrize("kind", GRIDS, ids=lambda kind: kind.name)
def test_codes_of_a_tensor_that_llama_cpp_quantised(kind, write_gguf, llama_metadata):
    """Of real weights the codes cover the grid, and the values are near those before."""
    data = np.random.default_rng(4).standard_normal((5, 160)).astype(np.float32)
    packed = gguf.quants.quantize(data, kind)
    path = write_gguf(llama_metadata, with_embedding(**{NAME: (kind, packed)}))
    matrix = open_checkpoint(path).read_codes(NAME)
    np.testing.assert_array_equal(matrix.dequantised(), gguf.quants.dequantize(packed, kind))
    scales = np.repeat(np.abs(matrix.scales.astype(np.float32)), 32, axis=1)
    assert (np.abs(matrix.dequantised() - data) <= 1.1 * scales).all()
    assert matrix.codes.max() == 2 ** GRIDS[kind].bits - 1 or kind is Type.Q8_0
    assert matrix.codes.min() <= 1


def test_only_matrices_and_stacks_of_the_three_types_have_a_grid(
    write_gguf, llama_metadata, quantised
):
    kinds = (Type.Q4_0, Type.Q5_0, Type.Q5_1, Type.Q4_K, Type.Q6_K)
    tensors = {f"blk.0.{kind.name}": (kind, quantised(kind, 3, 256)) for kind in kinds}
    tensors["blk.0.F16"] = np.zeros((3, 32), np.float16)
    tensors["blk.0.vector"] = (Type.Q8_0, quantised(Type.Q8_0, 1, 32)[0])
    experts = quantised(Type.Q8_0, 6, 64).reshape(2, 3, -1)
    tensors["blk.0.experts"] = (Type.Q8_0, experts)
    checkpoint = open_checkpoint(write_gguf(llama_metadata, with_embedding(**tensors)))
    assert isinstance(checkpoint, StoresCodes)
    assert checkpoint.tensors["blk.0.experts"].shape == (2, 3, 64)
    assert checkpoint.tensors["blk.0.vector"].shape == (32,)
    with_grid = {name for name, info in checkpoint.tensors.items() if info.grid is not None}
    assert with_grid == {"blk.0.Q4_0", "blk.0.experts"}
