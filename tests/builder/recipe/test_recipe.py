"""Recipes: what is accepted and completed, and the one clear message for each thing refused."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from llmbuild.builder.recipe.problems import known_keys
from llmbuild.builder.recipe.recipe import Recipe, ResolvedRecipe, effective_yaml, load_recipe
from llmbuild.builder.recipe.target import SCHEMES
from llmbuild.errors import RecipeError
from llmbuild.runtime.target import CPU

HASH = "0123456789abcdef" * 4
MINIMAL: dict[str, Any] = {
    "version": 1,
    "name": "tiny",
    "model": {"source": "path:model"},
    "precision": "fp32",
}


def write(folder: Path, content: object) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def changed(change: dict[Any, Any]) -> dict[str, Any]:
    """MINIMAL with keys set; a section is merged, and None removes a key."""
    content = copy.deepcopy(MINIMAL)
    for key, value in change.items():
        if isinstance(value, dict) and isinstance(content.get(key), dict):
            content[key].update(value)
        elif value is None:
            del content[key]
        else:
            content[key] = value
    return content


def problems(folder: Path, content: object, *overrides: str) -> list[str]:
    """The lines of the RecipeError that loading raises, without its heading."""
    with pytest.raises(RecipeError) as refused:
        load_recipe(write(folder, content), overrides)
    heading, *lines = str(refused.value).split("\n  ")
    assert heading.startswith(f"recipe {folder / 'recipe.yaml'}")
    return lines


RTX: dict[str, Any] = {"target": "tensorrt-rtx", "precision": "fp16"}
TENSORRT: dict[str, Any] = {"target": "tensorrt", "precision": "fp16"}

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
    "bf16 that the interpreter gets wrong": (
        TENSORRT | {"precision": "bf16"},
        "precision",
        ["given bf16", "tensorrt has fp16"],
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


def resolve(folder: Path, content: object, *overrides: str, max_position: int = 4096) -> Any:
    return load_recipe(write(folder, content), overrides).resolve(max_position)


def test_minimal_recipe_gets_the_defaults(tmp_path: Path) -> None:
    resolved = resolve(tmp_path, MINIMAL)
    assert yaml.safe_load(effective_yaml(resolved)) == {
        **MINIMAL,
        "target": {"kind": "cpu", "isa": ["native"]},
        "parallel": {"tp": 1, "pp": 1},
        "limits": {"max_sequence_length": 2048, "max_step_tokens": 512, "max_sequences": 32},
        "quantisation": {"scheme": "none", "overrides": [], "rotation": False},
        "kv_cache": {"dtype": "fp32", "block_size": 16, "overrides": []},
        "buckets": [1, 2, 4, 8],
        "calibration": {"data": "self", "sequences": 32, "length": 512, "seed": 0},
        "verify": {"tolerance": 1e-4},
    }


def test_bf16_sets_the_kv_dtype_and_the_tolerance(tmp_path: Path) -> None:
    resolved = resolve(tmp_path, changed({"precision": "bf16"}))
    assert resolved.kv_cache.dtype == "bf16"
    assert resolved.verify.tolerance == 2e-2


@pytest.mark.parametrize(
    ("scheme", "group_size", "tolerance"),
    [
        ("w4a8", 64, 1e-1),
        ("w8a8", "row", 1e-1),
        ("w8a8-static", "row", 1e-1),
        ("w4a16", 64, 2e-2),
        ("w8a16", "row", 2e-2),
        ("stored-a8", None, 1e-1),
        ("stored-a16", None, 2e-2),
    ],
)
@pytest.mark.parametrize("in_short", [True, False])
def test_a_scheme_sets_its_groups_and_the_tolerance(
    tmp_path: Path, scheme: str, group_size: Any, tolerance: float, in_short: bool
) -> None:
    """Of 4 bits 64 columns share a scale, of 8 a row; what is stored has nothing to choose."""
    given = scheme if in_short else {"scheme": scheme}
    resolved = resolve(tmp_path, changed({"quantisation": given, "precision": "bf16"}))
    found = resolved.quantisation
    symmetric = None if scheme.startswith("stored") else True
    assert (found.scheme, found.group_size, found.symmetric) == (scheme, group_size, symmetric)
    assert resolved.verify.tolerance == tolerance


def test_a_given_grid_and_tolerance_are_kept(tmp_path: Path) -> None:
    for group_size, symmetric in ((32, False), (4096, True), ("row", False)):
        section = {"scheme": "w4a8", "group_size": group_size, "symmetric": symmetric}
        content = changed({"quantisation": section, "verify": {"tolerance": 0.01}})
        resolved = resolve(tmp_path, content)
        found = resolved.quantisation
        assert (found.group_size, found.symmetric) == (group_size, symmetric)
        assert resolved.verify.tolerance == 0.01


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_int8_kv_allows_for_keys_and_values_rounded_to_either_side(
    tmp_path: Path, precision: str
) -> None:
    content = changed({"precision": precision, "kv_cache": {"dtype": "int8"}})
    assert resolve(tmp_path, content).verify.tolerance == 5e-2


def test_defaults_are_cut_to_fit_what_is_given(tmp_path: Path) -> None:
    resolved = resolve(tmp_path, changed({"limits": {"max_step_tokens": 5}}), max_position=7)
    assert resolved.limits.max_sequences == 5
    assert resolved.limits.max_sequence_length == 7
    assert resolved.kv_cache.block_size == 7
    assert resolved.buckets == (1, 2, 4)


def test_empty_section_is_all_defaults(tmp_path: Path) -> None:
    text = yaml.safe_dump(MINIMAL) + "limits:\nkv_cache:\nverify:\nparallel:\n"
    assert resolve(tmp_path, text) == resolve(tmp_path, MINIMAL)


def test_sequence_longer_than_the_model_is_refused(tmp_path: Path) -> None:
    content = changed({"limits": {"max_sequence_length": 129}})
    assert resolve(tmp_path, content, max_position=129).limits.max_sequence_length == 129
    with pytest.raises(RecipeError, match=r"limits.max_sequence_length: given 129; .* 128 pos"):
        resolve(tmp_path, content, max_position=128)


def test_block_longer_than_the_models_positions_is_refused(tmp_path: Path) -> None:
    content = changed({"kv_cache": {"block_size": 64}})
    assert resolve(tmp_path, content, max_position=64).kv_cache.block_size == 64
    with pytest.raises(RecipeError, match=r"kv_cache.block_size: given 64; .*length, 63"):
        resolve(tmp_path, content, max_position=63)


def test_one_level_and_a_list_of_one_are_the_same(tmp_path: Path) -> None:
    word, default, level, listed = (
        resolve(tmp_path, changed({"target": target}))
        for target in (
            {"kind": "cpu"},
            {"isa": "native"},
            {"kind": "cpu", "isa": "native"},
            {"kind": "cpu", "isa": ["native"]},
        )
    )
    assert word == default == level == listed == resolve(tmp_path, changed({"target": "cpu"}))


def test_number_with_an_exponent_needs_no_dot(tmp_path: Path) -> None:
    text = yaml.safe_dump(MINIMAL) + "verify: {tolerance: 1e-3}\n"
    assert resolve(tmp_path, text).verify.tolerance == 0.001


def test_overrides_are_applied_in_order(tmp_path: Path) -> None:
    resolved = resolve(
        tmp_path,
        MINIMAL,
        "precision=bf16",
        "limits.max_sequences=4",
        "limits.max_sequences=7",
        "buckets=[1, 7]",
        f"model.sha256={{model.safetensors: {HASH}}}",
        "verify.tolerance=5e-3",
    )
    assert resolved.precision == "bf16"
    assert resolved.limits.max_sequences == 7
    assert resolved.buckets == (1, 7)
    assert resolved.model.sha256 == {"model.safetensors": HASH}
    assert resolved.verify.tolerance == 0.005


def test_an_override_that_takes_back_what_an_earlier_one_gave_is_refused(tmp_path: Path) -> None:
    given = ("quantisation.rotation=true", "quantisation=w8a16")
    with pytest.raises(RecipeError, match=r"^--set quantisation=w8a16: it replaces all of quant"):
        resolve(tmp_path, MINIMAL, *given)
    found = resolve(tmp_path, MINIMAL, *reversed(given)).quantisation
    assert (found.scheme, found.rotation) == ("w8a16", True)


def test_override_below_a_target_of_one_word_keeps_the_word(tmp_path: Path) -> None:
    resolved = resolve(tmp_path, changed({"target": "cpu"}), "target.isa=x86-64-v3")
    assert (resolved.target.kind, resolved.target.isa) == ("cpu", ("x86-64-v3",))


def test_override_below_a_scheme_of_one_word_keeps_the_word(tmp_path: Path) -> None:
    content = changed({"quantisation": "w4a8"})
    found = resolve(tmp_path, content, "quantisation.group_size=32").quantisation
    assert (found.scheme, found.group_size, found.symmetric) == ("w4a8", 32, True)
    found = resolve(tmp_path, content, "quantisation=w8a16").quantisation
    assert (found.scheme, found.group_size) == ("w8a16", "row")


@pytest.mark.parametrize(
    ("override", "key", "words"),
    [
        ("limits.max_seqs=3", "limits.max_seqs", "nearest known key is limits.max_sequences"),
        ("precison=bf16", "precison", "nearest known key is precision"),
        ("limits.max_sequences=many", "limits.max_sequences", "given many; allowed: an integer"),
        ("limits.max_sequences.most=3", "limits.max_sequences", "given {most: 3}"),
        ("precision=", "precision", "given null; allowed: fp32 or bf16"),
    ],
)
def test_bad_override_is_refused_like_the_same_key_in_the_file(
    override: str, key: str, words: str, tmp_path: Path
) -> None:
    (line,) = problems(tmp_path, MINIMAL, override)
    assert line.startswith(f"{key}: ")
    assert words in line


def test_problem_of_an_override_names_the_override(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="--set precison=bf16:"):
        load_recipe(write(tmp_path, MINIMAL), ["precison=bf16"])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("precision", "KEY.PATH=VALUE"),
        ("=bf16", "KEY.PATH=VALUE"),
        ("limits..x=1", "KEY.PATH=VALUE"),
        ("buckets=[1", "line 1, column 3: bad YAML"),
    ],
)
def test_malformed_override_is_refused(override: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as refused:
        load_recipe(write(tmp_path, MINIMAL), [override])
    assert str(refused.value).startswith(f"--set {override}")
    assert words in str(refused.value)


@st.composite
def quantisations(draw: st.DrawFn) -> dict[str, Any]:
    """A scheme with either key of its grid given or not."""
    scheme = draw(st.sampled_from(SCHEMES[CPU]))
    grid = {
        "group_size": draw(st.sampled_from([32, 64, 96, 4096, "row"])),
        "symmetric": draw(st.booleans()),
    }
    grid["method"] = draw(st.sampled_from(["rtn", "gptq", "awq", "smoothquant"]))
    has_grid = scheme.startswith("w")
    keys = draw(st.sets(st.sampled_from(sorted(grid)))) if has_grid else set()
    return {"scheme": scheme} | {key: grid[key] for key in keys}


@st.composite
def recipes(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """A valid recipe with any of its keys given, and a model's positions."""
    max_position = draw(st.integers(1, 5000))
    length = draw(st.integers(1, max_position))
    step_tokens = draw(st.integers(1, 2000))
    sequences = draw(st.integers(1, step_tokens))
    buckets = {1, *draw(st.sets(st.integers(1, min(sequences, 64))))}
    optional: dict[str, Any] = {
        "target": draw(st.sampled_from(["cpu", {"kind": "cpu", "isa": ["x86-64-v4", "x86-64"]}])),
        "kv_cache": {
            "dtype": draw(st.sampled_from(["fp32", "bf16", "int8", "int8-static", "int4"])),
            "overrides": draw(st.sampled_from([[], [{"match": "*.k.*", "dtype": "int4"}]])),
            "block_size": draw(st.integers(1, min(256, length))),
        },
        "limits": {
            "max_sequence_length": length,
            "max_step_tokens": step_tokens,
            "max_sequences": sequences,
        },
        "quantisation": draw(quantisations()),
        "buckets": sorted(buckets),
        "calibration": {"data": "a.txt", "sequences": 3, "length": length, "seed": 7},
        "verify": {"tolerance": draw(st.floats(0, 1, exclude_min=True))},
    }
    given_keys = draw(st.sets(st.sampled_from(sorted(optional))))
    if given_keys & {"kv_cache", "buckets"}:
        given_keys.add("limits")
    model = {"source": "path:model", "sha256": draw(st.sampled_from([HASH, {"a.json": HASH}]))}
    precision = draw(st.sampled_from(["fp32", "bf16"]))
    content = {**MINIMAL, "model": model, "precision": precision}
    return content | {key: optional[key] for key in given_keys}, max_position


