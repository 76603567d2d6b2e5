"""`path:` a model that is already here."""

from dataclasses import dataclass
from pathlib import Path

from llmbuild.builder.sources.progress import Progress
from llmbuild.builder.sources.verify import (
    Sha256,
    directory_hashes,
    directory_mismatches,
    file_hash,
    sha256_error,
)
from llmbuild.errors import SourceError


@dataclass(frozen=True)
class PathSource:
    """A directory or a file; relative to the recipe's folder."""

    path: str

    FORM = "path:DIRECTORY_OR_FILE"

    @classmethod
    def parse(cls, text: str) -> "PathSource | None":
        """The source that the text after `path:` names, None if it is malformed."""
        return cls(text) if text.strip() and "\0" not in text else None

    def __str__(self) -> str:
        return f"path:{self.path}"


def fetch_path(source: PathSource, sha256: Sha256, base_dir: Path, progress: Progress) -> Path:
    """The path itself, checked. SourceError if it isn't there or its hashes differ."""
    try:
        path = (base_dir / Path(source.path).expanduser()).absolute()
    except RuntimeError as error:  # ~name of no user, or no home
        raise SourceError(f"{source}: {error} Give the whole path.") from error
    if path.is_dir():
        mismatches = directory_mismatches(path, directory_hashes(source, sha256), progress)
    elif path.is_file():
        expected = file_hash(source, sha256)
        hashes = {path.name: expected} if expected else {}
        mismatches = directory_mismatches(path.parent, hashes, progress)
    elif path.exists():
        raise SourceError(f"{source}: {path} is neither a file nor a directory")
    else:
        raise SourceError(
            f"{source}: there is no {path} (a relative path starts at the recipe's folder)"
        )
    if mismatches:
        raise sha256_error(source, mismatches)
    return path
