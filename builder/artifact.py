"""Publishes an engine directory whole or not at all.

An engine is written in a staging directory beside the output path and gets there in one atomic
step. Layout of `.NAME.staging-XXXXXXXX`, for an output path NAME:

    lock        held (flock) by the process that writes; the kernel frees it however that one ends
    engine/     what will be published; after an exchange, the engine that was replaced
    reference/  an engine to compare it with, where a gate does

`lock` goes last when a staging directory is removed, so one without it is empty.
"""

import ctypes
import errno
import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from llmbuild.errors import BuildError, EngineError, InternalError
from llmbuild.runtime.engine import check_files, check_plans, files_under, sha256
from llmbuild.runtime.manifest import (
    MANIFEST_NAME,
    File,
    Manifest,
    encode,
    read_manifest,
    seal,
)

_LOCK = "lock"
_ENGINE = "engine"
_REFERENCE = "reference"

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def out_path(out: str | os.PathLike[str] | None, name: str) -> Path:
    """Where to publish an engine of this name: as given, or engines/<name>."""
    return Path(out) if out else Path("engines") / name


class EngineWriter:
    """Context of a compile that publishes to `out`.

    Entering it refuses an output path that can't be used, removes what killed compiles left, and
    makes `root`, the folder to write the engine's files in; `reference` is a path beside it for
    another engine. Leaving it removes the staging directory, whatever happened. Several compiles
    to one path don't disturb each other: the last to publish stays.
    """

    def __init__(self, out: Path) -> None:
        self.out = Path(os.path.realpath(out))

    def __enter__(self) -> Self:
        check_output(self.out)
        try:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            _remove_stale(self.out)
            self._staging, self._lock = _stage(self.out)
        except OSError as error:
            raise BuildError(
                f"can't write beside the output path {self.out}: {error}; give another one"
            ) from error
        self.root = self._staging / _ENGINE
        self.reference = self._staging / _REFERENCE
        try:
            if is_engine(self.out):
                _try_exchange(self._staging)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(OSError):  # what is left then is removed by the next compile
            _remove(self._staging)
        os.close(self._lock)

    def publish(self, manifest: Manifest) -> Manifest:
        """Seals the engine and puts it at the output path; returns the manifest as written.

        Raises BuildError when the files can't be written or the output path has come to be in
        use.
        """
        sealed = seal_engine(self.root, manifest)
        try:
            _sync(self.root)
            _move(self.root, self.out)
            _sync_one(self.out.parent)
        except OSError as error:
            raise BuildError(f"can't publish the engine as {self.out}: {error}") from error
        return sealed


def seal_engine(root: Path, manifest: Manifest) -> Manifest:
    """Makes the files below `root` an engine that opens there; returns the manifest as written.

    `files` and `digest` of the manifest are filled in here. The runtime's own checks must accept
    the engine (InternalError otherwise). Files may still come or change: to publish seals them
    again. Raises BuildError when the manifest can't be written.
    """
    try:
        sealed = _write_manifest(root, manifest)
        _check(root)
    except OSError as error:
        raise BuildError(f"can't finish the engine in {root}: {error}") from error
    return sealed


def check_output(out: Path) -> None:
    """Raises BuildError unless `out` is free, an empty directory, or an engine to replace."""
    try:
        free = not out.exists() or is_engine(out) or (out.is_dir() and not any(out.iterdir()))
    except OSError as error:
        raise BuildError(f"the output path {out} can't be used: {error}") from error
    if not free:
        what = "a directory that isn't an engine" if out.is_dir() else "a file"
        raise BuildError(
            f"the output path {out} is {what}; only an engine is replaced: remove it, or give "
            "another path"
        )


def is_engine(path: Path) -> bool:
    """Whether the directory holds a manifest that llmbuild wrote, of any version."""
    if not (path / MANIFEST_NAME).is_file():
        return False
    try:
        content = msgspec.json.decode((path / MANIFEST_NAME).read_bytes())
    except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return isinstance(content, dict) and {"schema_version", "llmbuild_version"} <= {*content}


