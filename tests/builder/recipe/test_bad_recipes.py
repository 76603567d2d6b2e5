"""Recipes that are refused: one clear message for each thing that is wrong."""

from pathlib import Path
from typing import Any

import pytest
from recipe_texts import HASH, RTX, TENSORRT, changed, problems

from llmbuild.builder.recipe.recipe import load_recipe
from llmbuild.errors import RecipeError

BAD_RECIPES: dict[str, tuple[dict[Any, Any], str, list[str]]] = {
    "version missing": ({"version": None}, "version", ["missing", "1"]),
    "version from the future": ({"version": 2}, "version", ["given 2", "allowed: 1"]),
    "version as text": ({"version": "1"}, "version", ["given '1'", "allowed: 1"]),
    "version true": ({"version": True}, "version", ["given true", "allowed: 1"]),
    "name missing": ({"name": None}, "name", ["missing", "a-z"]),
    "name with capitals": ({"name": "SmolLM"}, "name", ["given SmolLM", "a-z"]),
    "name a parent folder": ({"name": ".."}, "name", ["given ..", "starts with a letter"]),
    "name with a newline": ({"name": "tiny\n"}, "name", ["a-z"]),
    "name a number": ({"name": 135}, "name", ["given 135", "text"]),
    "model missing": ({"model": None}, "model", ["missing", "source, sha256"]),
    "model a word": ({"model": "llama"}, "model", ["given llama", "mapping", "source, sha256"]),
    "source without scheme": (
        {"model": {"source": "org/name"}},
        "model.source",
        ["given org/name", "path:", "hf:org/name", "pypi:PACKAGE==VERSION"],
    ),
    "source of an inexact version": (
        {"model": {"source": "pypi:thing>=1/a.gguf"}},
        "model.source",
        ["malformed", "pypi:PACKAGE==VERSION"],
    ),
    "sha256 too short": ({"model": {"sha256": "abc"}}, "model.sha256", ["abc", "64"]),
    "sha256 of a path upwards": (
        {"model": {"sha256": {"../model.safetensors": HASH}}},
        "model.sha256",
        ["file name"],
    ),
    "unknown key": ({"precison": "bf16"}, "precison", ["unknown key", "precision"]),
    "unknown key in a section": (
        {"limits": {"max_sequnces": 4}},
        "limits.max_sequnces",
        ["unknown key", "limits.max_sequences"],
    ),
    "key of another section": (
        {"block_size": 8},
        "block_size",
        ["unknown key", "kv_cache.block_size"],
    ),
    "key that is a number": ({7: 8}, "7", ["unknown key"]),
    "key with a dot": (
        {"limits.max_sequences": 4},
        '"limits.max_sequences"',
        ["unknown key", "limits.max_sequences"],
    ),
    "calibration spelt otherwise": (
        {"callibration": {}},
        "callibration",
        ["unknown key", "nearest known key is calibration"],
    ),
    "quantisation spelt otherwise": (
        {"quantization": "w4a8"},
        "quantization",
        ["unknown key", "nearest known key is quantisation"],
    ),
    "unknown scheme": (
        {"quantisation": "w2a8"},
        "quantisation",
        ["given w2a8", "none, w4a8, w4a16, w8a8, w8a8-static, w8a16, stored-a8"],
    ),
    "unknown scheme in a mapping": (
        {"quantisation": {"scheme": "int4"}},
        "quantisation.scheme",
        ["given int4", "none, w4a8, w4a16, w8a8, w8a8-static, w8a16, stored-a8"],
    ),
    "scheme a number": ({"quantisation": 4}, "quantisation", ["given 4", "scheme, group_size"]),
    "scheme null": ({"quantisation": {"scheme": None}}, "quantisation.scheme", ["given null"]),
    "unknown key of quantisation": (
        {"quantisation": {"weights": "int4"}},
        "quantisation.weights",
        ["unknown key", "nearest known key"],
    ),
    **{
        f"group size {size}": (
            {"quantisation": {"scheme": "w4a8", "group_size": size}},
            "quantisation.group_size",
            [f"given {shown}", "a multiple of 32, or row"],
        )
        for size, shown in (
            *((n, str(n)) for n in (0, 1, 31, 33, 48, -32)),
            *((True, "true"), ("rows", "rows"), ("32", "'32'"), (32.0, "32.0"), ([32], "[32]")),
        )
    },
    "symmetric a number": (
        {"quantisation": {"scheme": "w8a8", "symmetric": 1}},
        "quantisation.symmetric",
        ["given 1", "true or false"],
    ),
    **{
        f"{key} of {scheme}": (
            {"quantisation": {"scheme": scheme, key: value}},
            f"quantisation.{key}",
            [f"given {shown}", scheme, "no grid to choose"],
        )
        for scheme in ("none", "stored-a8", "stored-a16")
        for key, value, shown in (("symmetric", False, "false"), ("group_size", 32, "32"))
    },
    **{
        f"rotated codes, {where}": (
            {"quantisation": quantisation | {"rotation": True}},
            "quantisation.rotation",
            ["given true", "stored-a8 keeps the checkpoint's own codes"],
        )
        for where, quantisation in (
            ("of all", {"scheme": "stored-a8"}),
            ("of some", {"scheme": "w4a8", "overrides": [{"match": "*", "scheme": "stored-a8"}]}),
        )
    },
    "calibration longer than a sequence": (
        {"calibration": {"length": 129}, "limits": {"max_sequence_length": 128}},
        "calibration.length",
        ["given 129", "at most limits.max_sequence_length, 128"],
    ),
    "no calibration sequence": (
        {"calibration": {"sequences": 0}},
        "calibration.sequences",
        ["given 0", "from 1 to 4096"],
    ),
    "unknown method": (
        {"quantisation": {"scheme": "w4a8", "method": "hqq"}},
        "quantisation.method",
        ["given hqq", "rtn, gptq, awq, smoothquant"],
    ),
    **{
        f"smoothing for {scheme}": (
            {"quantisation": {"scheme": scheme, "method": "smoothquant"}},
            "quantisation.method",
            ["given smoothquant", f"{scheme} leaves them as they are", "rtn, gptq or awq"],
        )
        for scheme in ("w8a16", "w4a16")
    },
    "fp8 in an override of cpu's kv": (
        {"kv_cache": {"dtype": "int8", "overrides": [{"match": "*.k.*", "dtype": "fp8"}]}},
        "kv_cache.overrides",
        ["fp8", "cpu has fp32, bf16, int8, int8-static or int4"],
    ),
    "bf16 in an override of tensorrt's kv": (
        TENSORRT | {"kv_cache": {"overrides": [{"match": "*.k.*", "dtype": "bf16"}]}},
        "kv_cache.overrides",
        ["bf16", "tensorrt has fp16, int8"],
    ),
    "unknown kv dtype": (
        TENSORRT | {"kv_cache": {"dtype": "fp9"}},
        "kv_cache.dtype",
        ["given fp9", "with tensorrt `precision`, int8, int8-static, fp8, int4"],
    ),
    "gate of nothing": ({"gate": {}}, "gate", ["give perplexity, compare or retrieval"]),
    "no rank": ({"parallel": {"tp": 0}}, "parallel.tp", ["given 0", "from 1 to the model's"]),
    "half a stage": ({"parallel": {"pp": 1.5}}, "parallel.pp", ["given 1.5", "from 1 to"]),
    "two capabilities of a plan with kernels": (
        TENSORRT | {"target": {"kind": "tensorrt", "capabilities": [8.9, 9.0]}},
        "target.capabilities",
        ["give one", "the GPU that it is built on"],
    ),
    "capability that no kernel is for": (
        TENSORRT | {"target": {"kind": "tensorrt", "capabilities": 7.5}},
        "target.capabilities",
        ["given 7.5", "tensorrt has native, 8.0, 8.6, 8.9, 9.0, 10.0, 12.0"],
    ),
    "fp32 of tensorrt": (
        TENSORRT | {"precision": "fp32"},
        "precision",
        ["given fp32", "tensorrt has fp16 and bf16"],
    ),
    "a KV cache of the other precision": (
        TENSORRT | {"precision": "bf16", "kv_cache": {"dtype": "fp16"}},
        "kv_cache.dtype",
        ["given fp16", "tensorrt has bf16, int8, int8-static, fp8, int4 with precision bf16"],
    ),
    "KV that no kernel reads": (
        TENSORRT | {"kv_cache": {"dtype": "fp32"}},
        "kv_cache.dtype",
        ["given fp32", "tensorrt has fp16, int8, int8-static, fp8, int4"],
    ),
    "gate of tensorrt": (
        TENSORRT | {"gate": {"perplexity": {"text": "t", "max_increase": 0.1}}},
        "gate",
        ["leave it out"],
    ),
    "capabilities of cpu": (
        {"target": {"kind": "cpu", "capabilities": [8.9]}},
        "target.capabilities",
        ["given [8.9]", "leave it out", "tensorrt-rtx"],
    ),
    "instruction sets of a GPU": (
        RTX | {"target": {"kind": "tensorrt-rtx", "isa": "native"}},
        "target.isa",
        ["given native", "leave it out", "cpu"],
    ),
    "unknown capability": (
        RTX | {"target": {"kind": "tensorrt-rtx", "capabilities": 9.0}},
        "target.capabilities",
        ["given 9.0", "7.5, 8.0, 8.6, 8.9, 12.0, 12.1"],
    ),
    "capability twice": (
        RTX | {"target": {"kind": "tensorrt-rtx", "capabilities": [8.9, "8.9"]}},
        "target.capabilities",
        ["once"],
    ),
    "no capability": (
        RTX | {"target": {"kind": "tensorrt-rtx", "capabilities": []}},
        "target.capabilities",
        ["given []", "8.9"],
    ),
    "fp32 on a GPU": (RTX | {"precision": "fp32"}, "precision", ["given fp32", "fp16 and bf16"]),
    "fp16 on a processor": ({"precision": "fp16"}, "precision", ["given fp16", "fp32 and bf16"]),
    "fp16 KV on a processor": (
        {"kv_cache": {"dtype": "fp16"}},
        "kv_cache.dtype",
        ["given fp16", "fp32, bf16, int8"],
    ),
    "int8 KV on a GPU": (
        RTX | {"kv_cache": {"dtype": "int8"}},
        "kv_cache.dtype",
        ["given int8", "in `precision`, fp16"],
    ),
    "parts of the KV on a GPU": (
        RTX | {"kv_cache": {"overrides": [{"match": "*", "dtype": "fp16"}]}},
        "kv_cache.overrides",
        ["leave it out"],
    ),
    "blocks on a GPU": (
        RTX | {"kv_cache": {"block_size": 16}},
        "kv_cache.block_size",
        ["given 16", "one block a sequence"],
    ),
    "scheme that a GPU hasn't": (
        RTX | {"quantisation": "w4a8"},
        "quantisation",
        ["w4a16, w8a16, w8a8-static, fp8_w8a8, not w4a8", "or target cpu or tensorrt"],
    ),
    "fp8 on a processor": (
        {"quantisation": "fp8_w8a8"},
        "quantisation",
        ["given fp8_w8a8", "on cpu there are none, w4a8", "or target tensorrt or tensorrt-rtx"],
    ),
    "a part in fp8 on a processor": (
        {"quantisation": {"overrides": [{"match": "*", "scheme": "fp8_w8a8"}]}},
        "quantisation",
        ["not fp8_w8a8"],
    ),
    **{
        f"{key} {value} of fp8": (
            RTX | {"quantisation": {"scheme": "fp8_w8a8", key: value}},
            f"quantisation.{key}",
            [f"given {str(value).lower()}", f"fp8_w8a8 has {key} {allowed}", "leave it out"],
        )
        for key, value, allowed in (
            ("method", "gptq", "rtn or smoothquant"),
            ("method", "awq", "rtn or smoothquant"),
            ("group_size", 64, "row"),
            ("symmetric", False, "true"),
        )
    },
    "fp8 on a GPU without": (
        RTX
        | {
            "target": {"kind": "tensorrt-rtx", "capabilities": [8.6, 8.9]},
            "quantisation": "fp8_w8a8",
        },
        "target.capabilities",
        ["given [8.6, 8.9]", "fp8_w8a8 needs one of 8.9, 12.0, 12.1", "leave the others out"],
    ),
    "a part in fp8 on a GPU with kernels and without fp8": (
        TENSORRT
        | {
            "target": {"kind": "tensorrt", "capabilities": 8.0},
            "quantisation": {"overrides": [{"match": "*", "scheme": "fp8_w8a8"}]},
        },
        "target.capabilities",
        ["given 8.0", "fp8_w8a8 needs one of", "8.9, 9.0, 10.0, 12.0"],
    ),
    "gate of a GPU": (
        RTX | {"gate": {"perplexity": {"text": "t", "max_increase": 0.1}}},
        "gate",
        ["leave it out"],
    ),
    "unknown target": ({"target": "gpu"}, "target", ["given gpu", "cpu"]),
    "target a list": ({"target": ["cpu"]}, "target", ["given [cpu]", "cpu"]),
    "unknown level": (
        {"target": {"kind": "cpu", "isa": "x86-64-v5"}},
        "target.isa",
        [
            "given x86-64-v5",
            "native, a level, or a list of levels: "
            "x86-64-v4-vnni, x86-64-v4, x86-64-v3-vnni, x86-64-v3, x86-64, aarch64",
        ],
    ),
    "no level": ({"target": {"kind": "cpu", "isa": []}}, "target.isa", ["given []", "native"]),
    "level twice": (
        {"target": {"kind": "cpu", "isa": ["x86-64", "x86-64"]}},
        "target.isa",
        ["once"],
    ),
    "levels of two machines": (
        {"target": {"kind": "cpu", "isa": ["x86-64", "aarch64"]}},
        "target.isa",
        ["one kind of machine"],
    ),
    "precision missing": ({"precision": None}, "precision", ["missing", "fp32 or bf16"]),
    "unsupported precision": (
        {"precision": "int4"},
        "precision",
        ["given int4", "not yet supported", "fp32 or bf16"],
    ),
    "unknown precision": ({"precision": "fp12"}, "precision", ["given fp12", "fp32 or bf16"]),
    "fp8 kv of cpu": (
        {"kv_cache": {"dtype": "fp8"}},
        "kv_cache.dtype",
        ["given fp8", "cpu has fp32, bf16, int8, int8-static or int4"],
    ),
    "fp8 kv of tensorrt-rtx": (
        RTX | {"kv_cache": {"dtype": "fp8"}},
        "kv_cache.dtype",
        ["given fp8", "keeps the KV cache in `precision`"],
    ),
    "block size zero": ({"kv_cache": {"block_size": 0}}, "kv_cache.block_size", ["given 0", "256"]),
    "block size 257": ({"kv_cache": {"block_size": 257}}, "kv_cache.block_size", ["257", "256"]),
    "limits a number": (
        {"limits": 5},
        "limits",
        ["given 5", "max_sequence_length, max_step_tokens, max_sequences"],
    ),
    "number as text": (
        {"limits": {"max_sequences": "32"}},
        "limits.max_sequences",
        ["given '32'", "an integer"],
    ),
    "truth as number": (
        {"limits": {"max_sequence_length": True}},
        "limits.max_sequence_length",
        ["given true", "an integer"],
    ),
    "fraction as integer": (
        {"limits": {"max_step_tokens": 512.0}},
        "limits.max_step_tokens",
        ["given 512.0", "an integer"],
    ),
    "negative limit": (
        {"limits": {"max_sequence_length": -1}},
        "limits.max_sequence_length",
        ["given -1", "from 1"],
    ),
    "more sequences than step tokens": (
        {"limits": {"max_sequences": 9, "max_step_tokens": 8}},
        "limits.max_sequences",
        ["given 9", "limits.max_step_tokens, 8"],
    ),
    "more sequences than the default's step tokens": (
        {"limits": {"max_sequences": 513}},
        "limits.max_sequences",
        ["given 513", "limits.max_step_tokens, 512"],
    ),
    "block longer than a sequence": (
        {"limits": {"max_sequence_length": 31}, "kv_cache": {"block_size": 32}},
        "kv_cache.block_size",
        ["limits.max_sequence_length, 31"],
    ),
    "bucket above the sequences": (
        {"limits": {"max_sequences": 3}, "buckets": [1, 4]},
        "buckets",
        ["given [1, 4]", "limits.max_sequences, 3"],
    ),
    "bucket above the step tokens": (
        {"limits": {"max_step_tokens": 7}, "buckets": [1, 8]},
        "buckets",
        ["given [1, 8]", "limits.max_step_tokens, 7"],
    ),
    "bucket above 64": ({"buckets": [1, 65]}, "buckets", ["given [1, 65]", "1 to 64"]),
    "buckets without 1": ({"buckets": [2, 4]}, "buckets", ["given [2, 4]", "from 1"]),
    "buckets none": ({"buckets": []}, "buckets", ["given []", "from 1"]),
    "buckets twice": ({"buckets": [1, 2, 2]}, "buckets", ["[1, 2, 2]", "distinct"]),
    "buckets descending": ({"buckets": [2, 1]}, "buckets", ["[2, 1]", "ascending"]),
    "buckets of other types": ({"buckets": [True, "2"]}, "buckets", ["[true, '2']", "integers"]),
    "buckets a number": ({"buckets": 1}, "buckets", ["given 1", "a list"]),
    "tolerance zero": ({"verify": {"tolerance": 0}}, "verify.tolerance", ["given 0", "above 0"]),
    "tolerance not a number": (
        {"verify": {"tolerance": float("nan")}},
        "verify.tolerance",
        ["given .nan", "above 0"],
    ),
    "tolerance infinite": (
        {"verify": {"tolerance": float("inf")}},
        "verify.tolerance",
        ["given .inf", "at most 1"],
    ),
}


