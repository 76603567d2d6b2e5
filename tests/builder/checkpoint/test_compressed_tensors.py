"""compressed-tensors checkpoints, encoded by loops, against what their codes stand for."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hf_encoders import int_quantized, of_module, pack_quantized, random_linear, save_checkpoint

from llmbuild.builder.checkpoint import TensorInfo, open_checkpoint
from llmbuild.errors import CheckpointError
from llmbuild.quant.grid import WeightGrid

NAME = "layers.0.q_proj"


def config_of(form="pack-quantized", weights=None, group=None, **top):
    """A config of one group, of int4 in groups of 32 unless `weights` says otherwise."""
    args = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    args |= {"dynamic": False, "actorder": None, "observer": "minmax", "observer_kwargs": {}}
    args |= {"block_structure": None}
    entry = {"targets": ["Linear"], "weights": args | (weights or {}), "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": entry | (group or {})},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "version": "0.11.0",
    } | top


def opened(directory, parts, config, module=NAME, **others):
    tensors = of_module(module, parts) | {"lm_head.weight": np.ones((3, 32), np.float32)} | others
    return open_checkpoint(save_checkpoint(directory, tensors, config, hidden_size=8))


def check(checkpoint, linear, grid, name=f"{NAME}.weight"):
    """Values, and codes where the grid isn't None."""
    info = TensorInfo(linear.codes.shape, f"int{linear.bits}", grid, by_rows=False)
    assert checkpoint.tensors[name] == info
    values = checkpoint.read(name)
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, linear.values())
    if grid is not None:
        matrix = checkpoint.read_codes(name)
        assert matrix.grid == grid
        np.testing.assert_array_equal(matrix.codes, linear.codes)
        np.testing.assert_array_equal(
            matrix.scales, np.broadcast_to(linear.scales, matrix.scales.shape)
        )
        np.testing.assert_array_equal(matrix.dequantised(), linear.values())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("rows", "columns", "bits", "group_size"),
    [(1, 32, 4, 32), (7, 96, 4, 32), (13, 256, 4, 128), (9, 96, 4, -1), (3, 64, 8, 32)],
)
def test_packed_codes_and_values_are_those_encoded(
    tmp_path, rows, columns, bits, group_size, symmetric
):
    """Odd numbers of rows leave words of zero points half empty."""
    kind = {"bits": bits, "group_size": group_size, "symmetric": symmetric}
    linear = random_linear(rows, columns, **kind, dtype=ml_dtypes.bfloat16)
    weights = {"num_bits": bits, "symmetric": symmetric, "group_size": group_size}
    weights |= {"strategy": "channel", "group_size": None} if group_size == -1 else {}
    checkpoint = opened(tmp_path, pack_quantized(linear, symmetric), config_of(weights=weights))
    assert (checkpoint.config, checkpoint.notes) == ({"hidden_size": 8}, ())
    assert set(checkpoint.tensors) == {f"{NAME}.weight", "lm_head.weight"}
    assert checkpoint.tensors["lm_head.weight"] == TensorInfo((3, 32), "F32")
    width = 0 if group_size in (-1, columns) else group_size
    check(checkpoint, linear, WeightGrid(bits, width, symmetric, zero_points=not symmetric))
    zeros = checkpoint.read_codes(f"{NAME}.weight").zeros
    assert (zeros is None) == symmetric
    if not symmetric:
        np.testing.assert_array_equal(zeros, linear.zeros)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("rows", "columns", "bits"), [(1, 32, 8), (7, 96, 8), (5, 64, 4)])
def test_plain_int8_codes_and_values_are_those_encoded(tmp_path, rows, columns, bits, symmetric):
    linear = random_linear(rows, columns, bits=bits, symmetric=symmetric)
    weights = {"num_bits": bits, "symmetric": symmetric, "strategy": "channel", "group_size": None}
    config = config_of("int-quantized", weights)
    checkpoint = opened(tmp_path, int_quantized(linear, symmetric), config)
    check(checkpoint, linear, WeightGrid(bits, 0, symmetric, zero_points=not symmetric))


@pytest.mark.parametrize("shape", [(1,), (), (1, 1)])
def test_one_scale_of_a_whole_tensor_is_each_rows(tmp_path, shape):
    linear = random_linear(5, 64, bits=8, symmetric=True)
    linear.scales[:] = linear.scales[0]
    parts = int_quantized(linear) | {"weight_scale": linear.scales[0].reshape(shape)}
    weights = {"num_bits": 8, "strategy": "tensor", "group_size": None}
    check(opened(tmp_path, parts, config_of("int-quantized", weights)), linear, WeightGrid(8, 0, 1))


def test_rows_that_end_within_a_word_are_read_as_values(tmp_path):
    linear = random_linear(5, 45, symmetric=True)
    weights = {"strategy": "channel", "group_size": None}
    checkpoint = opened(tmp_path, pack_quantized(linear, True), config_of(weights=weights))
    check(checkpoint, linear, None)
    assert "rows of 45" in checkpoint.notes[0]