@given(recipes())
def test_effective_recipe_loads_and_resolves_to_itself(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[dict[str, Any], int]
) -> None:
    content, max_position = case
    folder = tmp_path_factory.getbasetemp()
    resolved = resolve(folder, content, max_position=max_position)
    printed = effective_yaml(resolved)
    assert resolve(folder, printed, max_position=max_position) == resolved
    written = yaml.safe_load(printed)
    for section, values in content.items():
        if section != "target":
            assert written[section] == values or written[section] == written[section] | values


def test_resolved_recipe_leaves_nothing_open(tmp_path: Path) -> None:
    resolved = resolve(tmp_path, changed({"quantisation": "w4a8"}))
    assert isinstance(resolved, ResolvedRecipe)
    open_keys = [
        key
        for key in known_keys(ResolvedRecipe)
        if key not in ("model.sha256", "plan", "target.capabilities")
        and not key.startswith(("gate", "distillation"))
        and _value(resolved, key) is None
    ]
    assert open_keys == []


def test_recipe_for_a_gpu_resolves_to_itself(tmp_path: Path) -> None:
    resolved = resolve(tmp_path, changed(RTX), "limits.max_sequence_length=70")
    assert resolved.target.isa is None
    assert resolved.target.capabilities == ("8.0", "8.6", "8.9", "12.0")
    assert (resolved.kv_cache.dtype, resolved.kv_cache.block_size) == ("fp16", 70)
    again = tmp_path / "again.yaml"
    again.write_text(effective_yaml(resolved))
    assert load_recipe(again).resolve(1000) == resolved


