"""The C++ compiler: found on this machine, run with a cache, the same source giving the same
bytes wherever it is compiled."""

import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import llmbuild.plugins
from llmbuild.cache import cache_root
from llmbuild.errors import BuildError, InternalError
from llmbuild.runtime.isa import LEVELS, supported_levels
from llmbuild.version import __version__

TIMEOUT_S = 600
NATIVE = "native"

# No flag here lets the compiler change a value beyond the rounding that a fused multiply-add
# saves: no -ffast-math, and errno alone is given up so that sqrtf can be one instruction.
_FLAGS = [
    "-std=c++17",
    "-O3",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-pthread",
    "-frandom-seed=llmbuild",
    "-Wl,--build-id=sha1",  # of the contents, so as reproducible as they are
]
_LEVEL_FLAGS = {
    "x86-64-v4-vnni": ["-march=x86-64-v4", "-mavx512vnni"],
    "x86-64-v4": ["-march=x86-64-v4"],
    "x86-64-v3-vnni": ["-march=x86-64-v3", "-mavxvnni"],
    "x86-64-v3": ["-march=x86-64-v3"],
    "x86-64": ["-march=x86-64"],
    "aarch64": ["-march=armv8-a"],
}
# They would change what is compiled without being part of the cache's key.
_IGNORED_ENVIRONMENT = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH")

_SOURCE = "engine.cpp"
_OBJECT = "engine.so"
_DIGEST = "engine.so.sha256"

# Runs the compiler in this process group and kills the whole group when its standard input
# closes, as it does however the parent ends, SIGKILL included.
_WATCHED = """
import os, signal, subprocess, sys, threading
compiler = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
def watch():
    sys.stdin.read()
    os.killpg(0, signal.SIGKILL)
threading.Thread(target=watch, daemon=True).start()
code = compiler.wait()
os._exit(code if code >= 0 else 128 - code)
"""


@dataclass(frozen=True)
class Compiler:
    command: tuple[str, ...]
    version: str  # all that --version prints

    @property
    def name(self) -> str:
        """Name and version in one line, for the manifest."""
        return self.version.splitlines()[0]


@dataclass(frozen=True)
class CompileRecord:
    seconds: float
    cached: bool
    key: str  # of the cache entry