@pytest.mark.parametrize("kind", BAD_RECIPES)
def test_bad_recipe_is_refused_in_one_line_with_its_key(kind: str, tmp_path: Path) -> None:
    change, key, words = BAD_RECIPES[kind]
    lines = problems(tmp_path, changed(change))
    assert len(lines) == 1
    path, _, text = lines[0].partition(": ")
    assert path == key
    for word in words:
        assert word in text


BAD_FILES: dict[str, tuple[bytes, list[str]]] = {
    "empty": (b"", ["empty"]),
    "comments alone": (b"# nothing\n", ["empty"]),
    "a list": (b"- version: 1\n", ["list", "mapping"]),
    "a word": (b"hello\n", ["str", "mapping"]),
    "bad YAML": (b"version: 1\nname: [tiny\nmodel: x\n", ["line 3", "column 6"]),
    "a tab": (b"version: 1\nlimits:\n\tmax_sequences: 4\n", ["line 3", "column 1"]),
    "key twice": (b"version: 1\nname: a\nname: b\n", ["line 3", "column 1", "name", "twice"]),
    "key twice in a section": (
        b"limits:\n  max_sequences: 1\n  max_sequences: 2\n",
        ["line 3", "max_sequences", "twice"],
    ),
    "python object": (b"name: !!python/object/apply:os.getcwd []\n", ["line 1", "python"]),
    "impossible date": (b"name: 2026-13-45\n", ["line 1", "2026-13-45"]),
    "two documents": (b"version: 1\n---\nversion: 1\n", ["line 2", "document"]),
    "control character": (b"name: a\x00b\n", ["bad YAML"]),
    "not UTF-8": (b"name: caf\xe9\n", ["UTF-8", "byte 9"]),
    "nested without end": (b"[" * 20_000, ["nested too deeply"]),
    "larger than any recipe": (b"#" * ((1 << 20) + 1), ["larger than 1048576 bytes"]),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_file_that_is_no_recipe_is_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    raw, words = BAD_FILES[kind]
    path = tmp_path / "recipe.yaml"
    path.write_bytes(raw)
    with pytest.raises(RecipeError) as refused:
        load_recipe(path)
    message = str(refused.value)
    assert message.startswith(f"recipe {path}")
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("name", "words"),
    [("missing.yaml", "No such file"), ("", "isn't a file"), ("/dev/zero", "isn't a file")],
)
def test_path_without_a_file_is_refused(name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=words):
        load_recipe(tmp_path / name)


