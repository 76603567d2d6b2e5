import struct
from contextlib import suppress

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbuild.builder.checkpoint import open_checkpoint
from llmbuild.builder.checkpoint.gguf_file import read_gguf
from llmbuild.errors import CheckpointError

HEADER = struct.Struct("<4sIQQ")


def refused(path, *words):
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    for word in (str(path), *words):
        assert word in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"GG", b"GGUF", b"\0" * 100, b"not a model at all"])
def test_garbage_is_refused(data, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    refused(path)


@pytest.mark.parametrize("version", [0x03000000, 0x02000000])
def test_big_endian_file_is_refused(version, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(HEADER.pack(b"GGUF", version, 0, 0))
    refused(path, "big-endian")


def test_big_endian_file_of_the_library_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama", endianess=gguf.GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(path, "big-endian")


@pytest.mark.parametrize("version", [1, 4, 99])
def test_other_version_is_refused(version, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(HEADER.pack(b"GGUF", version, 0, 0))
    refused(path, f"version {version}", "2 and 3")


@pytest.mark.parametrize("counts", [(2**63, 0), (0, 2**63), (10**9, 10**9)])
def test_absurd_counts_are_refused_without_allocating(counts, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(HEADER.pack(b"GGUF", 3, *counts))
    refused(path, "truncated")


def test_truncation_at_every_byte_is_refused(write_gguf, llama_metadata):
    tensors = {"token_embd.weight": np.ones((3, 32), np.float32)}
    path = write_gguf(llama_metadata | {"general.tags": ["a", "b"]}, tensors)
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError):
            open_checkpoint(path)


def test_tensor_cut_after_opening_is_refused(write_gguf, llama_metadata):
    path = write_gguf(llama_metadata)
    checkpoint = open_checkpoint(path)
    path.write_bytes(path.read_bytes()[:-700])
    with pytest.raises(CheckpointError, match="truncated"):
        checkpoint.read("token_embd.weight")


@settings(max_examples=150, deadline=None)
@given(edits=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1))
def test_damaged_head_never_gives_another_error(edits, tmp_path_factory):
    path = tmp_path_factory.mktemp("damaged") / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("general.tags", ["a", "bc"])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_float32("llama.rope.freq_base", 1e4)
    writer.add_tensor("token_embd.weight", np.ones((3, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    data = bytearray(path.read_bytes())
    for position, value in edits:
        data[position % (len(data) - 3 * 32 * 4)] = value
    path.write_bytes(data)
    with suppress(CheckpointError):
        checkpoint = open_checkpoint(path)
        for name in checkpoint.tensors:
            checkpoint.read(name)


def test_unsupported_type_names_tensor_and_allowed_types(write_gguf, llama_metadata):
    block_bytes = gguf.GGML_QUANT_SIZES[Type.Q2_K][1]
    tensors = {"blk.1.ffn_up.weight": (Type.Q2_K, np.zeros((2, block_bytes), np.uint8))}
    refused(
        write_gguf(llama_metadata, tensors), "'blk.1.ffn_up.weight'", "Q2_K", "Q4_1", "Q6_K", "BF16"
    )


def test_integer_tensor_is_refused(write_gguf, llama_metadata):
    refused(write_gguf(llama_metadata, {"a": np.zeros(3, np.int32)}), "'a'", "I32")


def test_overlapping_tensors_are_refused(write_gguf, llama_metadata):
    tensors = {name: np.ones(64, np.float32) for name in ("first", "second")}
    path = write_gguf(llama_metadata, tensors)
    data = path.read_bytes()
    offset = data.index(b"second") + len(b"second") + 4 + 8 + 4
    assert struct.unpack_from("<Q", data, offset) == (256,)
    path.write_bytes(data[:offset] + struct.pack("<Q", 32) + data[offset + 8 :])
    refused(path, "'second'", "overlaps")


def test_alignment_of_the_file_is_honoured(write_gguf, llama_metadata):
    writer_alignment = {"general.alignment": 128}
    tensors = {"token_embd.weight": np.arange(96, dtype=np.float32).reshape(3, 32)}
    path = write_gguf(llama_metadata | writer_alignment, tensors)
    data = path.read_bytes()
    # The library pads to 32 here; pad the data section to 128 as the metadata demands.
    start = len(data) - 96 * 4
    padding = b"\0" * (-start % 128)
    path.write_bytes(data[:start] + padding + data[start:])
    values = open_checkpoint(path).read("token_embd.weight")
    np.testing.assert_array_equal(values, tensors["token_embd.weight"])


@pytest.mark.parametrize("alignment", [0, 3, 96])
def test_impossible_alignment_is_refused(alignment, write_gguf, llama_metadata):
    path = write_gguf(llama_metadata | {"general.alignment": alignment})
    refused(path, "general.alignment", str(alignment))


def test_part_of_a_split_model_is_refused(write_gguf, llama_metadata):
    path = write_gguf(
        llama_metadata | {"split.count": 3, "split.no": 0}, name="model-00001-of-00003.gguf"
    )
    refused(path, "split into 3", "merge")


def test_split_of_one_part_opens(write_gguf, llama_metadata):
    path = write_gguf(llama_metadata | {"split.count": 1}, name="model-00001-of-00001.gguf")
    assert open_checkpoint(path).format == "gguf"


def test_every_metadata_type_reads_as_written(tmp_path):
    path = tmp_path / "model.gguf"
    values = {
        "u8": 255, "i8": -128, "u16": 65535, "i16": -32768, "u32": 2**32 - 1, "i32": -(2**31),
        "u64": 2**64 - 1, "i64": -(2**63), "f32": 0.5, "f64": 0.1, "yes": True, "text": "▁é👍",
        "texts": ["", "a b", "é"], "numbers": [1, -2, 3], "reals": [0.5, -1.5],
    }  # fmt: skip
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", values["u8"])
    writer.add_int8("i8", values["i8"])
    writer.add_uint16("u16", values["u16"])
    writer.add_int16("i16", values["i16"])
    writer.add_uint32("u32", values["u32"])
    writer.add_int32("i32", values["i32"])
    writer.add_uint64("u64", values["u64"])
    writer.add_int64("i64", values["i64"])
    writer.add_float32("f32", values["f32"])
    writer.add_float64("f64", values["f64"])
    writer.add_bool("yes", values["yes"])
    writer.add_string("text", values["text"])
    for key in ("texts", "numbers", "reals"):
        writer.add_array(key, values[key])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert read_gguf(path).metadata == {"general.architecture": "llama"} | values


def test_gguf_without_its_suffix_opens(write_gguf, llama_metadata):
    assert open_checkpoint(write_gguf(llama_metadata, name="0a1b2c")).format == "gguf"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickle_file_is_never_loaded(name, tmp_path):
    (tmp_path / name).write_bytes(b"\x80\x04.")
    refused(tmp_path / name, "pickle", "safetensors")


def test_other_file_and_missing_path_are_refused(tmp_path):
    (tmp_path / "weights.npz").write_bytes(b"PK")
    refused(tmp_path / "weights.npz", "safetensors", ".gguf")
    refused(tmp_path / "absent.gguf", "doesn't exist")
