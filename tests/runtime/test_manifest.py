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
    Limits,
    Manifest,
    QuantisedTensor,
    encode,
    read_manifest,
    seal,
    step_shape,
)

Content = dict[str, Any]


def content() -> Content:
    """A manifest as it stands in the file, before it is sealed."""
    names = ["rank0/v3.so", "rank0/base.so", "rank0/weights.safetensors"]
    names += ["tokenizer.json", "generation_config.json"]
    return {
        "schema_version": 3,
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
            "layers": [{"heads": [{"num_heads": 2, "k_dtype": "bf16", "v_dtype": "fp32"}]}] * 3,
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
    "raw", [b"{", b"[1]", b"null", b'{"schema_version": 3}', b"\xff\xfe", b"[" * 10**6]
)
def test_what_is_no_manifest_is_refused(tmp_path: Path, raw: bytes) -> None:
    refusal(tmp_path, raw)


def test_an_unknown_and_a_missing_field_are_named(tmp_path: Path) -> None:
    value = content()
    value["kv"]["layers"][0] = {"heads": [{"num_heads": 2, "k_dtype": "bf16"}]}
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
    value["kv"]["layers"][1] = {"heads": [{"num_heads": 2, "k_dtype": "int3", "v_dtype": "bf16"}]}


def missing_kv_head(value: Content) -> None:
    run = {"num_heads": 1, "k_dtype": "int8", "v_dtype": "bf16"}
    value["kv"]["layers"][2] = {"heads": [run]}


def no_kv_heads(value: Content) -> None:
    value["kv"]["layers"][1] = {"heads": []}


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
        (unknown_kv_dtype, ["int3", "fp32, bf16, int8, int8-static, int4"]),
        (missing_kv_head, ["KV layer 2 has 1 heads", "kv.num_kv_heads is 2"]),
        (no_kv_heads, ["KV layer 1 has 0 heads", "kv.num_kv_heads is 2"]),
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


def layout(block_size: int, *layers: KVLayer) -> KVLayout:
    return KVLayout(block_size=block_size, num_kv_heads=3, head_dim=6, layers=[*layers])


def test_blocks_of_codes_have_their_scales_at_a_multiple_of_four_bytes() -> None:
    """Of a token and head 6 codes; int8 has a scale of 4 bytes, int4 two of 2, int8-static none."""
    padded = {16: (96, 48), 7: (44, 24), 1: (8, 4)}  # bytes of a head's codes of 8 and 4 bits
    for block_size, (bytes_of_8, bytes_of_4) in padded.items():
        plain = 3 * block_size * 6 * 2
        for dtype, head_bytes in (
            ("int8", bytes_of_8 + 4 * block_size),
            ("int8-static", bytes_of_8),
            ("int4", bytes_of_4 + 4 * block_size),
        ):
            for pair in ((dtype, "bf16"), ("bf16", dtype)):
                kv = layout(block_size, KVLayer.of_heads([pair] * 3))
                assert kv.block_bytes == 3 * head_bytes + plain, (dtype, block_size)


def test_heads_of_a_layer_share_pools_with_neighbours_of_their_dtypes_alone() -> None:
    dtypes = [("int8", "int4"), ("int8", "int4"), ("int8", "bf16")]
    layer = KVLayer.of_heads(dtypes)
    assert [(run.num_heads, run.k_dtype, run.v_dtype) for run in layer.heads] == [
        (2, "int8", "int4"),
        (1, "int8", "bf16"),
    ]
    assert [*zip(layer.k_dtypes, layer.v_dtypes, strict=True)] == dtypes
    apart = KVLayer.of_heads([dtypes[0], dtypes[2], dtypes[1]])
    assert [run.num_heads for run in apart.heads] == [1, 1, 1]
    one = 10 * 6 + 4 * 10  # int8 of ten tokens
    both = 2 * (one + 10 * 3 + 2 + 4 * 10) + one + 10 * 6 * 2
    assert layout(10, layer).block_bytes == layout(10, apart).block_bytes == both


def test_the_step_shape_tells_every_layers_kv_dtypes_apart() -> None:
    limits = Limits(max_sequence_length=8, max_step_tokens=4, max_sequences=2)
    plain = KVLayer.of_heads([("int8", "int4")] * 3)
    mixed = KVLayer.of_heads([("int8", "int4"), ("bf16", "int4"), ("bf16", "int4")])
    swapped = KVLayer.of_heads([("bf16", "int4"), ("bf16", "int4"), ("int8", "int4")])
    layers = ([plain, plain, mixed], [plain, mixed, plain], [plain, plain, swapped], [plain] * 3)
    shapes = [step_shape(limits, layout(4, *each), 9, 64) for each in layers]
    assert len({*shapes}) == 4
    assert shapes[0].endswith(
        "2 layers int8/int4, 1 layers (1 heads int8/int4 + 2 heads bf16/int4)"
    )


@pytest.mark.parametrize(
    ("activation_group", "static", "words"),
    [
        (0, False, "int8 by row, fp32 activations"),
        (64, False, "int8 by row, int8 activations in groups of 64"),
        (64, True, "int8 by row, int8 activations in groups of 64, static scales"),
    ],
)
def test_a_quantised_tensor_tells_how_its_activations_are_rounded(
    activation_group: int, static: bool, words: str
) -> None:
    tensor = QuantisedTensor(
        bits=8,
        group_size=0,
        symmetric=True,
        zero_points=False,
        activation_group=activation_group,
        static_activations=static,
    )
    assert tensor.describe() == words
