"""GPTQ checkpoints, encoded by loops, against what their codes stand for."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hf_encoders import gptq, of_module, packed, random_linear, save_checkpoint

from llmbuild.builder.checkpoint import TensorInfo, open_checkpoint
from llmbuild.builder.checkpoint.base import StoresCodes
from llmbuild.errors import CheckpointError
from llmbuild.quant.grid import WeightGrid

CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
CONFIG |= {"damp_percent": 0.1, "true_sequential": True, "model_name_or_path": None}
# (rows, columns, bits, group_size)
SHAPES = [(8, 32, 4, 32), (24, 96, 4, 32), (40, 192, 4, 64), (8, 96, 4, -1), (4, 160, 8, 32)]


def opened(directory, linear, config, version=1):
    tensors = of_module("a.q_proj", gptq(linear, version)) | {"norm": np.ones(3, np.float32)}
    return open_checkpoint(save_checkpoint(directory, tensors, CONFIG | config, hidden_size=8))


def refused(directory, *words):
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(directory)
    for word in (str(directory), *words):
        assert word in str(caught.value)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("rows", "columns", "bits", "group_size"), SHAPES)
def test_codes_and_values_are_those_encoded(
    tmp_path, rows, columns, bits, group_size, symmetric, version
):
    kind = {"bits": bits, "group_size": group_size, "symmetric": symmetric}
    linear = random_linear(rows, columns, **kind, lowest_zero=version == 1)
    form = {} if version == 1 else {"checkpoint_format": "gptq_v2"}
    config = {"bits": bits, "group_size": group_size, "sym": symmetric} | form
    checkpoint = opened(tmp_path, linear, config, version)
    assert checkpoint.config == {"hidden_size": 8}
    assert checkpoint.notes == ()
    assert isinstance(checkpoint, StoresCodes)
    width = 0 if group_size in (-1, columns) else group_size
    grid = WeightGrid(bits, width, symmetric, zero_points=not symmetric)
    assert checkpoint.tensors == {
        "a.q_proj.weight": TensorInfo((rows, columns), f"int{bits}", grid, by_rows=False),
        "norm": TensorInfo((3,), "F32"),
    }
    values = checkpoint.read("a.q_proj.weight")
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, linear.values())
    matrix = checkpoint.read_codes("a.q_proj.weight")
    assert matrix.grid == grid
    np.testing.assert_array_equal(matrix.codes, linear.codes)
    np.testing.assert_array_equal(matrix.scales, linear.scales)
    assert (matrix.zeros is None) == symmetric
    np.testing.assert_array_equal(matrix.dequantised(), linear.values())
    np.testing.assert_array_equal(checkpoint.read("norm"), np.ones(3))


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_of_0_come_back_from_words_that_one_was_taken_off(tmp_path, bits):
    """GPTQModel takes one off each zero point by one subtraction from the word, which borrows."""
    linear = random_linear(16, 64, bits=bits, group_size=32)
    linear.zeros[::3] = 0
    parts = gptq(linear, version=2)
    ones = np.uint32(sum(1 << at for at in range(0, 32, bits)))
    parts["qzeros"] = (packed(linear.zeros.T, bits).view(np.uint32) - ones).view(np.int32)
    save_checkpoint(tmp_path, of_module("a", parts), CONFIG | {"bits": bits})
    checkpoint = open_checkpoint(tmp_path)
    np.testing.assert_array_equal(checkpoint.read_codes("a.weight").zeros, linear.zeros)
    np.testing.assert_array_equal(checkpoint.read("a.weight"), linear.values())


def test_columns_in_activation_order_are_read_as_values(tmp_path):
    linear = random_linear(8, 96, group_size=32, lowest_zero=1)
    linear = replace(linear, group=np.random.default_rng(1).permutation(linear.group))
    checkpoint = opened(tmp_path, linear, {"desc_act": True})
    assert checkpoint.tensors["a.q_proj.weight"].grid is None
    np.testing.assert_array_equal(checkpoint.read("a.q_proj.weight"), linear.values())
    (note,) = checkpoint.notes
    assert "1 of 1" in note
    assert "activation order" in note
    assert "1 q_proj" in note


def test_a_last_group_may_be_narrower_and_is_read_as_values(tmp_path):
    linear = random_linear(8, 96, group_size=64, lowest_zero=1)
    checkpoint = opened(tmp_path, linear, {"group_size": 64})
    assert checkpoint.tensors["a.q_proj.weight"].grid is None
    np.testing.assert_array_equal(checkpoint.read("a.q_proj.weight"), linear.values())
    assert "groups of 64 columns in rows of 96" in checkpoint.notes[0]


def test_groups_wider_than_the_row_are_the_row(tmp_path):
    linear = random_linear(8, 64, symmetric=True)
    checkpoint = opened(tmp_path, linear, {"group_size": 128, "sym": True})
    assert checkpoint.tensors["a.q_proj.weight"].grid == WeightGrid(4, 0, True)
    np.testing.assert_array_equal(checkpoint.read("a.q_proj.weight"), linear.values())


def test_columns_without_an_index_are_in_order(tmp_path):
    linear = random_linear(8, 64, group_size=32, lowest_zero=1)
    parts = gptq(linear)
    del parts["g_idx"]
    save_checkpoint(tmp_path, of_module("a", parts), CONFIG)
    np.testing.assert_array_equal(open_checkpoint(tmp_path).read("a.weight"), linear.values())


@pytest.mark.parametrize(
    ("dtype", "size", "has_grid"),
    [
        (ml_dtypes.bfloat16, 0.05, True),
        (ml_dtypes.bfloat16, 1e-8, False),
        (ml_dtypes.bfloat16, 1e6, False),
        (np.float32, 0.05, False),
    ],
)
def test_scales_that_float16_does_not_hold_are_kept_as_values(tmp_path, dtype, size, has_grid):
    linear = random_linear(8, 64, group_size=32, lowest_zero=1, dtype=dtype, size=size)
    checkpoint = opened(tmp_path, linear, {})
    assert (checkpoint.tensors["a.q_proj.weight"].grid is not None) == has_grid
    np.testing.assert_array_equal(checkpoint.read("a.q_proj.weight"), linear.values())
    if has_grid:
        np.testing.assert_array_equal(
            checkpoint.read_codes("a.q_proj.weight").dequantised(), linear.values()
        )
    else:
        assert "float16" in checkpoint.notes[0]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"bits": 3}, ["quantization_config.bits is 3", "4, 8"]),
        ({"bits": True}, ["bits is True"]),
        ({"bits": None}, ["lacks bits"]),
        ({"group_size": 0}, ["group_size is 0", "-1"]),
        ({"group_size": "32"}, ["group_size is '32'"]),
        ({"sym": "yes"}, ["sym is 'yes'", "True, False"]),
        ({"checkpoint_format": "marlin"}, ["'marlin'", "'gptq', 'gptq_v2'"]),
        ({"format": "gptq_v2", "checkpoint_format": "gptq"}, ["format is 'gptq_v2'", "'gptq' can"]),
        ({"dynamic": ["a"]}, ["dynamic is ['a']"]),
        ({"is_marlin_format": True}, ["is_marlin_format is True"]),
        ({"pack_dtype": "int8"}, ["pack_dtype is 'int8'"]),
        ({"dynamic": {"+:.*down": {"bits": 8}}}, ["dynamic", "'bits': 8"]),
        ({"rotation": "hadamard"}, ["rotation ('hadamard')", "isn't known"]),
        ({"group_size": 64}, ["a.q_proj.scales is of shape (2, 8)", "(1, 8)"]),
        ({"bits": 8}, ["a.q_proj.scales is of shape (2, 8)", "(1, 8)"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_config_that_cannot_be_read_is_refused(tmp_path, config, words):
    linear = random_linear(8, 64, group_size=32, lowest_zero=1)
    tensors = of_module("a.q_proj", gptq(linear))
    refused(save_checkpoint(tmp_path, tensors, CONFIG | config), *words)


def without(part):
    return lambda tensors: tensors.pop(f"a.{part}")


def with_part(part, values):
    return lambda tensors: tensors.update({f"a.{part}": values})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("scales"), ["a.scales is missing"]),
        (without("qzeros"), ["a.qzeros is missing"]),
        (with_part("qweight", np.zeros((8, 8), np.int64)), ["a.qweight is I64", "I32"]),
        (with_part("qweight", np.zeros(8, np.int32)), ["a.qweight", "2 dimensions"]),
        (with_part("qweight", np.zeros((0, 8), np.int32)), ["a.qweight", "empty"]),
        (with_part("qweight", np.zeros((8, 7), np.int32)), ["7 outputs", "multiple of 8"]),
        (with_part("qzeros", np.zeros((2, 2), np.int32)), ["a.qzeros", "(2, 2)", "(2, 1)"]),
        (with_part("scales", np.zeros((2, 8), np.int32)), ["a.scales is I32", "F16"]),
        (with_part("g_idx", np.zeros(32, np.int32)), ["a.g_idx", "(64,)"]),
        (with_part("g_idx", np.full(64, 2, np.int32)), ["a.g_idx", "from 2 to 2", "there are 2"]),
        (with_part("g_idx", np.full(64, -1, np.int32)), ["a.g_idx", "from -1"]),
        (with_part("weight", np.zeros((8, 64), np.float32)), ["twice", "a.weight"]),
    ],
)
def test_parts_that_do_not_fit_are_refused(tmp_path, change, words):
    tensors = of_module("a", gptq(random_linear(8, 64, group_size=32, lowest_zero=1)))
    change(tensors)
    words = ["stored both quantised and not" if word == "twice" else word for word in words]
    refused(save_checkpoint(tmp_path, tensors, CONFIG), *words)


def test_zero_points_that_contradict_symmetry_are_refused_when_read(tmp_path):
    linear = random_linear(8, 64, group_size=32, symmetric=True)
    linear.zeros[3, 1] = 5
    checkpoint = opened(tmp_path, linear, {"sym": True})
    for read in (checkpoint.read, checkpoint.read_codes):
        with pytest.raises(CheckpointError, match=r"a\.q_proj has a zero point of 5.*must be 8"):
            read("a.q_proj.weight")
