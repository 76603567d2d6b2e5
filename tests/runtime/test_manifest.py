"""The manifest's JSON, and every way in which one is refused."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from llmbuild.errors import EngineError
from llmbuild.runtime.manifest import (
    SCHEMA_VERSION,
    KVLayer,
    KVLayout,
    Manifest,
    encode,
    read_manifest,
    seal,
)

Content = dict[str, Any]


def content() -> Content:
    """A manifest as it stands in the file, before it is sealed."""
    names = ["rank0/v3.so", "rank0/base.so", "rank0/weights.safetensors"]
    names += ["tokenizer.json", "generation_config.json"]
    return {
        "schema_version": 2,
        "llmbuild_version": "0.1.0",
        "name": "tiny \u00e9",
        "model": {
            "family": "llama",
            "num_layers": 3,
            "num_kv_heads": 2,
            "head_dim": 14,
            "vocab_size": 97,
            "norm_eps": 1e-05,
            "rope": {"theta": 1e6, "factors": []},
        },
        "vocab_size": 97,
        "precision": "bf16",
        "quantised": {},
        "target": {
            "kind": "cpu",
            "machine": "x86_64",
            "isa_levels": ["x86-64-v3", "x86-64"],
            "compiler": "g++ 12.2.0",
            "compiler_flags": {"x86-64-v3": ["-O3"], "x86-64": ["-O3"]},
        },
        "limits": {"max_sequence_length": 101, "max_step_tokens": 64, "max_sequences": 5},
        "buckets": [1, 2, 4],
        "kv": {
            "block_size": 16,
            "num_kv_heads": 2,
            "head_dim": 14,
            "layers": [{"k_dtype": "bf16", "v_dtype": "fp32"}] * 3,
        },
        "ranks": [
            {
                "executables": {"x86-64-v3": "rank0/v3.so", "x86-64": "rank0/base.so"},
                "weights": "rank0/weights.safetensors",
                "arena_bytes": 4096,
            }
        ],
        "files": {name: {"sha256": "0" * 64, "size_bytes": 7} for name in names},
    }


def sealed(value: Content) -> bytes:
    return encode(seal(msgspec.convert(value, Manifest)))


def refusal(tmp_path: Path, raw: bytes) -> str:
    (tmp_path / "manifest.json").write_bytes(raw)
    with pytest.raises(EngineError) as caught:
        read_manifest(tmp_path)
    return str(caught.value)


def test_a_sealed_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(sealed(content()))
    read = json.loads(encode(read_manifest(tmp_path)))
    assert len(read.pop("digest")) == 64
    assert read == content()


def test_sealing_twice_is_sealing_once() -> None:
    manifest = msgspec.convert(content(), Manifest)
    assert seal(seal(manifest)) == seal(manifest)


def test_a_flipped_bit_in_any_byte_is_refused(tmp_path: Path) -> None:
    raw = sealed(content())
    path = tmp_path / "manifest.json"
    path.write_bytes(raw)
    with path.open("r+b", buffering=0) as file:
        for position, byte in enumerate(raw):
            for mask in {1 << position % 8, 0x20}:  # 0x20 turns the case of a letter
                os.pwrite(file.fileno(), bytes([byte ^ mask]), position)
                with pytest.raises(EngineError):
                    read_manifest(tmp_path)
            os.pwrite(file.fileno(), bytes([byte]), position)
    assert read_manifest(tmp_path).vocab_size == 97


def test_changed_white_space_is_refused(tmp_path: Path) -> None:
    raw = sealed(content())
    for other in (
        raw + b"\n",
        raw.rstrip(),
        raw.replace(b"\n", b"\t"),
        json.dumps(json.loads(raw)),
    ):
        refusal(tmp_path, other if isinstance(other, bytes) else other.encode())


@pytest.mark.parametrize("length", [0, 1, 1000, -1])
def test_a_truncated_manifest_is_refused(tmp_path: Path, length: int) -> None:
    refusal(tmp_path, sealed(content())[:length])


def test_an_unsealed_manifest_is_refused(tmp_path: Path) -> None:
    raw = encode(msgspec.convert(content(), Manifest))
    assert "altered" in refusal(tmp_path, raw)


def test_an_edited_value_is_refused_with_both_digests(tmp_path: Path) -> None:
    raw = sealed(content())
    text = refusal(tmp_path, raw.replace(b'"arena_bytes": 4096', b'"arena_bytes": 4097'))
    assert json.loads(raw)["digest"] in text
    assert text.count("'") == 4


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 6, 0, "1", 1.0, True, None])
def test_another_schema_version_is_refused_with_both_named(tmp_path: Path, version: object) -> None:
    raw = json.dumps({"schema_version": version, "what": "a later schema may have"}).encode()
    text = refusal(tmp_path, raw)
    assert f"this runtime reads {SCHEMA_VERSION}" in text
    assert (repr(version) if version is not None else "no schema version") in text


@pytest.mark.parametrize(
    "raw", [b"{", b"[1]", b"null", b'{"schema_version": 2}', b"\xff\xfe", b"[" * 10**6]
)
def test_what_is_no_manifest_is_refused(tmp_path: Path, raw: bytes) -> None:
    refusal(tmp_path, raw)


def test_an_unknown_and_a_missing_field_are_named(tmp_path: Path) -> None:
    value = content()
    value["kv"]["layers"][0] = {"k_dtype": "bf16"}
    text = refusal(tmp_path, json.dumps(value).encode())
    assert "v_dtype" in text
    assert "$.kv.layers" in text
    assert "colour" in refusal(tmp_path, json.dumps(content() | {"colour": 1}).encode())


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("vocab_size", 0),
        ("limits.max_sequences", 0),
        ("kv.block_size", -16),
        ("buckets", [0]),
        ("buckets", ["1"]),
        ("files", {"tokenizer.json": {"sha256": "0" * 63, "size_bytes": 1}}),
        ("files", {"tokenizer.json": {"sha256": "0" * 64, "size_bytes": -1}}),
        ("ranks", None),
    ],
)
def test_a_value_out_of_range_is_named(tmp_path: Path, path: str, value: object) -> None:
    changed = content()
    at, _, last = path.rpartition(".")
    (changed[at] if at else changed)[last] = value
    assert f"$.{path}" in refusal(tmp_path, json.dumps(changed).encode())


def drop_layer(value: Content) -> None:
    value["kv"]["layers"].pop()


def other_head_dim(value: Content) -> None:
    value["model"]["head_dim"] = 15


def other_vocabulary(value: Content) -> None:
    value["vocab_size"] = 98


def no_layers_in_model(value: Content) -> None:
    del value["model"]["num_layers"]


def unknown_kv_dtype(value: Content) -> None:
    value["kv"]["layers"][1] = {"k_dtype": "int3", "v_dtype": "bf16"}


def repeated_bucket(value: Content) -> None:
    value["buckets"] = [1, 2, 2]


def missing_executable(value: Content) -> None:
    del value["ranks"][0]["executables"]["x86-64"]


def missing_flags(value: Content) -> None:
    del value["target"]["compiler_flags"]["x86-64-v3"]


def no_ranks(value: Content) -> None:
    value["ranks"] = []


def unlisted_weights(value: Content) -> None:
    value["ranks"][0]["weights"] = "rank0/other.safetensors"


def unlisted_tokenizer(value: Content) -> None:
    del value["files"]["tokenizer.json"]


def bucket_beyond_a_step(value: Content) -> None:
    value["buckets"] = [1, 2, 6]


def lists_itself(value: Content) -> None:
    value["files"]["manifest.json"] = value["files"]["tokenizer.json"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (drop_layer, ["model.num_layers 3", "KV layers 2"]),
        (other_head_dim, ["model.head_dim 15", "kv.head_dim 14"]),
        (other_vocabulary, ["model.vocab_size 97", "vocab_size 98"]),
        (no_layers_in_model, ["model.num_layers None", "KV layers 3"]),
        (unknown_kv_dtype, ["int3", "fp32, bf16, int8"]),
        (repeated_bucket, ["[1, 2, 2]"]),
        (missing_executable, ["rank 0 ['x86-64-v3']", "['x86-64', 'x86-64-v3']"]),
        (missing_flags, ["compiler_flags ['x86-64']"]),
        (no_ranks, ["0 ranks"]),
        (unlisted_weights, ["rank0/other.safetensors"]),
        (unlisted_tokenizer, ["tokenizer.json"]),
        (bucket_beyond_a_step, ["a bucket of 6", "at most 5 sequences"]),
        (lists_itself, ["manifest.json itself"]),
    ],
)
def test_a_sealed_manifest_at_odds_with_itself_is_refused(
    tmp_path: Path, change: Callable[[Content], None], named: list[str]
) -> None:
    value = content()
    change(value)
    text = refusal(tmp_path, sealed(value))
    assert "contradicts itself" in text
    assert [part for part in named if part not in text] == []


def test_a_path_that_is_no_engine_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder" / "manifest.json").mkdir(parents=True)
    for name, said in (
        ("absent", "doesn't exist"),
        ("file", "isn't a directory"),
        ("folder", "no manifest.json"),
    ):
        with pytest.raises(EngineError, match=said):
            read_manifest(tmp_path / name)


def test_block_bytes_sum_k_and_v_of_every_layer() -> None:
    kv = msgspec.convert(content(), Manifest).kv
    assert kv.block_bytes == 3 * (2 * 16 * 14) * (2 + 4)


def test_int8_blocks_have_a_scale_for_each_token_and_head_at_a_multiple_of_four_bytes() -> None:
    layers = [KVLayer(k_dtype="int8", v_dtype="bf16")]
    for block_size, codes in ((16, 96), (7, 44), (1, 8)):  # of a head: 6 bytes a token
        kv = KVLayout(block_size=block_size, num_kv_heads=3, head_dim=6, layers=layers)
        assert kv.block_bytes == 3 * (codes + 4 * block_size) + 3 * block_size * 6 * 2
