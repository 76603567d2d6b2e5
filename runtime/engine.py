"""Opens an engine directory: whatever doesn't fit is refused before anything is loaded."""

import hashlib
import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from stat import S_ISREG

from llmbuild.errors import EngineError
from llmbuild.runtime.gpu import compute_capability, rtx_version, tensorrt_version
from llmbuild.runtime.isa import CPUINFO, LEVELS, missing_flags
from llmbuild.runtime.manifest import MANIFEST_NAME, Manifest, read_manifest
from llmbuild.runtime.plan_header import check_plan
from llmbuild.runtime.target import CpuTarget, RtxTarget, Target, TensorrtTarget
from llmbuild.runtime.verified import Marker


@dataclass(frozen=True)
class Engine:
    """An engine whose files are what its manifest says, and that this machine can run."""

    root: Path
    manifest: Manifest
    variant: str  # of its executables: the best ISA level, or the GPU's compute capability


def open_engine(root: Path, cpuinfo: Path = CPUINFO) -> Engine:
    """Checks the engine directory `root` and chooses which of its executables to run.

    In this order: the manifest, the processor or GPU, every file. Raises EngineError with what was
    found and what is needed.
    """
    engine = _fitting_engine(root, cpuinfo)
    check_files(root, engine.manifest)
    check_plans(root, engine.manifest)
    return engine


@contextmanager
def opening_engine(root: Path, cpuinfo: Path = CPUINFO) -> Iterator[Engine]:
    """open_engine for a quick load: the contents of the files are verified in the background
    while the body of the `with` runs, and those of an engine that this user has opened before
    aren't read again while the system says that they are the same files, unchanged.

    Nothing of the engine may be executed before the body is left. That waits for the verdict,
    and a file that isn't as published counts for more than an error of the body.
    """
    engine = _fitting_engine(root, cpuinfo)
    verification = _Verification(root, engine.manifest)
    check_plans(root, engine.manifest)
    try:
        yield engine
    finally:
        verification.finish()


def _fitting_engine(root: Path, cpuinfo: Path) -> Engine:
    """The engine of a directory whose files aren't looked at yet."""
    manifest = read_manifest(root)
    check_servable(manifest)
    return Engine(root, manifest, choose_variant(manifest.target, cpuinfo))


class _Verification:
    """check_files, with the contents left to threads until `finish`."""

    def __init__(self, root: Path, manifest: Manifest) -> None:
        """Raises EngineError for a name or a size."""
        self._root = root
        self._manifest = manifest
        self._digests: _Digests | None = None
        with _refusing_unreadable():
            _refuse(root, _wrong_names_or_sizes(root, manifest))
            self._marker = Marker(root, manifest)
            if not self._marker.is_set:
                self._digests = _Digests(root, manifest)

    def finish(self) -> None:
        """Raises EngineError for an altered file."""
        if self._digests is None:
            return
        with _refusing_unreadable():
            _refuse(self._root, self._digests.wrong())
        self._marker.set()


def check_servable(manifest: Manifest) -> None:
    """Raises EngineError for an engine that no executor is built for yet."""
    if not isinstance(manifest.target, CpuTarget) and manifest.parallel.pp > 1:
        raise EngineError(
            f"the engine has {manifest.parallel.pp} stages, which can't be served on GPUs yet; "
            "compile the model with parallel.tp alone"
        )


def choose_variant(target: Target, cpuinfo: Path = CPUINFO) -> str:
    """Which executables of an engine this machine runs: the best ISA level that its processor has,
    or its GPU's compute capability. Raises EngineError when it runs none of them."""
    match target:
        case CpuTarget():
            return choose_level(target, cpuinfo)
        case RtxTarget() | TensorrtTarget():
            return choose_capability(target)


def choose_capability(target: RtxTarget | TensorrtTarget) -> str:
    """The compute capability of this machine's GPU. Raises EngineError where there is no GPU, no
    TensorRT, or TensorRT for RTX, of the engine's version, or the engine isn't for the GPU."""
    capability = compute_capability()
    is_rtx = isinstance(target, RtxTarget)
    version = rtx_version() if is_rtx else tensorrt_version()
    if version != target.version:
        name, package = ("TensorRT for RTX", "tensorrt-rtx") if is_rtx else ("TensorRT", "tensorrt")
        raise EngineError(
            f"the engine is for {name} {target.version}, and {version} is installed; "
            f"install {package} {target.version}, or compile the engine again"
        )
    if capability not in target.variants:
        raise EngineError(
            f"the engine is for compute capabilities {', '.join(target.variants)}, and this "
            f"GPU has {capability}; compile the model for it"
        )
    return capability