def _prefix(out: Path) -> str:
    return f".{out.name}.staging-"


def _stage(out: Path) -> tuple[Path, int]:
    """A new staging directory and the descriptor that holds its lock."""
    while True:
        staging = Path(tempfile.mkdtemp(prefix=_prefix(out), dir=out.parent))
        # Until the lock is held another compile may take this for a killed one's and remove it.
        try:
            lock = os.open(staging / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_at(lock, staging / _LOCK):
            (staging / _ENGINE).mkdir()
            return staging, lock
        os.close(lock)


def _is_at(descriptor: int, path: Path) -> bool:
    return path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())


def _remove_stale(out: Path) -> None:
    """Removes the staging directories of `out` whose writer has ended."""
    for path in out.parent.iterdir():
        if not path.name.startswith(_prefix(out)):
            continue
        try:
            lock = os.open(path / _LOCK, os.O_RDWR)
        except OSError:
            with suppress(OSError):  # not empty, so a live build's, or not llmbuild's
                path.rmdir()
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(lock, path / _LOCK):  # else another compile has removed it
                _remove(path)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)


def _remove(staging: Path) -> None:
    for path in staging.iterdir():
        if path.name != _LOCK:
            shutil.rmtree(path)
    (staging / _LOCK).unlink(missing_ok=True)
    staging.rmdir()


def _write_manifest(root: Path, manifest: Manifest) -> Manifest:
    names = sorted(name for name, _ in files_under(root) if name != MANIFEST_NAME)
    files = {
        name: File(sha256=sha256(root / name), size_bytes=(root / name).stat().st_size)
        for name in names
    }
    sealed = seal(msgspec.structs.replace(manifest, files=files))
    (root / MANIFEST_NAME).write_bytes(encode(sealed))
    return sealed


def _check(root: Path) -> None:
    """Holds the staged engine to what the runtime asks of any engine. The processor isn't asked:
    an engine may be compiled for levels that this one lacks."""
    try:
        manifest = read_manifest(root)
        check_files(root, manifest)
        check_plans(root, manifest)
    except EngineError as error:
        raise InternalError(f"the compiled engine would be refused at load: {error}") from error


def _sync(root: Path) -> None:
    for folder, _, names in os.walk(root):
        for name in names:
            _sync_one(Path(folder) / name)
        _sync_one(Path(folder))


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _move(engine: Path, out: Path) -> None:
    """Moves the directory to `out`. An engine there is exchanged with it, so that a reader finds
    the old or the new one at every moment."""
    while True:
        check_output(out)
        try:
            if is_engine(out):
                _exchange(engine, out)
            else:
                engine.rename(out)
            return
        except OSError as error:
            # The output path came to be, or went, between the look and the move: look again.
            appeared = error.errno in (errno.ENOTEMPTY, errno.EEXIST)
            gone = error.errno == errno.ENOENT and engine.exists()
            if not appeared and not gone:
                raise


def _exchange(a: Path, b: Path) -> None:
    """Swaps two directories in one atomic step: renameat2(2), which Python doesn't offer."""
    libc = ctypes.CDLL(None, use_errno=True)
    paths = (os.fsencode(a), os.fsencode(b))
    if libc.renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(a), None, str(b))


def _try_exchange(staging: Path) -> None:
    """Raises BuildError when directories can't be exchanged here: some network file systems can't.
    Better known before a long compile than after it."""
    other = staging / "other"
    other.mkdir()
    try:
        _exchange(staging / _ENGINE, other)
    except (OSError, AttributeError) as error:  # AttributeError: a libc without renameat2
        raise BuildError(
            f"the engine at the output path can't be replaced in one step here ({error}): remove "
            "it first, or give another output path"
        ) from error
    other.rmdir()