def test_all_problems_are_reported_together(tmp_path: Path) -> None:
    content = changed(
        {
            "version": 3,
            "name": None,
            "precison": "bf16",
            "model": {"sha256": 5},
            "limits": {"max_sequences": 0, "max_tokens": 7},
            "verify": {"tolerance": "small"},
            "gate": {},
        }
    )
    assert {line.partition(":")[0] for line in problems(tmp_path, content)} == {
        "version",
        "name",
        "precison",
        "model.sha256",
        "limits.max_sequences",
        "limits.max_tokens",
        "verify.tolerance",
        "gate",
    }


def test_contradiction_is_reported_beside_other_problems(tmp_path: Path) -> None:
    content = changed({"limits": {"max_sequences": 2}, "buckets": [1, 4], "colour": "red"})
    lines = problems(tmp_path, content)
    assert [line.partition(":")[0] for line in lines] == ["buckets", "colour"]


def test_shown_values_are_cut(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, changed({"precision": "x" * 100_000}))
    assert len(line) < 200


@pytest.mark.parametrize(
    "line",
    [
        f"limits: {{max_step_tokens: 0x{'f' * 5000}}}",
        f"verify: {{tolerance: {':'.join(['59'] * 3000)}.5}}",
        'limits: !!map "x"',
        f"buckets: [{', '.join(['x'] * 20000)}]",
    ],
    ids=["digits", "overflow", "tagged text", "many bad items"],
)
def test_a_wild_value_is_refused_soon_and_in_short(tmp_path: Path, line: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"version: 1\nname: a\nmodel: {{source: 'path:m'}}\nprecision: fp32\n{line}\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert len(str(caught.value)) < 20_000


def test_a_path_too_long_for_the_system_is_refused() -> None:
    with pytest.raises(RecipeError, match="File name too long"):
        load_recipe(Path("x" * 5000))
