"""Opens an engine directory: whatever doesn't fit is refused before anything is loaded."""

import hashlib
import os
import platform
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from stat import S_ISREG

from llmbuild.errors import EngineError
from llmbuild.runtime.isa import CPUINFO, LEVELS, missing_flags
from llmbuild.runtime.manifest import MANIFEST_NAME, Manifest, Target, read_manifest

TARGET_KIND = "cpu"


@dataclass(frozen=True)
class Engine:
    """An engine whose files are what its manifest says, and that this processor can run."""

    root: Path
    manifest: Manifest
    isa_level: str  # the best of the engine's levels that this processor has


def open_engine(root: Path, cpuinfo: Path = CPUINFO) -> Engine:
    """Checks the engine directory `root` and chooses the ISA level to run.

    In this order: the manifest, the target, the processor, every file. Raises EngineError with
    what was found and what is needed.
    """
    manifest = read_manifest(root)
    check_target(manifest.target)
    if len(manifest.ranks) != 1:
        raise EngineError(
            f"the engine has {len(manifest.ranks)} ranks, and this runtime runs engines of 1 rank"
        )
    isa_level = choose_level(manifest.target, cpuinfo)
    check_files(root, manifest)
    return Engine(root, manifest, isa_level)


def check_target(target: Target) -> None:
    """Raises EngineError when the engine is for something that this runtime doesn't drive."""
    if target.kind != TARGET_KIND:
        raise EngineError(
            f"the engine is for target {target.kind!r}, and this runtime runs {TARGET_KIND!r}; "
            f"compile the model for {TARGET_KIND!r}"
        )


def choose_level(target: Target, cpuinfo: Path = CPUINFO) -> str:
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
    try:
        wrong = (
            [f"{name!r} isn't a path inside the engine" for name in _outside(manifest)]
            or _wrong_names(root, manifest)
            or _wrong_sizes(root, manifest)
            or _wrong_digests(root, manifest)
        )
    except OSError as error:
        raise EngineError(f"can't read {error.filename}: {error.strerror}") from error
    if wrong:
        listed = "".join(f"\n  {line}" for line in wrong)
        raise EngineError(
            f"{root} isn't as llmbuild published it:{listed}\nCopy it again, or compile it again."
        )


def sha256(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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


def _wrong_digests(root: Path, manifest: Manifest) -> list[str]:
    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(lambda name: sha256(root / name), manifest.files))
    return [
        f"{name}: sha256 {digest}, and the manifest says {file.sha256}"
        for (name, file), digest in zip(manifest.files.items(), digests, strict=True)
        if digest != file.sha256
    ]
