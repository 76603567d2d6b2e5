import json
import struct
from contextlib import suppress

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

from llmbuild.builder.checkpoint import TensorInfo, open_checkpoint
from llmbuild.errors import CheckpointError

CONFIG = {"model_type": "llama", "hidden_size": 8}


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def write_raw(directory, header, data=b"", name="model.safetensors"):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (directory / name).write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_sharded(directory, shards, weight_map):
    for name, tensors in shards.items():
        save_file(tensors, directory / name)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def refused(path, *words):
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    for word in (str(path), *words):
        assert word in str(caught.value)


def ones(*shape):
    return np.ones(shape, np.float32)


def entry(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_tensors_read_as_the_library_wrote_them(directory):
    torch.manual_seed(0)
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7, 11).to(torch.bfloat16),
        "c": torch.randn(13).half(),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
    }
    save_torch(tensors, directory / "model.safetensors", {"format": "pt"})
    checkpoint = open_checkpoint(directory)
    assert checkpoint.format == "safetensors"
    assert checkpoint.config == CONFIG
    assert set(checkpoint.tensors) == set(tensors)
    assert checkpoint.tensors["b"] == TensorInfo((7, 11), "BF16")
    assert checkpoint.read("b").dtype == ml_dtypes.bfloat16
    assert checkpoint.read("c").dtype == np.float16
    for name, tensor in tensors.items():
        values = checkpoint.read(name)
        assert values.shape == tuple(tensor.shape)
        np.testing.assert_array_equal(values.astype(np.float32), tensor.float().numpy())


def test_sharded_checkpoint_reads_each_tensor_from_its_shard(directory):
    shards = {
        "model-00001-of-00002.safetensors": {"a": ones(2, 3), "b": 2 * ones(3)},
        "model-00002-of-00002.safetensors": {"c": 3 * ones(5)},
    }
    names = {name: shard for shard, tensors in shards.items() for name in tensors}
    write_sharded(directory, shards, names)
    checkpoint = open_checkpoint(directory)
    for shard, name in (("model-00001-of-00002.safetensors", "b"), (list(shards)[1], "c")):
        np.testing.assert_array_equal(checkpoint.read(name), shards[shard][name])
    assert set(checkpoint.tensors) == {"a", "b", "c"}


def test_tensor_that_the_index_does_not_list_is_kept(directory):
    write_sharded(
        directory, {"s.safetensors": {"a": ones(2), "b": ones(3)}}, {"a": "s.safetensors"}
    )
    assert set(open_checkpoint(directory).tensors) == {"a", "b"}


def test_tensor_missing_from_its_shard_is_named(directory):
    shards = {"1.safetensors": {"a": ones(2)}, "2.safetensors": {"b": ones(2)}}
    weight_map = {"a": "2.safetensors", "b": "2.safetensors", "gone": "1.safetensors"}
    write_sharded(directory, shards, weight_map)
    refused(directory, "a (2.safetensors)", "gone (1.safetensors)")


def test_tensor_in_two_shards_is_refused(directory):
    shards = {"1.safetensors": {"a": ones(2), "b": ones(1)}, "2.safetensors": {"b": ones(1)}}
    write_sharded(directory, shards, {"a": "1.safetensors", "b": "2.safetensors"})
    refused(directory, "'b'", "1.safetensors", "2.safetensors")


def test_missing_shard_is_named(directory):
    write_sharded(directory, {"1.safetensors": {"a": ones(1)}}, {"a": "1.safetensors", "b": "2.st"})
    refused(directory, "2.st")


@pytest.mark.parametrize("shard", ["../1.safetensors", "/etc/passwd", "", "..", 3])
def test_index_names_only_files_of_the_directory(shard, directory):
    write_sharded(directory, {}, {"a": shard})
    refused(directory, "'a'")


