"""Engines that open, and every kind that is refused before it is loaded; `llmbuild inspect`."""

import hashlib
import json
import os
import platform
import re
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from llmbuild.errors import EngineError
from llmbuild.runtime import engine as engine_module
from llmbuild.runtime import verified
from llmbuild.runtime.engine import Engine, open_engine, opening_engine, sha256
from llmbuild.runtime.inspect_cli import inspect
from llmbuild.runtime.isa import LEVELS
from llmbuild.runtime.manifest import SCHEMA_VERSION, Manifest, encode, seal

LEVEL_NAMES = ["x86-64-v4", "x86-64-v3", "x86-64"]
EXECUTABLES = {level: f"rank0/engine-{level}.so" for level in LEVEL_NAMES}
CONTENTS = {
    **{name: f"code of {level}".encode() * 7 for level, name in EXECUTABLES.items()},
    "rank0/weights.safetensors": bytes(range(256)) * 2053,
    "tokenizer.json": b'{"model": {}}',
    "generation_config.json": b"{}",
    "graph/step.onnx": b"\x08",
}
BASE = LEVELS["x86-64"].flags
V3 = LEVELS["x86-64-v3"].flags
V4 = LEVELS["x86-64-v4"].flags


@pytest.fixture(autouse=True)
def on_x86(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")


@pytest.fixture
def cpuinfo(tmp_path: Path) -> Path:
    """The description of a processor with AVX2 and no AVX-512."""
    return write_cpuinfo(tmp_path, V3)


def write_cpuinfo(folder: Path, flags: frozenset[str]) -> Path:
    path = folder / "cpuinfo"
    path.write_text(f"processor\t: 0\nflags\t\t: {' '.join(sorted(flags))}\n")
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A whole engine, but for its contents, which nothing here loads."""
    root = tmp_path / "engine"
    for name, data in CONTENTS.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    write_manifest(root)
    return root


def write_manifest(root: Path, **changes: Any) -> None:
    """Writes the manifest of CONTENTS, sealed, with some of its fields changed."""
    value: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "llmbuild_version": "0.0.7",
        "name": "tiny",
        "model": {
            "family": "llama",
            "num_layers": 3,
            "num_heads": 6,
            "num_kv_heads": 2,
            "head_dim": 14,
            "hidden_size": 120,
            "vocab_size": 97,
        },
        "vocab_size": 97,
        "precision": "bf16",
        "quantised": {},
        "target": target(LEVEL_NAMES),
        "limits": {"max_sequence_length": 101, "max_step_tokens": 64, "max_sequences": 5},
        "buckets": [1, 2, 4],
        "kv": {
            "block_size": 16,
            "num_kv_heads": 2,
            "head_dim": 14,
            "layers": [{"heads": [{"num_heads": 2, "k_dtype": "bf16", "v_dtype": "bf16"}]}] * 3,
        },
        "parallel": {"tp": 1, "pp": 1},
        "ranks": ranks(LEVEL_NAMES),
        "files": {
            name: {"sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data)}
            for name, data in CONTENTS.items()
        },
    }
    manifest = msgspec.convert(value | changes, Manifest)
    (root / "manifest.json").write_bytes(encode(seal(manifest)))


def target(levels: list[str], machine: str = "x86_64") -> dict[str, Any]:
    return {
        "kind": "cpu",
        "machine": machine,
        "isa_levels": levels,
        "compiler": "g++ 12.2.0",
        "compiler_flags": {level: ["-O3"] for level in levels},
    }


def ranks(levels: list[str]) -> list[dict[str, Any]]:
    code = {level: EXECUTABLES.get(level, "rank0/engine-x86-64.so") for level in levels}
    return [
        {
            "stage": 0,
            "tp_rank": 0,
            "layers": {"first": 0, "count": 3},
            "heads": {"first": 0, "count": 6},
            "kv_heads": {"first": 0, "count": 2},
            "tokens": {"first": 0, "count": 97},
            "executables": code,
            "weights": "rank0/weights.safetensors",
            "shared_weights": None,
            "arena_bytes": 4096,
        }
    ]


def ranks_of_two_stages(levels: list[str]) -> list[dict[str, Any]]:
    """Two ranks with 4 and 2 heads in each stage, of 2 layers and 1; each stage's have one table
    in common."""
    [whole] = ranks(levels)
    heads = [({"first": 0, "count": 4}, {"first": 0, "count": 2}, {"first": 0, "count": 49})]
    heads += [({"first": 4, "count": 2}, {"first": 1, "count": 1}, {"first": 49, "count": 48})]
    return [
        whole
        | {
            "stage": stage,
            "tp_rank": tp_rank,
            "layers": layers,
            "shared_weights": "graph/step.onnx",
        }
        | dict(zip(("heads", "kv_heads", "tokens"), heads[tp_rank], strict=True))
        for stage, layers in enumerate(({"first": 0, "count": 2}, {"first": 2, "count": 1}))
        for tp_rank in range(2)
    ]


def refusal(root: Path, cpuinfo: Path) -> str:
    with pytest.raises(EngineError) as caught:
        open_engine(root, cpuinfo)
    return str(caught.value)


@pytest.mark.parametrize(
    ("flags", "level"), [(V4, "x86-64-v4"), (V3, "x86-64-v3"), (BASE, "x86-64")]
)
def test_the_best_level_that_the_processor_has_is_chosen(
    root: Path, tmp_path: Path, flags: frozenset[str], level: str
) -> None:
    engine = open_engine(root, write_cpuinfo(tmp_path, flags))
    assert isinstance(engine, Engine)
    assert (engine.root, engine.variant, engine.manifest.name) == (root, level, "tiny")


def test_an_engine_opens_through_a_link_to_it(root: Path, cpuinfo: Path) -> None:
    link = root.parent / "current"
    link.symlink_to(root)
    assert open_engine(link, cpuinfo).variant == "x86-64-v3"


def test_an_engine_of_another_llmbuild_version_opens(root: Path, cpuinfo: Path) -> None:
    write_manifest(root, llmbuild_version="97.3.1")
    assert open_engine(root, cpuinfo).manifest.llmbuild_version == "97.3.1"


@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", [*CONTENTS, "manifest.json"])
def test_a_flipped_byte_in_any_file_is_refused(
    root: Path, cpuinfo: Path, name: str, place: float
) -> None:
    data = bytearray((root / name).read_bytes())
    data[round(place * (len(data) - 1))] ^= 0x01
    (root / name).write_bytes(data)
    text = refusal(root, cpuinfo)
    assert name in text
    if name != "manifest.json":
        assert hashlib.sha256(data).hexdigest() in text
        assert hashlib.sha256(CONTENTS[name]).hexdigest() in text


@pytest.mark.parametrize("name", [*CONTENTS, "manifest.json"])
def test_a_file_of_another_length_is_refused(root: Path, cpuinfo: Path, name: str) -> None:
    with (root / name).open("ab") as file:
        file.write(b" ")
    text = refusal(root, cpuinfo)
    assert name in text
    if name != "manifest.json":
        assert f"{len(CONTENTS[name]) + 1} bytes" in text
        assert f"says {len(CONTENTS[name])}" in text


@pytest.mark.parametrize("name", [*CONTENTS, "manifest.json"])
def test_a_missing_file_is_named(root: Path, cpuinfo: Path, name: str) -> None:
    (root / name).unlink()
    assert name in refusal(root, cpuinfo)


def test_all_altered_files_are_named(root: Path, cpuinfo: Path) -> None:
    for name in ("tokenizer.json", "rank0/weights.safetensors"):
        data = (root / name).read_bytes()
        (root / name).write_bytes(data[::-1])
    text = refusal(root, cpuinfo)
    assert "tokenizer.json" in text
    assert "rank0/weights.safetensors" in text
    assert "graph/step.onnx" not in text


@pytest.mark.parametrize("name", ["extra.so", "rank0/.hidden", "new/folder/file"])
def test_a_file_that_the_manifest_does_not_list_is_named(
    root: Path, cpuinfo: Path, name: str
) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).touch()
    assert f"{name!r}: not in the manifest" in refusal(root, cpuinfo)


def test_a_name_that_is_not_text_is_refused_readably(root: Path, cpuinfo: Path) -> None:
    (root / os.fsdecode(b"odd\xff")).touch()
    assert "odd" in refusal(root, cpuinfo).encode().decode()


@pytest.mark.parametrize("name", ["rank0/weights.safetensors", "manifest.json"])
def test_a_link_in_place_of_a_file_is_refused(root: Path, cpuinfo: Path, name: str) -> None:
    (root / name).rename(root.parent / "elsewhere")
    (root / name).symlink_to(root.parent / "elsewhere")
    assert f"{name!r}: a link" in refusal(root, cpuinfo)


def test_a_link_in_place_of_a_folder_is_refused(root: Path, cpuinfo: Path) -> None:
    (root / "rank0").rename(root.parent / "elsewhere")
    (root / "rank0").symlink_to(root.parent / "elsewhere")
    assert "'rank0': a link" in refusal(root, cpuinfo)


def test_a_pipe_is_refused_without_waiting_for_it(root: Path, cpuinfo: Path) -> None:
    (root / "tokenizer.json").unlink()
    os.mkfifo(root / "tokenizer.json")
    assert "'tokenizer.json': a link or device" in refusal(root, cpuinfo)


@pytest.mark.parametrize("name", ["../cpuinfo", "/etc/hostname", "a/../tokenizer.json", "./x", ""])
def test_a_path_that_leaves_the_engine_is_refused(root: Path, cpuinfo: Path, name: str) -> None:
    files = json.loads((root / "manifest.json").read_bytes())["files"]
    write_manifest(root, files=files | {name: files["tokenizer.json"]})
    assert f"{name!r} isn't a path inside the engine" in refusal(root, cpuinfo)


def test_another_target_is_refused(root: Path, cpuinfo: Path) -> None:
    path = root / "manifest.json"
    path.write_text(path.read_text().replace('"kind": "cpu"', '"kind": "tpu"'))
    assert "for target 'tpu', and this runtime runs 'cpu', 'tensorrt', 'tensorrt-rtx'" in refusal(
        root, cpuinfo
    )


def test_another_machine_is_refused(root: Path, cpuinfo: Path) -> None:
    write_manifest(root, target=target(LEVEL_NAMES, machine="aarch64"))
    text = refusal(root, cpuinfo)
    assert "'aarch64'" in text
    assert "'x86_64'" in text


def test_a_processor_without_the_levels_is_told_what_it_lacks(root: Path, tmp_path: Path) -> None:
    levels = LEVEL_NAMES[:2]
    write_manifest(root, target=target(levels), ranks=ranks(levels))
    text = refusal(root, write_cpuinfo(tmp_path, V3 - {"f16c"}))
    assert "x86-64-v4 needs avx512bw, avx512cd, avx512dq, avx512f, avx512vl, f16c" in text
    assert "x86-64-v3 needs f16c" in text


def test_a_level_of_the_future_is_refused_by_name(root: Path, cpuinfo: Path) -> None:
    write_manifest(root, target=target(["x86-64-v9"]), ranks=ranks(["x86-64-v9"]))
    assert "x86-64-v9 isn't known to this runtime" in refusal(root, cpuinfo)


def test_an_engine_of_several_ranks_opens(root: Path, cpuinfo: Path) -> None:
    write_manifest(root, parallel={"tp": 2, "pp": 2}, ranks=ranks_of_two_stages(LEVEL_NAMES))
    assert len(open_engine(root, cpuinfo).manifest.ranks) == 4


def test_the_processor_is_asked_before_the_files_are_read(root: Path, tmp_path: Path) -> None:
    (root / "rank0/weights.safetensors").unlink()
    assert "ISA levels" in refusal(root, write_cpuinfo(tmp_path, frozenset()))


@pytest.fixture
def read_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The names of the files whose contents are read; every file counts as settled."""
    names: list[str] = []

    def noted(path: Path) -> str:
        names.append(path.name)
        return sha256(path)

    monkeypatch.setattr(engine_module, "sha256", noted)
    monkeypatch.setattr(verified, "SETTLED_NS", 0)
    monkeypatch.setenv("LLMBUILD_CACHE", str(tmp_path / "cache"))
    return names


def test_quick_open_reads_every_file_the_first_time_and_none_the_second(
    root: Path, cpuinfo: Path, read_files: list[str]
) -> None:
    with opening_engine(root, cpuinfo) as engine:
        assert engine.variant == "x86-64-v3"
    assert sorted(read_files) == sorted(Path(name).name for name in CONTENTS)
    read_files.clear()
    with opening_engine(root, cpuinfo):
        pass
    assert read_files == []


def test_thorough_open_reads_every_file_each_time(
    root: Path, cpuinfo: Path, read_files: list[str]
) -> None:
    for _ in range(2):
        with opening_engine(root, cpuinfo):
            pass
        read_files.clear()
        open_engine(root, cpuinfo)
        assert len(read_files) == len(CONTENTS)


@pytest.mark.parametrize("how", ["written", "replaced"])
@pytest.mark.parametrize("name", CONTENTS)
def test_quick_open_notices_a_changed_file_of_the_same_size_and_time(
    root: Path, cpuinfo: Path, read_files: list[str], name: str, how: str
) -> None:
    with opening_engine(root, cpuinfo):
        pass
    path, stat = root / name, (root / name).stat()
    time.sleep(0.02)  # past the tick of the system's clock
    altered = bytes(len(CONTENTS[name]) - 1) + b"x"
    if how == "written":
        path.write_bytes(altered)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    else:
        other = root.parent / "other"
        other.write_bytes(altered)
        os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        other.replace(path)
    assert path.stat().st_mtime_ns == stat.st_mtime_ns
    with pytest.raises(EngineError, match=f"{name}: sha256"), opening_engine(root, cpuinfo):
        pass
    assert len(read_files) == 2 * len(CONTENTS)


def test_engine_that_has_just_been_written_is_not_remembered(
    root: Path, cpuinfo: Path, read_files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verified, "SETTLED_NS", 10**12)
    for _ in range(2):
        with opening_engine(root, cpuinfo):
            pass
    assert len(read_files) == 2 * len(CONTENTS)


def test_cache_that_cannot_be_written_only_costs_the_reading(
    root: Path, cpuinfo: Path, read_files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMBUILD_CACHE", "/proc/self/nothing")
    for _ in range(2):
        with opening_engine(root, cpuinfo):
            pass
    assert len(read_files) == 2 * len(CONTENTS)


def test_an_altered_file_counts_for_more_than_what_it_led_to(
    root: Path, cpuinfo: Path, read_files: list[str]
) -> None:
    (root / "tokenizer.json").write_bytes(b'{"model": []}')
    with (
        pytest.raises(EngineError, match=r"tokenizer\.json: sha256"),
        opening_engine(root, cpuinfo),
    ):
        raise KeyError("a tokenizer without its words")


def test_markers_do_not_grow_without_end(
    root: Path, cpuinfo: Path, read_files: list[str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(verified, "MAX_MARKERS", 3)
    for index in range(5):
        os.utime(root / "tokenizer.json", ns=(index, index))
        with opening_engine(root, cpuinfo):
            pass
    assert len(list((tmp_path / "cache" / "verified").iterdir())) == 3
    read_files.clear()
    with opening_engine(root, cpuinfo):
        pass
    assert read_files == []


def run_inspect(*arguments: str) -> str:
    result = CliRunner().invoke(inspect, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_inspect_derives_what_a_token_costs(root: Path) -> None:
    told = json.loads(run_inspect(str(root), "--json", "--context", "53"))
    assert told["name"] == "tiny"
    assert told["files"]["tokenizer.json"]["size_bytes"] == 13
    kv_bytes_per_token = 3 * 2 * (2 * 14 * 2)  # layers, K and V, heads x head_dim x bf16
    derived = told["derived"]
    assert derived["kv_bytes_per_token"] == kv_bytes_per_token
    assert derived["kv_bytes_per_block"] == 16 * kv_bytes_per_token
    assert derived["weights_bytes"] == 256 * 2053
    assert derived["decode_bytes_per_token"] == 256 * 2053 + 53 * kv_bytes_per_token
    assert derived["total_bytes"] == sum(map(len, CONTENTS.values()))


def test_inspect_prints_every_file_and_size(root: Path) -> None:
    told = run_inspect(str(root))
    for name, data in CONTENTS.items():
        assert any(name in line and f"{len(data):,} bytes" in line for line in told.splitlines())
    assert "llama, 3 layers, 6 heads, 2 KV heads, head_dim 14, hidden 120, vocab 97" in told


def test_inspect_counts_layers_by_what_they_keep_of_keys_and_values(root: Path) -> None:
    assert "K bf16, V bf16 in 3 layers" in run_inspect(str(root))
    run = {"num_heads": 1, "k_dtype": "int8", "v_dtype": "int4"}
    mixed = {"heads": [run, run | {"v_dtype": "fp32"}]}
    kv = {"block_size": 16, "num_kv_heads": 2, "head_dim": 14}
    write_manifest(root, kv=kv | {"layers": [{"heads": [run | {"num_heads": 2}]}, mixed, mixed]})
    told = run_inspect(str(root))
    plan = "K int8, V int4 in 1 layers; K int8, V int4 (1 heads) and fp32 (1 heads) in 2 layers"
    assert plan in told
    derived = json.loads(run_inspect(str(root), "--json"))["derived"]
    key, int4, fp32 = 14 + 4, 7 + 4, 14 * 4
    assert derived["kv_bytes_per_token"] == 2 * (key + int4) + 2 * (2 * key + int4 + fp32)


def test_inspect_tells_what_each_rank_has_and_sums_it_up(root: Path) -> None:
    assert "ranks" not in run_inspect(str(root)).splitlines()
    write_manifest(root, parallel={"tp": 2, "pp": 2}, ranks=ranks_of_two_stages(LEVEL_NAMES))
    told = run_inspect(str(root))
    lines = told.splitlines()
    [title, *rows] = lines[lines.index("ranks") + 1 : lines.index("files")]
    assert "2 stages of 2 ranks" in told
    weights = f"{256 * 2053 + 1:,} bytes"  # the file of its own and the common one
    spans = [("0-1", "0-3", "0-1", "0-48"), ("0-1", "4-5", "1-1", "49-96")]
    spans += [("2-2", "0-3", "0-1", "0-48"), ("2-2", "4-5", "1-1", "49-96")]
    kv_bytes = [layers * heads * 16 * 14 * 2 * 2 for layers in (2, 1) for heads in (2, 1)]
    for rank, (row, own, kv) in enumerate(zip(rows, spans, kv_bytes, strict=False)):
        cells = re.split(r"  +", row.strip())
        assert cells == [str(rank), str(rank // 2), *own, weights, "4,096 bytes", f"{kv:,} bytes"]
    # Here all have one file and share another.
    assert re.split(r"  +", rows[-1].strip()) == [
        *("all", weights, "16,384 bytes", f"{sum(kv_bytes):,} bytes")
    ]
    names = ["rank", "stage", "layers", "query heads", "KV heads", "tokens", "weights", "arena"]
    assert re.split(r"  +", title.strip()) == [*names, "KV of 16 tokens"]
    derived = json.loads(run_inspect(str(root), "--json"))["derived"]
    assert derived["weights_bytes"] == 256 * 2053 + 1
    assert derived["kv_bytes_per_block"] == sum(kv_bytes)
    assert derived["arena_bytes"] == 4 * 4096


def test_inspect_shows_an_engine_for_another_machine(root: Path) -> None:
    write_manifest(root, target=target(LEVEL_NAMES, machine="aarch64"))
    assert "no: the engine is for machine 'aarch64'" in run_inspect(str(root))
    derived = json.loads(run_inspect(str(root), "--json"))["derived"]
    assert (derived["runs_here"], derived["variant"]) == (False, None)


def test_inspect_refuses_an_altered_engine(root: Path) -> None:
    (root / "tokenizer.json").write_bytes(b'{"model": []}')
    with pytest.raises(EngineError, match=r"tokenizer\.json: sha256"):
        run_inspect(str(root))


def test_inspect_refuses_a_context_beyond_the_limit(root: Path) -> None:
    with pytest.raises(EngineError, match=r"context of 102 tokens .* limit is 101"):
        run_inspect(str(root), "--context", "102")
