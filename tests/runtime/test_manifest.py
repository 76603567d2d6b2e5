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
        "schema_version": SCHEMA_VERSION,
        "llmbuild_version": "0.1.0",
        "name": "tiny \u00e9",
        "model": {
            "family": "llama",
            "num_layers": 3,
            "num_heads": 6,
            "num_kv_heads": 2,
            "head_dim": 14,
            "vocab_size": 97,
            "norm_eps": 1e-05,
            "rope": {"theta": 1e6, "factors": []},
        },
        "vocab_size": 97,
        "precision": "bf16",
        "quantised": {},
        "rotated": False,
        "distilled": False,
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
        "parallel": {"tp": 1, "pp": 1},
        "ranks": [
            {
                "stage": 0,
                "tp_rank": 0,
                "layers": {"first": 0, "count": 3},
                "heads": {"first": 0, "count": 6},
                "kv_heads": {"first": 0, "count": 2},
                "tokens": {"first": 0, "count": 97},
                "executables": {"x86-64-v3": "rank0/v3.so", "x86-64": "rank0/base.so"},
                "weights": "rank0/weights.safetensors",
                "shared_weights": None,
                "arena_bytes": 4096,
                "plan_tensors": [],
            }
        ],
        "files": {name: {"sha256": "0" * 64, "size_bytes": 7} for name in names},
    }


def of_ranks() -> Content:
    """The same for 2 stages, of 2 layers and 1, each of 2 ranks, with 4 heads and 2."""
    value = content()
    value["parallel"] = {"tp": 2, "pp": 2}
    [whole] = value["ranks"]
    parts = [(0, 4, 0, 2, 0, 49), (4, 2, 1, 1, 49, 48)]
    value["ranks"] = [
        whole
        | {"stage": stage, "tp_rank": tp_rank, "layers": span(*layers)}
        | {"heads": span(*part[:2]), "kv_heads": span(*part[2:4]), "tokens": span(*part[4:])}
        for stage, layers in enumerate([(0, 2), (2, 1)])
        for tp_rank, part in enumerate(parts)
    ]
    return value


def span(first: int, count: int) -> dict[str, int]:
    return {"first": first, "count": count}


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
    "raw", [b"{", b"[1]", b"null", b'{"schema_version": 4}', b"\xff\xfe", b"[" * 10**6]
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
        (unknown_kv_dtype, ["int3", "fp32, bf16, fp16, int8, int8-static, fp8, int4"]),
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


def test_a_manifest_of_several_ranks_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(sealed(of_ranks()))
    read = json.loads(encode(read_manifest(tmp_path)))
    assert len(read.pop("digest")) == 64
    assert read == of_ranks()


def missing_rank(value: Content) -> None:
    value["ranks"].pop()


def swapped_ranks(value: Content) -> None:
    ranks = value["ranks"]
    ranks[1], ranks[2] = ranks[2], ranks[1]


def gap_between_stages(value: Content) -> None:
    for rank in value["ranks"][:2]:
        rank["layers"] = span(0, 1)


def layers_past_the_last(value: Content) -> None:
    for rank in value["ranks"][2:]:
        rank["layers"] = span(2, 2)


def layers_that_differ_in_a_stage(value: Content) -> None:
    value["ranks"][3]["layers"] = span(1, 2)


def heads_that_two_ranks_have(value: Content) -> None:
    value["ranks"][3]["heads"] = span(3, 3)


def heads_that_no_rank_has(value: Content) -> None:
    value["ranks"][1]["heads"] = span(4, 1)


def tokens_that_no_rank_has(value: Content) -> None:
    value["ranks"][2]["tokens"] = span(1, 48)


def kv_head_past_the_last(value: Content) -> None:
    value["ranks"][3]["kv_heads"] = span(1, 2)


def unlisted_shared_weights(value: Content) -> None:
    value["ranks"][2]["shared_weights"] = "stage1/shared.safetensors"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (missing_rank, ["3 ranks", "parallel.tp 2", "parallel.pp 2"]),
        (swapped_ranks, ["rank 1 is stage 1, tp_rank 0", "rank 2 is stage 0, tp_rank 1"]),
        (gap_between_stages, ["layers of the stages are 0 to 1, 2 to 3", "the model has 3"]),
        (layers_past_the_last, ["layers of the stages are 0 to 2, 2 to 4", "the model has 3"]),
        (layers_that_differ_in_a_stage, ["layers of stage 1's ranks differ"]),
        (heads_that_two_ranks_have, ["heads of stage 1's ranks are 0 to 4, 3 to 6", "has 6"]),
        (heads_that_no_rank_has, ["heads of stage 0's ranks are 0 to 4, 4 to 5", "has 6"]),
        (tokens_that_no_rank_has, ["tokens of stage 1's ranks are 1 to 49, 49 to 97", "has 97"]),
        (kv_head_past_the_last, ["KV heads up to 3 of stage 1's ranks", "kv.num_kv_heads 2"]),
        (unlisted_shared_weights, ["files lacks 'stage1/shared.safetensors'"]),
    ],
)
def test_ranks_that_are_no_whole_model_are_refused(
    tmp_path: Path, change: Callable[[Content], None], named: list[str]
) -> None:
    value = of_ranks()
    change(value)
    text = refusal(tmp_path, sealed(value))
    assert "contradicts itself" in text
    assert [part for part in named if part not in text] == []


def test_a_rank_holds_the_kv_of_its_layers_and_heads() -> None:
    value = of_ranks()
    runs = [{"num_heads": 1, "k_dtype": k, "v_dtype": "bf16"} for k in ("int8", "fp32")]
    value["kv"]["layers"][1] = {"heads": runs}
    manifest = msgspec.convert(value, Manifest)
    held = [[layer.describe() for layer in manifest.kv_of(rank).layers] for rank in manifest.ranks]
    both = "(1 heads int8/bf16 + 1 heads fp32/bf16)"
    assert held == [["bf16/fp32", both], ["bf16/fp32", "fp32/bf16"], ["bf16/fp32"], ["bf16/fp32"]]
    plain, int8, fp32 = 16 * 14 * (2 + 4), 16 * (14 + 4 + 14 * 2), 16 * 14 * (4 + 2)
    first_stage = 2 * plain + int8 + fp32 + plain + fp32
    assert manifest.kv_block_bytes == first_stage + 3 * plain


def test_the_step_shape_tells_ranks_apart_that_do_other_work() -> None:
    manifest = msgspec.convert(of_ranks(), Manifest)
    shapes = [manifest.step_shape_of(rank) for rank in manifest.ranks]
    assert len({*shapes}) == 4
    alone = msgspec.convert(content(), Manifest)
    assert alone.step_shape_of(alone.ranks[0]).endswith("; stage 0 of 1, 1 ranks each")


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
    assert "2 layers int8/int4, 1 layers (1 heads int8/int4 + 2 heads bf16/int4);" in shapes[0]


@pytest.mark.parametrize(
    ("activation_group", "static", "words"),
    [
        (0, False, "int8 by row, unrounded activations"),
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


@pytest.mark.parametrize(
    ("activation_group", "words"),
    [(576, "fp8 by row, fp8 activations, static scales"), (0, "fp8 by row, unrounded activations")],
)
def test_an_fp8_tensor_says_so(activation_group: int, words: str) -> None:
    """One scale is for all columns, so that no groups are told."""
    tensor = QuantisedTensor(8, 0, True, False, activation_group, activation_group > 0, is_fp8=True)
    assert tensor.describe() == words