def find_compiler() -> Compiler:
    """The compiler that $CXX names, or g++, or clang++ on PATH.

    Raises BuildError when there is none, or when it doesn't run.
    """
    asked = os.environ.get("CXX", "").split()
    candidates = [asked] if asked else [["g++"], ["clang++"]]
    found = [(path, *rest) for name, *rest in candidates if (path := shutil.which(name))]
    if not found:
        what = f"CXX names {asked[0]!r}, which isn't" if asked else "neither g++ nor clang++ is"
        raise BuildError(
            f"{what} a command on PATH; compiling an engine for the cpu target needs a C++17 "
            "compiler: install g++ (Debian and Ubuntu: apt-get install g++, Fedora: dnf install "
            "gcc-c++), or set CXX to the one to use"
        )
    path, *options = found[0]
    command = (os.path.abspath(path), *options)  # it runs in another folder
    try:
        run = subprocess.run(
            [*command, "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60,
            env=_environment(),
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the compiler {shlex.join(command)!r} doesn't run: {error}") from error
    if run.returncode != 0 or not run.stdout.strip():
        raise BuildError(
            f"{shlex.join(command)!r} --version ended with status {run.returncode} and printed "
            f"{(run.stdout or run.stderr).strip()[:200]!r}; set CXX to g++ 11, clang++ 12 or later"
        )
    return Compiler(command, run.stdout.strip())


def resolve_levels(requested: Sequence[str]) -> list[str]:
    """The ISA levels asked for, best first, each once; "native" is this processor's best.

    A level that this processor lacks is allowed: it can be compiled here, if not run.
    Raises BuildError for an unknown level or one of another machine.
    """
    levels = {_native_level() if level == NATIVE else level for level in requested}
    for level in sorted(levels):
        _check_machine(level)
    return [level for level in LEVELS if level in levels]


def level_flags(level: str) -> list[str]:
    """The compiler flags that let code use an ISA level's instructions."""
    return list(_LEVEL_FLAGS[level])


def flags(level: str) -> list[str]:
    """All compiler flags of an ISA level, for the manifest; paths are left out of them."""
    return [*level_flags(level), *_FLAGS]


def include_dirs() -> list[Path]:
    """Where generated code finds the kernels' headers: #include "linear/cpu.h"."""
    return [Path(path) for path in llmbuild.plugins.__path__]


def compile(source: str, level: str, out: Path) -> CompileRecord:
    """Compiles C++ `source` for an ISA level into the shared library `out`.

    The result is kept in the cache under a key of all that it depends on. Raises BuildError when
    the machine can't do it, InternalError when the compiler refuses the source.
    """
    _check_machine(level)
    started = time.monotonic()
    compiler = find_compiler()
    key = cache_key(source, level, compiler)
    entry = cache_root() / "objects" / key
    try:
        library = _cached(entry)
        cached = library is not None
        if library is None:
            library = _build(source, level, compiler, key)
            _store(entry, library)
        out.write_bytes(library)
    except OSError as error:
        raise BuildError(
            f"can't compile: {error}; compiled code is cached in {cache_root()}, which "
            "LLMBUILD_CACHE moves"
        ) from error
    return CompileRecord(time.monotonic() - started, cached, key)


def cache_key(source: str, level: str, compiler: Compiler) -> str:
    """sha256 over everything that the compiled bytes depend on."""
    parts = [source, level, __version__, platform.machine(), *compiler.command, compiler.version]
    parts += flags(level)
    for root in include_dirs():
        for header in sorted(root.rglob("*.h")):
            parts += [str(header.relative_to(root)), header.read_text()]
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _native_level() -> str:
    levels = supported_levels()
    if not levels:
        raise BuildError(
            f"this machine ({platform.machine()}) has none of the known ISA levels: "
            f"{', '.join(LEVELS)}"
        )
    return levels[0]


def _check_machine(level: str) -> None:
    if level not in LEVELS:
        known = ", ".join([NATIVE, *LEVELS])
        raise BuildError(f"unknown ISA level {level!r}; known levels: {known}")
    here = platform.machine()
    if LEVELS[level].machine != here:
        ours = ", ".join(name for name, known in LEVELS.items() if known.machine == here)
        raise BuildError(
            f"ISA level {level} is for {LEVELS[level].machine} and this machine is {here}; "
            f"cross-compiling isn't supported: choose of {ours or 'no level'}, or compile on "
            f"{LEVELS[level].machine}"
        )


def _cached(entry: Path) -> bytes | None:
    """The library of a cache entry, None when there is none or it isn't what was stored."""
    try:
        library = (entry / _OBJECT).read_bytes()
        digest = (entry / _DIGEST).read_text()
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    return library if hashlib.sha256(library).hexdigest() == digest.strip() else None


def _store(entry: Path, library: bytes) -> None:
    """Writes a cache entry. Each file comes into being whole; a pair that doesn't match, because
    the process ended between the two, is a damaged entry, which `_cached` doesn't use."""
    entry.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(library).hexdigest().encode() + b"\n"
    with tempfile.TemporaryDirectory(dir=entry) as scratch:
        for name, data in ((_OBJECT, library), (_DIGEST, digest)):
            (Path(scratch) / name).write_bytes(data)
            os.replace(Path(scratch) / name, entry / name)


def _build(source: str, level: str, compiler: Compiler, key: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="llmbuild-") as name:
        scratch = Path(name)
        (scratch / _SOURCE).write_text(source)
        status, message = _run(compiler, [*flags(level), *_path_flags()], scratch)
        if status == 0:
            return (scratch / _OBJECT).read_bytes()
        (scratch / _SOURCE).write_text("")
        empty_status, empty_message = _run(compiler, flags(level), scratch)
    if empty_status != 0:
        raise BuildError(
            f"{compiler.name} can't compile for {level}: {_first_lines(empty_message)}\n"
            f"It was called with {shlex.join(flags(level))}; g++ 11 and clang++ 12 or later "
            "know these flags: set CXX to such a compiler"
        )
    kept = cache_root() / "failed" / f"{key}.cpp"
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(source)
    raise InternalError(
        f"{compiler.name} ended with status {status} on generated code; the source is kept as "
        f"{kept}\n{_first_lines(message)}"
    )


def _path_flags() -> list[str]:
    """Where headers are, with no trace of it in the output (__FILE__ in an assertion)."""
    return [
        flag
        for root in include_dirs()
        for flag in (f"-I{root}", f"-ffile-prefix-map={root}=plugins")
    ]


def _run(compiler: Compiler, arguments: list[str], scratch: Path) -> tuple[int, str]:
    """Compiles the source in `scratch`; returns the exit status and what was printed.

    The compiler sees relative names only, since it writes the source's name into the output. It
    ends with this process, and with this call when that is left by an exception.
    """
    log = scratch / "log"
    command = [*compiler.command, *arguments, "-o", _OBJECT, _SOURCE]
    with log.open("wb") as printed:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _WATCHED, *command],
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=printed,
            cwd=scratch,
            env=_environment() | {"TMPDIR": str(scratch)},
            process_group=0,
        )
    try:
        status = process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise BuildError(
            f"{compiler.name} didn't finish within {TIMEOUT_S} s; compile on a machine that is "
            "faster or has less to do"
        ) from error
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.stdin is not None:
            process.stdin.close()
    return status, log.read_text(errors="replace")


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _IGNORED_ENVIRONMENT}
    return kept | {"LC_ALL": "C"}


def _first_lines(message: str, count: int = 12) -> str:
    return "\n".join(message.strip().splitlines()[:count])