@pytest.mark.parametrize("index", ["[]", "{", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_malformed_index_is_refused(index, directory):
    (directory / "model.safetensors.index.json").write_text(index)
    refused(directory, "model.safetensors.index.json")


def test_single_file_beside_an_index_is_refused(directory):
    write_sharded(directory, {"1.safetensors": {"a": ones(1)}}, {"a": "1.safetensors"})
    save_file({"a": ones(1)}, directory / "model.safetensors")
    refused(directory, "both")


@pytest.mark.parametrize(
    ("values", "dtype"),
    [(np.arange(4, dtype=np.int8), "I8"), (np.arange(4), "I64"), (np.ones(4), "F64")],
)
def test_other_dtype_is_an_info_until_it_is_read(values, dtype, directory):
    save_file({"rotary_emb.inv_freq": values}, directory / "model.safetensors")
    checkpoint = open_checkpoint(directory)
    assert checkpoint.tensors["rotary_emb.inv_freq"].dtype == dtype
    with pytest.raises(CheckpointError, match=f"'rotary_emb.inv_freq'.*{dtype}.*F32, F16, BF16"):
        checkpoint.read("rotary_emb.inv_freq")


def test_float8_is_refused_when_read(directory):
    tensors = {"w": torch.zeros(4).to(torch.float8_e4m3fn)}
    save_torch(tensors, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'w'.*F8_E4M3"):
        open_checkpoint(directory).read("w")


def test_truncation_at_every_byte_is_refused(directory):
    save_file({"a": ones(3), "b": ones(2, 2)}, directory / "model.safetensors")
    data = (directory / "model.safetensors").read_bytes()
    for length in range(len(data)):
        (directory / "model.safetensors").write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            open_checkpoint(directory)


def test_bytes_after_the_data_are_refused(directory):
    save_file({"a": ones(3)}, directory / "model.safetensors")
    with (directory / "model.safetensors").open("ab") as file:
        file.write(b"\0")
    refused(directory, "left over")


def test_tensor_cut_after_opening_is_refused(directory):
    save_file({"a": ones(30)}, directory / "model.safetensors")
    checkpoint = open_checkpoint(directory)
    (directory / "model.safetensors").write_bytes(b"\0" * 40)
    with pytest.raises(CheckpointError, match="truncated"):
        checkpoint.read("a")


@pytest.mark.parametrize(
    ("header", "word"),
    [
        ({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, "overlaps"),
        ({"a": entry([2], 0, 8), "b": entry([1], 12, 16)}, "gap"),
        ({"a": entry([3], 0, 8)}, "takes 8 bytes"),
        ({"a": entry([2], 8, 0)}, "takes -8 bytes"),
        ({"a": entry([-2], 0, 8)}, "non-negative"),
        ({"a": entry([2.0], 0, 8)}, "non-negative"),
        ({"a": entry([True, 2], 0, 8)}, "non-negative"),
        ({"a": entry([2], 0, 8, "F31")}, "F31"),
        ({"a": entry([2], 0, 8, ["F32"])}, "dtype"),
        ({"a": [0, 8]}, "data_offsets"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "data_offsets"),
        ([], "object"),
        (b"{", "JSON"),
        (b"\xff\xfe{}", "JSON"),
        (b"[" * 100_000, "JSON"),
        (b'{"a": {}, "a": {}}', "repeated"),
    ],
)
def test_malformed_header_is_refused(header, word, directory):
    write_raw(directory, header, bytes(16))
    refused(directory, word)


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=200), states_length=st.booleans())
def test_garbage_never_gives_another_error(data, states_length, tmp_path_factory):
    directory = tmp_path_factory.mktemp("garbage")
    (directory / "config.json").write_text("{}")
    start = struct.pack("<Q", len(data)) if states_length else b""
    (directory / "model.safetensors").write_bytes(start + data)
    with suppress(CheckpointError):
        assert not open_checkpoint(directory).tensors


def test_missing_config_is_named(directory):
    save_file({"a": ones(1)}, directory / "model.safetensors")
    (directory / "config.json").unlink()
    refused(directory, "config.json", "missing")


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '{"a": 1, "a": 2}'])
def test_invalid_config_is_refused(text, directory):
    save_file({"a": ones(1)}, directory / "model.safetensors")
    (directory / "config.json").write_text(text)
    refused(directory, "config.json")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_directory_of_pickles_is_never_loaded(name, directory):
    (directory / name).write_bytes(b"\x80\x04.")
    refused(directory, name, "pickle", "never loaded", "safetensors")


def test_pickles_beside_safetensors_are_left_alone(directory):
    save_file({"a": ones(1)}, directory / "model.safetensors")
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert set(open_checkpoint(directory).tensors) == {"a"}


def test_adapter_directory_is_refused(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    save_file({"a": ones(1)}, tmp_path / "adapter_model.safetensors")
    refused(tmp_path, "adapter", "merge")


def test_directory_without_weights_says_what_it_holds(directory):
    refused(directory, "model.safetensors", "it holds config.json")