def test_scales_of_float32_are_read_as_values_rounded_once(tmp_path):
    linear = random_linear(5, 64, bits=8, symmetric=True, dtype=np.float32)
    weights = {"num_bits": 8, "strategy": "channel", "group_size": None}
    checkpoint = opened(tmp_path, int_quantized(linear), config_of("int-quantized", weights))
    check(checkpoint, linear, None)
    assert "float16" in checkpoint.notes[0]


def test_columns_in_activation_order_are_read_as_values(tmp_path):
    linear = random_linear(8, 96, group_size=32)
    linear = replace(linear, group=np.random.default_rng(1).permutation(linear.group))
    parts = pack_quantized(linear) | {"weight_g_idx": linear.group.astype(np.int32)}
    weights = {"symmetric": False, "actorder": "group"}
    checkpoint = opened(tmp_path, parts, config_of(weights=weights))
    check(checkpoint, linear, None)
    assert "activation order" in checkpoint.notes[0]


@pytest.mark.parametrize("index", [np.repeat([0, 1, 2], 32), np.full(96, -1)])
def test_an_index_that_is_in_order_or_was_never_set_keeps_the_codes(tmp_path, index):
    linear = random_linear(8, 96, group_size=32, symmetric=True)
    parts = pack_quantized(linear, True) | {"weight_g_idx": index.astype(np.int32)}
    check(opened(tmp_path, parts, config_of()), linear, WeightGrid(4, 32, True))


def test_each_module_is_of_the_group_that_means_it_most_closely(tmp_path):
    """By its name before a pattern before the class, whatever the order of the groups."""
    kinds = {"a.q_proj": 64, "a.k_proj": 32, "b.q_proj": 96, "lm_head": 192}
    linears = {m: random_linear(4, 192, group_size=g, symmetric=True) for m, g in kinds.items()}
    groups = {
        "by class": (["Linear"], 96),
        "by pattern": ([r"re:a\..*_proj$"], 32),
        "by name": (["nothing", "a.q_proj"], 64),
        "head": (["re:lm_head"], 192),
    }
    config = config_of()
    base = config["config_groups"]["group_0"]
    config["config_groups"] = {
        name: base | {"targets": targets, "weights": base["weights"] | {"group_size": size}}
        for name, (targets, size) in groups.items()
    }
    config["ignore"] = []
    tensors = {}
    for module, linear in linears.items():
        tensors |= of_module(module, pack_quantized(linear, True))
    checkpoint = open_checkpoint(save_checkpoint(tmp_path, tensors, config))
    for module, size in kinds.items():
        grid = WeightGrid(4, 0 if size == 192 else size, True)
        check(checkpoint, linears[module], grid, f"{module}.weight")


def test_groups_of_a_mixed_checkpoint_have_formats_of_their_own(tmp_path):
    four = random_linear(4, 64, group_size=32, symmetric=True)
    eight = random_linear(4, 64, bits=8, symmetric=True)
    config = config_of("mixed-precision", group={"targets": ["a"], "format": "pack-quantized"})
    base = config["config_groups"]["group_0"]
    weights = base["weights"] | {"num_bits": 8, "strategy": "channel", "group_size": None}
    plain = {"targets": ["b"], "format": "int-quantized", "weights": weights}
    config["config_groups"]["group_1"] = base | plain
    tensors = of_module("a", pack_quantized(four, True)) | of_module("b", int_quantized(eight))
    checkpoint = open_checkpoint(save_checkpoint(tmp_path, tensors, config))
    check(checkpoint, four, WeightGrid(4, 32, True), "a.weight")
    check(checkpoint, eight, WeightGrid(8, 0, True), "b.weight")


def test_scales_of_activations_and_of_the_cache_are_left_out_and_noted(tmp_path):
    linear = random_linear(4, 64, bits=8, symmetric=True)
    weights = {"num_bits": 8, "strategy": "channel", "group_size": None}
    static = {"num_bits": 8, "type": "int", "dynamic": False, "strategy": "tensor"}
    group = {"input_activations": static}
    config = config_of("int-quantized", weights, group, kv_cache_scheme=static | {"type": "float"})
    scale = np.ones(1, np.float32)
    parts = int_quantized(linear) | {"input_scale": scale, "input_zero_point": scale}
    others = {"layers.0.k_scale": scale, "layers.0.v_scale": scale}
    checkpoint = opened(tmp_path, parts, config, **others)
    assert set(checkpoint.tensors) == {f"{NAME}.weight", "lm_head.weight"}
    cache, activations = checkpoint.notes
    assert "kv_cache" in cache
    assert "input_activations of int8 (static scales, which aren't used)" in activations


def test_dynamic_activations_are_noted_once_for_all_groups(tmp_path):
    linear = random_linear(4, 64, bits=8, symmetric=True)
    weights = {"num_bits": 8, "strategy": "channel", "group_size": None}
    group = {"input_activations": {"num_bits": 8, "type": "int", "dynamic": True}}
    config = config_of("int-quantized", weights, group)
    config["config_groups"]["group_1"] = config["config_groups"]["group_0"]
    (note,) = opened(tmp_path, int_quantized(linear), config).notes
    assert "input_activations of int8 (dynamic)" in note