@pytest.mark.parametrize("part", [False, True])
def test_fp8_is_for_the_gpus_that_have_it(tmp_path: Path, part: bool) -> None:
    """Capabilities that aren't given are cut to those; a scale a row, and no method by default."""
    quantisation: Any = "fp8_w8a8"
    if part:
        overrides = [{"match": "*", "scheme": "fp8_w8a8", "method": "smoothquant"}]
        quantisation = {"scheme": "w8a16", "overrides": overrides}
    resolved = resolve(tmp_path, changed(RTX | {"quantisation": quantisation}))
    assert resolved.target.capabilities == ("8.9", "12.0")
    assert resolved.verify.tolerance == 0.4
    chosen = resolved.quantisation.overrides[0] if part else resolved.quantisation
    assert (chosen.group_size, chosen.symmetric) == ("row", True)
    assert chosen.method == ("smoothquant" if part else "rtn")
    again = tmp_path / "again.yaml"
    again.write_text(effective_yaml(resolved))
    assert load_recipe(again).resolve(4096) == resolved


def test_fp8_may_be_for_the_gpu_at_hand(tmp_path: Path) -> None:
    resolved = resolve(tmp_path, changed(TENSORRT | {"quantisation": "fp8_w8a8"}))
    assert resolved.target.capabilities == ("native",)
    assert resolved.verify.tolerance == 0.4


