"""Are the bytes of a model source the expected ones?"""

import difflib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmbuild.builder.sources.progress import Progress
from llmbuild.errors import SourceError

# A recipe's `sha256`: of one file, or by file name within a directory.
Sha256 = str | Mapping[str, str] | None

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Mismatch:
    """A file whose hash isn't the recipe's."""

    name: str
    expected: str
    found: str


def file_sha256(path: Path, progress: Progress) -> str:
    """SHA-256 of a file in hex, read a chunk at a time."""
    digest = hashlib.sha256()
    with (
        path.open("rb") as file,
        progress.task(f"checking sha256 of {path.name}", path.stat().st_size) as advance,
    ):
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            advance(len(chunk))
    return digest.hexdigest()


def file_hash(source: object, sha256: Sha256) -> str | None:
    """The hash of a source that is one file. SourceError if `sha256` is a directory's."""
    if isinstance(sha256, Mapping):
        raise SourceError(
            f"model.sha256: {source} is one file, so give one sha256, not a mapping of file names"
        )
    return sha256


def directory_hashes(source: object, sha256: Sha256) -> Mapping[str, str]:
    """The hashes of a source that is a directory. SourceError if `sha256` is one file's."""
    if isinstance(sha256, str):
        raise SourceError(
            f"model.sha256: {source} is a directory, so give a mapping of file name to sha256"
        )
    return sha256 or {}


def directory_mismatches(
    folder: Path, hashes: Mapping[str, str], progress: Progress
) -> list[Mismatch]:
    """The named files of `folder` whose hashes differ. SourceError if one isn't there."""
    found = []
    for name, expected in hashes.items():
        if not (folder / name).is_file():
            raise SourceError(
                f"model.sha256 names {name}, which {folder} doesn't hold"
                + nearest(name, [path.name for path in folder.iterdir()])
            )
        actual = file_sha256(folder / name, progress)
        if actual != expected:
            found.append(Mismatch(name, expected, actual))
    return found


def sha256_error(source: object, mismatches: Sequence[Mismatch]) -> SourceError:
    """The error for files that aren't what the recipe says."""
    lines = [f"{m.name}: expected sha256 {m.expected}, found {m.found}" for m in mismatches]
    return SourceError(
        f"{source} isn't what model.sha256 says\n  "
        + "\n  ".join(lines)
        + "\n  correct model.sha256 if you trust these files"
    )


def nearest(name: str, names: Sequence[str]) -> str:
    """The names most like `name`, as the end of an error message; empty if there are none."""
    close = difflib.get_close_matches(name, names, n=3, cutoff=0)
    return f"; nearest: {', '.join(close)}" if close else ""