FLOAT = {"type": "float", "num_bits": 8}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"form": "float-quantized"}, ["format is 'float-quantized'", "'pack-quantized', 'int-q"]),
        ({"form": "nvfp4-pack-quantized"}, ["'nvfp4-pack-quantized'"]),
        ({"form": "marlin-24"}, ["'marlin-24'"]),
        ({"form": "naive-quantized"}, ["'naive-quantized'"]),
        ({"form": "mixed-precision"}, ["config_groups.group_0", "format"]),
        ({"weights": FLOAT}, ["weights.type is 'float'", "'int' can be read"]),
        ({"weights": {"num_bits": 3}}, ["num_bits is 3", "4, 8"]),
        ({"weights": {"strategy": "block"}}, ["strategy is 'block'"]),
        ({"weights": {"group_size": None}}, ["group_size is None"]),
        ({"weights": {"dynamic": True}}, ["dynamic is True"]),
        ({"weights": {"actorder": "other"}}, ["actorder is 'other'"]),
        ({"weights": {"symmetric": 1}}, ["symmetric is 1"]),
        ({"weights": {"is_mx": True}}, ["weights has keys", "is_mx (True)"]),
        ({"group": {"weights": None}}, ["group_0 lacks weights"]),
        ({"group": {"weights": [4]}}, ["weights is [4]", "object"]),
        ({"group": {"targets": "Linear"}}, ["targets is 'Linear'", "list"]),
        ({"group": {"targets": ["re:("]}}, ["targets is 're:('", "regular expression"]),
        ({"group": {"targets": ["re:other"]}}, [f"{NAME} is stored quantised", "re:other"]),
        ({"ignore": [f"re:{NAME}"]}, [NAME, "ignore names it"]),
        ({"ignore": ["re:["]}, ["ignore is 're:['", "regular expression"]),
        ({"ignore": "lm_head"}, ["ignore is 'lm_head'"]),
        ({"config_groups": None}, ["lacks config_groups"]),
        ({"config_groups": []}, ["config_groups is []"]),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, ["sparse-24-bitmask", "'dense'"]),
        ({"transform_config": {"config_groups": {"u": {}}}}, ["transform_config"]),
        ({"quantization_status": "calibration"}, ["'calibration'", "'compressed'"]),
        ({"weights": {"group_size": 64}}, ["weight_scale is of shape (8, 2)", "(8, 1)"]),
        ({"weights": {"num_bits": 8}}, ["weight_packed is of shape (8, 8)", "(8, 16)"]),
        ({"weights": {"symmetric": False}}, [f"{NAME}.weight_zero_point is missing"]),
    ],
    ids=str,
)
def test_a_config_that_cannot_be_read_is_refused(tmp_path, config, words):
    parts = pack_quantized(random_linear(8, 64, group_size=32, symmetric=True), True)
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path, parts, config_of(**config))
    for word in (str(tmp_path), *words):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("part", "values", "words"),
    [
        ("weight_scale", None, "weight_scale is missing"),
        ("weight_shape", None, "weight_shape is missing"),
        ("weight_shape", np.array([8, 65]), "says 8 rows of 65 columns"),
        ("weight_shape", np.array([8, 64, 1]), "weight_shape is of shape (3,)"),
        ("weight_shape", np.array([-8, 64]), "says -8 rows"),
        ("weight_scale", np.ones((2, 8), np.float16), "weight_scale is of shape (2, 8)"),
        ("weight_packed", np.ones((8, 8), np.int64), "weight_packed is I64"),
        ("weight_zero_point", np.ones((8, 1), np.int32), "weight_zero_point is of shape (8, 1)"),
        ("weight_g_idx", np.zeros(64, np.int32), "weight_g_idx must put 32 columns into each of 2"),
        ("weight_g_idx", np.arange(64, dtype=np.int32), "weight_g_idx must put 32 columns"),
        ("weight_g_idx", np.zeros(63, np.int32), "weight_g_idx is of shape (63,)"),
        ("weight", np.zeros((8, 64), np.float32), "stored both quantised and not"),
    ],
)
def test_parts_that_do_not_fit_are_refused(tmp_path, part, values, words):
    linear = random_linear(8, 64, group_size=32)
    parts = pack_quantized(linear) | {part: values}
    parts = {name: value for name, value in parts.items() if value is not None}
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path, parts, config_of(weights={"symmetric": False}))
    assert words in str(caught.value)


def test_codes_beyond_their_bits_are_refused_when_read(tmp_path):
    linear = random_linear(4, 64, bits=8, symmetric=True)
    weights = {"num_bits": 4, "strategy": "channel", "group_size": None}
    checkpoint = opened(tmp_path, int_quantized(linear), config_of("int-quantized", weights))
    with pytest.raises(CheckpointError, match="codes of 4 bits are from -8 to 7"):
        checkpoint.read(f"{NAME}.weight")
