"""An engine is published whole or not at all, whatever ends the process that writes it."""

import fcntl
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from manifests import whole_rank

from llmbuild.builder import artifact
from llmbuild.builder.artifact import EngineWriter, check_output, is_engine, seal_engine
from llmbuild.errors import BuildError, EngineError, InternalError
from llmbuild.runtime.engine import check_files
from llmbuild.runtime.manifest import (
    ALONE,
    SCHEMA_VERSION,
    KVLayer,
    KVLayout,
    Limits,
    Manifest,
    read_manifest,
)
from llmbuild.runtime.target import CpuTarget

LEVEL = "x86-64-v4"


def manifest(name: str) -> Manifest:
    """What a build knows before it publishes: files and digest are left out."""
    kv = KVLayout(
        block_size=4,
        num_kv_heads=1,
        head_dim=2,
        layers=[KVLayer.of_heads([("fp32", "fp32")])],
    )
    return Manifest(
        schema_version=SCHEMA_VERSION,
        llmbuild_version="0.1.0",
        name=name,
        model={"num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 2, "vocab_size": 3},
        vocab_size=3,
        precision="fp32",
        quantised={},
        target=CpuTarget(
            machine=platform.machine(),
            isa_levels=[LEVEL],
            compiler="g++ 12.2.0",
            compiler_flags={LEVEL: []},
        ),
        limits=Limits(max_sequence_length=5, max_step_tokens=5, max_sequences=1),
        buckets=[1],
        kv=kv,
        parallel=ALONE,
        ranks=[
            whole_rank(kv, 3, executables={LEVEL: "rank0/engine.so"}, weights="rank0/w"),
        ],
        files={},
    )


def write_files(root: Path, name: str) -> None:
    (root / "rank0").mkdir()
    (root / "rank0" / "engine.so").write_text(f"code of {name}")
    (root / "rank0" / "w").write_bytes(name.encode() * 1000)
    (root / "tokenizer.json").write_text("{}")
    (root / "generation_config.json").write_text("{}")


def build(out: Path, name: str, last: Callable[[Path], object] = Path.exists) -> None:
    """Publishes an engine; `last` is called with its staged root before that."""
    with EngineWriter(out) as writer:
        write_files(writer.root, name)
        last(writer.root)
        writer.publish(manifest(name))


def published(out: Path) -> str:
    """The name of the engine at `out`, all of whose files are checked."""
    found = read_manifest(out)
    check_files(out, found)
    assert (out / "rank0" / "engine.so").read_text() == f"code of {found.name}"
    return found.name


def test_a_published_engine_is_whole_and_stands_alone(tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder" / "engine"
    build(out, "one")
    assert published(out) == "one"
    assert os.listdir(out.parent) == ["engine"]
    assert out.stat().st_mode & 0o777 == out.parent.stat().st_mode & 0o777


def test_nothing_is_visible_before_publishing(tmp_path: Path) -> None:
    out = tmp_path / "engine"
    with EngineWriter(out) as writer:
        write_files(writer.root, "one")
        assert not out.exists()
        assert all(name.startswith(".") for name in os.listdir(tmp_path))
    assert os.listdir(tmp_path) == []


def test_a_sealed_engine_is_whole_where_it_stands_and_may_still_change(tmp_path: Path) -> None:
    with EngineWriter(tmp_path / "engine") as writer:
        write_files(writer.root, "one")
        assert seal_engine(writer.root, manifest("one")) == read_manifest(writer.root)
        assert published(writer.root) == "one"
        assert not writer.out.exists()
        (writer.root / "report.json").write_text("{}")
        writer.publish(manifest("one"))
    assert published(tmp_path / "engine") == "one"
    assert "report.json" in read_manifest(tmp_path / "engine").files
    assert os.listdir(tmp_path) == ["engine"]


@pytest.mark.parametrize("fails", [False, True])
def test_an_engine_beside_the_staged_one_goes_with_the_staging_directory(
    tmp_path: Path, fails: bool
) -> None:
    with suppress(ValueError), EngineWriter(tmp_path / "engine") as writer:
        write_files(writer.root, "one")
        build(writer.reference, "two")
        assert published(writer.reference) == "two"
        if fails:
            raise ValueError
        writer.publish(manifest("one"))
    assert os.listdir(tmp_path) == ([] if fails else ["engine"])


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("before", [[], ["one"]])
def test_an_exception_leaves_what_was_there(
    tmp_path: Path, error: type[BaseException], before: list[str]
) -> None:
    def fail(root: Path) -> None:
        raise error

    for name in before:
        build(tmp_path / "engine", name)
    with pytest.raises(error):
        build(tmp_path / "engine", "two", last=fail)
    assert [published(tmp_path / entry) for entry in os.listdir(tmp_path)] == before


@pytest.mark.parametrize("lost", ["rank0/engine.so", "rank0/w", "tokenizer.json"])
def test_an_incomplete_engine_is_not_published(tmp_path: Path, lost: str) -> None:
    with pytest.raises(InternalError, match=lost):
        build(tmp_path / "engine", "one", last=lambda root: (root / lost).unlink())
    assert os.listdir(tmp_path) == []


def test_an_engine_for_a_level_that_is_not_here_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmbuild.runtime.isa.processor_flags", lambda cpuinfo: frozenset())
    build(tmp_path / "engine", "one")
    assert published(tmp_path / "engine") == "one"


def test_an_engine_is_replaced(tmp_path: Path) -> None:
    build(tmp_path / "engine", "one")
    (tmp_path / "engine" / "stray").touch()
    build(tmp_path / "engine", "two")
    assert published(tmp_path / "engine") == "two"
    assert os.listdir(tmp_path) == ["engine"]


def test_an_engine_of_another_schema_version_is_replaced(tmp_path: Path) -> None:
    build(tmp_path / "engine", "one")
    path = tmp_path / "engine" / "manifest.json"
    path.write_text(
        path.read_text().replace(f'"schema_version": {SCHEMA_VERSION}', '"schema_version": 9')
    )
    with pytest.raises(EngineError):
        read_manifest(tmp_path / "engine")
    build(tmp_path / "engine", "two")
    assert published(tmp_path / "engine") == "two"


def test_an_empty_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    build(tmp_path / "engine", "one")
    assert published(tmp_path / "engine") == "one"


def test_a_link_stays_and_what_it_names_is_replaced(tmp_path: Path) -> None:
    build(tmp_path / "store" / "engine", "one")
    (tmp_path / "current").symlink_to(tmp_path / "store" / "engine")
    build(tmp_path / "current", "two")
    assert (tmp_path / "current").is_symlink()
    assert published(tmp_path / "store" / "engine") == "two"


def test_a_relative_path_means_the_folder_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    with EngineWriter(Path("engine")) as writer:
        write_files(writer.root, "one")
        monkeypatch.chdir(tmp_path / "other")
        writer.publish(manifest("one"))
    assert published(tmp_path / "engine") == "one"


@pytest.mark.parametrize("kind", ["file", "folder", "folder with a manifest of something else"])
def test_what_is_no_engine_is_never_replaced(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    kept = out if kind == "file" else out / "manifest.json"
    if kind == "folder":
        kept = out / "thesis.txt"
    kept.parent.mkdir(exist_ok=True)
    kept.write_text('{"name": "a web page"}')
    assert not is_engine(out)
    with pytest.raises(BuildError, match="remove it, or give another path"):
        check_output(out)
    with pytest.raises(BuildError, match="remove it, or give another path"):
        build(out, "one")
    assert kept.read_text() == '{"name": "a web page"}'
    assert os.listdir(tmp_path) == ["out"]


def test_a_folder_that_comes_to_be_in_the_way_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def appear(root: Path) -> None:
        out.mkdir()
        (out / "thesis.txt").touch()

    with pytest.raises(BuildError, match="isn't an engine"):
        build(out, "one", last=appear)
    assert os.listdir(out) == ["thesis.txt"]
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("place", ["file/engine", "file/folder/engine", "x" * 250, "y" * 300])
def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BuildError, match="output path"):
        build(tmp_path / place, "one")
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_system_that_cannot_exchange_is_told_before_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(a: Path, b: Path) -> None:
        raise OSError(22, "Invalid argument")

    build(tmp_path / "engine", "one")
    monkeypatch.setattr(artifact, "_exchange", refuse)
    with pytest.raises(BuildError, match="remove it first"), EngineWriter(tmp_path / "engine"):
        pytest.fail("the build was begun")
    assert os.listdir(tmp_path) == ["engine"]


def test_a_full_disk_is_the_users_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(artifact, "_sync", refuse)
    with pytest.raises(BuildError, match="No space left"):
        build(tmp_path / "engine", "one")
    assert os.listdir(tmp_path) == []


# Builds engine after engine, in the folders 0, 1, ... of one given. Each build is a process of its
# own, killed before as many operations on the file system as its folder says, by the count of the
# interpreter's audit events. Ends with the first build that isn't killed.
KILLED_BUILDS = """
import importlib.util, itertools, os, signal, sys
from pathlib import Path

sys.path.append(str(Path(sys.argv[1]).parents[1]))
spec = importlib.util.spec_from_file_location("test_artifact", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
folder, before = Path(sys.argv[2]), sys.argv[3]
TOUCHING = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir",
            "fcntl.flock", "ctypes.dlsym"}

def count_down(event, arguments):
    global left
    if event in TOUCHING:
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

for moment in itertools.count():
    out = folder / str(moment) / "engine"
    if before:
        module.build(out, before)
    child = os.fork()
    if child == 0:
        left = moment
        sys.addaudithook(count_down)
        module.build(out, "two")
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != -signal.SIGKILL:
        sys.exit(status)
"""


@pytest.mark.parametrize("before", ["", "one"])
def test_a_build_killed_at_any_moment_leaves_no_half_engine(tmp_path: Path, before: str) -> None:
    subprocess.run(
        [sys.executable, "-c", KILLED_BUILDS, __file__, str(tmp_path), before],
        check=True,
        timeout=60,
    )
    moments = len(os.listdir(tmp_path))
    assert moments > 30
    seen = set()
    for moment in range(moments):
        out = tmp_path / str(moment) / "engine"
        out.parent.mkdir(exist_ok=True)
        seen.add(published(out) if out.exists() else "")
        others = {*os.listdir(out.parent)} - {"engine"}
        assert all(name.startswith(".engine.staging-") for name in others)
        build(out, "three")
        assert published(out) == "three"
        assert os.listdir(out.parent) == ["engine"]
    assert seen == {before, "two"}


def test_staging_of_a_live_build_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "engine"
    with EngineWriter(out) as first:
        write_files(first.root, "one")
        build(out, "two")
        assert published(out) == "two"
        first.publish(manifest("one"))
    assert published(out) == "one"
    assert os.listdir(tmp_path) == ["engine"]


def test_what_only_looks_like_staging_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / ".engine.staging-mine").mkdir()
    (tmp_path / ".engine.staging-mine" / "notes").touch()
    (tmp_path / ".engine.staging-file").touch()
    (tmp_path / ".other.staging-12345678").mkdir()
    build(tmp_path / "engine", "one")
    assert sorted(os.listdir(tmp_path)) == [
        ".engine.staging-file",
        ".engine.staging-mine",
        ".other.staging-12345678",
        "engine",
    ]


@pytest.fixture
def before_locking(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """What a rival does between the moment a lock file is opened and that it is locked, a call
    for each lock."""
    rival: list[Callable[[], None]] = []

    def lock(descriptor: int, operation: int) -> None:
        if rival:
            rival.pop()()
        fcntl.flock(descriptor, operation)

    monkeypatch.setattr(artifact, "fcntl", SimpleNamespace(**vars(fcntl) | {"flock": lock}))
    return rival


def test_staging_that_a_rival_takes_for_stale_is_made_again(
    tmp_path: Path, before_locking: list[Callable[[], None]]
) -> None:
    before_locking.append(lambda: artifact._remove_stale(tmp_path / "engine"))
    build(tmp_path / "engine", "one")
    assert before_locking == []
    assert published(tmp_path / "engine") == "one"
    assert os.listdir(tmp_path) == ["engine"]


def test_a_leftover_may_be_removed_by_two_builds_at_once(
    tmp_path: Path, before_locking: list[Callable[[], None]]
) -> None:
    leftover = tmp_path / ".engine.staging-12345678"
    (leftover / "engine").mkdir(parents=True)
    (leftover / "lock").touch()
    before_locking.append(lambda: artifact._remove_stale(tmp_path / "engine"))
    build(tmp_path / "engine", "one")
    assert before_locking == []
    assert os.listdir(tmp_path) == ["engine"]


def test_builds_to_one_path_at_once_all_succeed(tmp_path: Path) -> None:
    out, workers = tmp_path / "engine", 4
    barrier = threading.Barrier(workers)

    def work(worker: int) -> None:
        for turn in range(12):
            barrier.wait(10)
            build(out, f"{worker}.{turn}")

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, range(workers)))
    assert published(out).endswith(".11")
    assert os.listdir(tmp_path) == ["engine"]


def test_a_reader_sees_an_engine_at_every_moment_of_replacing_it(tmp_path: Path) -> None:
    out = tmp_path / "engine"
    build(out, "0")
    done, names, failures = threading.Event(), set(), []

    def poll() -> None:
        while not done.is_set():
            try:
                names.add(read_manifest(out).name)
            except EngineError as error:
                failures.append(error)

    reader = threading.Thread(target=poll)
    reader.start()
    for turn in range(1, 41):
        build(out, str(turn))
    done.set()
    reader.join()
    assert failures == []
    assert len(names) > 5