def test_a_kv_cache_of_tensorrt_may_be_fp8(tmp_path: Path) -> None:
    resolved = resolve(tmp_path, changed(TENSORRT | {"kv_cache": {"dtype": "fp8"}}))
    assert (resolved.kv_cache.dtype, resolved.verify.tolerance) == ("fp8", 0.2)


def test_recipe_for_the_gpu_at_hand_resolves_to_itself(tmp_path: Path) -> None:
    recipe = changed(TENSORRT | {"kv_cache": {"dtype": "int8"}})
    resolved = resolve(tmp_path, recipe, "limits.max_sequence_length=70")
    assert (resolved.target.isa, resolved.target.capabilities) == (None, ("native",))
    assert (resolved.kv_cache.dtype, resolved.kv_cache.block_size) == ("int8", 16)
    assert resolved.verify.tolerance == 0.05
    again = tmp_path / "again.yaml"
    again.write_text(effective_yaml(resolved))
    assert load_recipe(again).resolve(1000) == resolved


def test_recipe_is_frozen(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, MINIMAL))
    with pytest.raises(ValueError, match="frozen"):
        recipe.limits.max_step_tokens = 3


RECIPES = sorted(
    path.stem
    for path in (Path(__file__).parents[3] / "recipes").glob("*.yaml")
    if not path.stem.endswith(".plan")
)


@pytest.mark.parametrize("name", RECIPES)
def test_shipped_recipe_loads_under_its_own_name(name: str, checkout: Path) -> None:
    recipe = load_recipe(checkout / "recipes" / f"{name}.yaml")
    assert recipe.name == name
    precisions = {"fp32": "fp32", "rtx": "fp16", "tensorrt": "fp16"}
    assert recipe.resolve(131072).precision == precisions.get(name.split("-")[-1], "bf16")


def test_reference_has_a_row_for_every_key(checkout: Path) -> None:
    reference = (checkout / "docs" / "recipe.md").read_text()
    table = reference.partition("## Keys")[2].partition("\n## ")[0]
    rows = [line.split("|")[1].strip(" `") for line in table.splitlines() if "| `" in line[:3]]
    leaves = {key for key in known_keys(Recipe) if not any(_below(key))}
    assert sorted(rows) == sorted(leaves)


def _below(key: str) -> list[str]:
    return [other for other in known_keys(Recipe) if other.startswith(f"{key}.")]


def _value(record: Any, key: str) -> Any:
    for name in key.split("."):
        record = getattr(record, name)
    return record


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