def choose_level(target: CpuTarget, cpuinfo: Path = CPUINFO) -> str:
    """The best ISA level of the engine that this processor has.

    Raises EngineError when it has none of them, with what it lacks for each.
    """
    here = platform.machine()
    if target.machine != here:
        raise EngineError(
            f"the engine is for machine {target.machine!r}, and this one is {here!r}; "
            f"compile the model on {here!r}"
        )
    lacks = []
    for level in target.isa_levels:
        if level not in LEVELS or LEVELS[level].machine != here:
            lacks.append(f"{level} isn't known to this runtime for {here}")
            continue
        missing = missing_flags(level, cpuinfo)
        if not missing:
            return level
        lacks.append(f"{level} needs {', '.join(missing)}")
    raise EngineError(
        f"this processor has none of the engine's ISA levels {', '.join(target.isa_levels)}: "
        f"{'; '.join(lacks)}; compile the model for `native` on this machine"
    )


def check_files(root: Path, manifest: Manifest) -> None:
    """Holds the files of the engine directory to the manifest: names, then sizes, then sha256.

    Raises EngineError that names every file that is missing, unlisted or altered.
    """
    with _refusing_unreadable():
        _refuse(root, _wrong_names_or_sizes(root, manifest) or _Digests(root, manifest).wrong())


def check_plans(root: Path, manifest: Manifest) -> None:
    """Raises EngineError for a plan whose header doesn't say what the manifest says."""
    target = manifest.target
    if isinstance(target, RtxTarget):
        for rank in manifest.ranks:
            for name in sorted({*rank.executables.values()}):
                check_plan(root / name, target.version, target.capabilities)


@contextmanager
def _refusing_unreadable() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EngineError(f"can't read {error.filename}: {error.strerror}") from error


def _refuse(root: Path, wrong: list[str]) -> None:
    """Raises EngineError unless nothing is wrong."""
    if wrong:
        listed = "".join(f"\n  {line}" for line in wrong)
        raise EngineError(
            f"{root} isn't as llmbuild published it:{listed}\nCopy it again, or compile it again."
        )


def sha256(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _wrong_names_or_sizes(root: Path, manifest: Manifest) -> list[str]:
    return (
        [f"{name!r} isn't a path inside the engine" for name in _outside(manifest)]
        or _wrong_names(root, manifest)
        or _wrong_sizes(root, manifest)
    )


def _outside(manifest: Manifest) -> Iterator[str]:
    for name in manifest.files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or str(path) != name or "\0" in name:
            yield name


def _wrong_names(root: Path, manifest: Manifest) -> list[str]:
    found = dict(files_under(root))
    listed = {MANIFEST_NAME, *manifest.files}
    irregular = sorted(name for name, is_plain in found.items() if not is_plain)
    return (
        [f"{name}: missing" for name in sorted(listed - {*found})]
        + [f"{name!r}: not in the manifest" for name in sorted({*found} - listed)]
        + [f"{name!r}: a link or device, where a plain file is wanted" for name in irregular]
    )


def files_under(root: Path) -> Iterator[tuple[str, bool]]:
    """Everything below `root` but its directories: the relative path, and whether it is a plain
    file. Links aren't followed, so they count as what they are."""

    def fail(error: OSError) -> None:
        raise error

    for folder, directories, names in os.walk(root, onerror=fail):
        links = [name for name in directories if (Path(folder) / name).is_symlink()]
        for name in names + links:
            path = Path(folder) / name
            yield path.relative_to(root).as_posix(), S_ISREG(path.lstat().st_mode)


def _wrong_sizes(root: Path, manifest: Manifest) -> list[str]:
    return [
        f"{name}: {size} bytes, and the manifest says {file.size_bytes}"
        for name, file in manifest.files.items()
        if (size := (root / name).stat().st_size) != file.size_bytes
    ]


class _Digests:
    """The sha256 of every file, computed in threads of its own from now on (hashing and reading
    leave the GIL free)."""

    def __init__(self, root: Path, manifest: Manifest) -> None:
        self._root = root
        self._files = manifest.files
        # The largest first, so that it isn't the one that is waited for.
        self._left = sorted(self._files, key=lambda name: self._files[name].size_bytes)
        self._found: dict[str, str | OSError] = {}
        count = min(os.cpu_count() or 1, len(self._left))
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def wrong(self) -> list[str]:
        """Waits for all; raises OSError for a file that can't be read."""
        for thread in self._threads:
            thread.join()
        for found in self._found.values():
            if isinstance(found, OSError):
                raise found
        return [
            f"{name}: sha256 {self._found[name]}, and the manifest says {file.sha256}"
            for name, file in self._files.items()
            if self._found[name] != file.sha256
        ]

    def _work(self) -> None:
        while True:
            try:
                name = self._left.pop()  # atomic: each name goes to one thread
            except IndexError:
                return
            try:
                self._found[name] = sha256(self._root / name)
            except OSError as error:
                self._found[name] = error
