"""The cache of fetched files: a file is trusted only with a record that fits it."""

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from llmbuild.builder.sources.progress import Progress
from llmbuild.builder.sources.verify import file_sha256


@dataclass(frozen=True)
class StoredFile:
    """One file of a cache folder, with its record and what is in the making.

    Below `folder`: files/ holds the files, records/ their sizes and hashes, partial/ what isn't
    finished. Callers hold `lock_path` while they look or change.
    """

    folder: Path
    name: str  # relative path

    @property
    def path(self) -> Path:
        return self.folder / "files" / self.name

    @property
    def record_path(self) -> Path:
        return self.folder / "records" / f"{self.name}.json"

    @property
    def partial_dir(self) -> Path:
        return self.folder / "partial"

    @property
    def lock_path(self) -> Path:
        return self.folder / "lock"

    def is_intact(self, expected: str | None, progress: Progress) -> bool:
        """Whether the file has its record's size and, where a hash is expected, that hash."""
        try:
            recorded = json.loads(self.record_path.read_bytes())
            intact = self.path.stat().st_size == recorded["size_bytes"]
        except (FileNotFoundError, ValueError, TypeError, KeyError, RecursionError):
            return False
        return intact and (expected is None or file_sha256(self.path, progress) == expected)

    def publish(self, finished: Path, sha256: str) -> None:
        """Move a finished and checked file of `partial_dir` to its place, then record it."""
        record = {"size_bytes": finished.stat().st_size, "sha256": sha256}
        new_record = self.partial_dir / "record.json"
        new_record.write_text(json.dumps(record) + "\n")
        for source, target in ((finished, self.path), (new_record, self.record_path)):
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(source, target)

    def discard(self) -> None:
        """Remove the record, then the file."""
        for path in (self.record_path, self.path):
            with suppress(FileNotFoundError):
                path.unlink()
