"""Remembers engines whose files were verified, so that the next load needn't read them again.

An engine's marker is an empty file, named by all that a file can't change without: its content's
sha256 as the manifest has it, and the system's record of it. Of that record ctime is what no
program can set: it moves with every write, every rename and every change of the other times. (Not
at once with a write through a shared mapping, which no engine's maker does.)
"""

import hashlib
import os
import time
from pathlib import Path

from llmbuild.cache import cache_root
from llmbuild.runtime.manifest import Manifest

# A file that is written twice within one tick of the system's clock has one ctime for both. What
# changed so recently isn't remembered.
SETTLED_NS = 2_000_000_000
MAX_MARKERS = 500  # the oldest go when there are more: an engine's files change, or are removed


class Marker:
    """The marker of an engine directory as its files are now. To be made before they are read."""

    def __init__(self, root: Path, manifest: Manifest) -> None:
        """Raises OSError."""
        digest = hashlib.sha256()
        newest_ns = 0
        for name, file in sorted(manifest.files.items()):
            stat = os.stat(root / name)
            state = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
            digest.update(f"{name!r} {file.sha256} {state}\n".encode())
            newest_ns = max(newest_ns, stat.st_ctime_ns)
        self._name = digest.hexdigest()
        self._is_settled = 0 < newest_ns < time.time_ns() - SETTLED_NS

    @property
    def is_set(self) -> bool:
        try:
            return self._path().exists()
        except (OSError, RuntimeError):  # there is no home, or it may not be read
            return False

    def set(self) -> None:
        """Remember it, if that can be: where not, the files are read again next time."""
        if not self._is_settled:
            return
        try:
            path = self._path()
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch()
            markers = sorted(path.parent.iterdir(), key=lambda each: each.stat().st_mtime_ns)
            for old in markers[:-MAX_MARKERS]:
                old.unlink(missing_ok=True)
        except (OSError, RuntimeError):
            pass

    def _path(self) -> Path:
        return cache_root() / "verified" / self._name
