"""AWQ checkpoints in AutoAWQ's layout gemm, encoded by loops, against what the codes stand for."""

import numpy as np
import pytest
from hf_encoders import awq, of_module, random_linear, save_checkpoint

from llmbuild.builder.checkpoint import TensorInfo, open_checkpoint
from llmbuild.errors import CheckpointError
from llmbuild.quant.grid import WeightGrid

CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
CONFIG |= {"version": "gemm", "modules_to_not_convert": None}


def test_one_word_holds_its_codes_in_the_order_that_the_kernels_of_awq_want(tmp_path):
    """Written out: the lowest four bits are output 0, the next output 2, and so on."""
    word = sum(code << (4 * place) for place, code in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
    parts = {
        "qweight": np.full((32, 1), word, np.uint32).view(np.int32),
        "qzeros": np.zeros((1, 1), np.int32),
        "scales": np.ones((1, 8), np.float16),
    }
    values = open_checkpoint(save_checkpoint(tmp_path, of_module("a", parts), CONFIG)).read(
        "a.weight"
    )
    np.testing.assert_array_equal(values, np.repeat(np.arange(8)[:, None], 32, axis=1))


@pytest.mark.parametrize(
    ("rows", "columns", "group_size"), [(8, 32, 32), (24, 96, 32), (40, 256, 128), (8, 96, -1)]
)
def test_codes_and_values_are_those_encoded(tmp_path, rows, columns, group_size):
    linear = random_linear(rows, columns, group_size=group_size)
    tensors = of_module("a.q_proj", awq(linear)) | {"norm": np.ones(3, np.float32)}
    config = CONFIG | {"group_size": group_size}
    checkpoint = open_checkpoint(save_checkpoint(tmp_path, tensors, config, hidden_size=8))
    assert (checkpoint.config, checkpoint.notes) == ({"hidden_size": 8}, ())
    width = 0 if group_size in (-1, columns) else group_size
    grid = WeightGrid(4, width, False, zero_points=True)
    assert checkpoint.tensors == {
        "a.q_proj.weight": TensorInfo((rows, columns), "int4", grid, by_rows=False),
        "norm": TensorInfo((3,), "F32"),
    }
    np.testing.assert_array_equal(checkpoint.read("a.q_proj.weight"), linear.values())
    matrix = checkpoint.read_codes("a.q_proj.weight")
    assert matrix.grid == grid
    np.testing.assert_array_equal(matrix.codes, linear.codes)
    np.testing.assert_array_equal(matrix.scales, linear.scales)
    np.testing.assert_array_equal(matrix.zeros, linear.zeros)
    np.testing.assert_array_equal(matrix.dequantised(), linear.values())


def test_the_names_of_early_configs_are_understood(tmp_path):
    linear = random_linear(8, 64, group_size=32)
    config = {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "GEMM"}
    save_checkpoint(tmp_path, of_module("a", awq(linear)), config)
    np.testing.assert_array_equal(open_checkpoint(tmp_path).read("a.weight"), linear.values())


def test_groups_of_16_are_read_as_values(tmp_path):
    linear = random_linear(8, 64, group_size=16)
    save_checkpoint(tmp_path, of_module("a", awq(linear)), CONFIG | {"group_size": 16})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.tensors["a.weight"].grid is None
    np.testing.assert_array_equal(checkpoint.read("a.weight"), linear.values())
    assert "groups of 16 columns in rows of 64" in checkpoint.notes[0]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"version": "gemv"}, ["version is 'gemv'", "'gemm'"]),
        ({"version": "marlin"}, ["version is 'marlin'"]),
        ({"bits": 8}, ["bits is 8", "4 can be read"]),
        ({"zero_point": False}, ["zero_point is False"]),
        ({"backend": "llm-awq"}, ["backend is 'llm-awq'", "'autoawq'"]),
        ({"group_size": 48}, ["64 columns", "groups of 48"]),
        ({"group_size": 64}, ["a.scales is of shape (2, 8)", "(1, 8)"]),
        ({"group_size": None}, ["lacks q_group_size"]),
        ({"something": 1}, ["something (1)"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_config_that_cannot_be_read_is_refused(tmp_path, config, words):
    tensors = of_module("a", awq(random_linear(8, 64, group_size=32)))
    save_checkpoint(tmp_path, tensors, CONFIG | config)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    for word in (str(tmp_path), *words):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("part", "values", "words"),
    [
        ("qzeros", None, "a.qzeros is missing"),
        ("scales", None, "a.scales is missing"),
        ("qweight", np.zeros((64, 1), np.float32), "a.qweight is F32"),
        ("qzeros", np.zeros((1, 1), np.int32), "a.qzeros is of shape (1, 1)"),
        ("scales", np.zeros((2, 7), np.float16), "a.scales is of shape (2, 7)"),
    ],
)
def test_parts_that_do_not_fit_are_refused(tmp_path, part, values, words):
    tensors = of_module("a", awq(random_linear(8, 64, group_size=32)) | {part: values})
    tensors = {name: value for name, value in tensors.items() if value is not None}
    save_checkpoint(tmp_path, tensors, CONFIG)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert words in str(caught.value)
