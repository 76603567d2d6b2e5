"""A folder of compiled kernels for a launcher that has neither Triton nor llmbuild: PTX, cubins,
and an index that says how to launch each."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import msgspec

from llmbuild.builder.targets.gpu.capabilities import WARP_THREADS, capability
from llmbuild.builder.targets.gpu.gates import ptx_version
from llmbuild.builder.targets.gpu.kernels import Compiled
from llmbuild.builder.targets.gpu.triton_compiler import launch_arguments
from llmbuild.errors import BuildError

INDEX_NAME = "index.json"


class CodeFile(msgspec.Struct, frozen=True):
    name: str
    sha256: str


class Entry(msgspec.Struct, frozen=True):
    name: str
    sm: int
    entry: str  # the entry point's name
    arguments: list[tuple[str, str]]  # name and type, in order; then the null pointers
    null_pointers: int  # that a launcher passes last
    constants: dict[str, int | float | bool | None]
    block_threads: int
    shared_bytes: int  # dynamic
    ptx_version: int  # 84 is 8.4
    driver: str  # the oldest branch that accepts the PTX
    ptx: CodeFile
    cubin: CodeFile


def check_out(out: Path) -> None:
    """Raises BuildError unless a folder can be made there, and makes those that it lies in."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BuildError(f"{out} isn't an empty folder; give another one for the kernels")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(f"can't make {out.parent}: {error.strerror}; give another one") from error


def write_kernels(kernels: Iterable[Compiled], out: Path) -> None:
    """Makes the folder `out`, whole or not at all. Raises BuildError when it can't be had."""
    check_out(out)
    staging = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        index = [_write(compiled, staging) for compiled in kernels]
        text = msgspec.json.format(msgspec.json.encode({"kernels": index}), indent=1)
        (staging / INDEX_NAME).write_bytes(text + b"\n")
        staging.chmod(0o755)
        os.replace(staging, out)
    except BaseException:
        shutil.rmtree(staging)
        raise


def _write(compiled: Compiled, folder: Path) -> Entry:
    request, kernel = compiled
    variant, sm = request.variant, request.sm
    arguments = launch_arguments(variant)
    return Entry(
        name=variant.name,
        sm=sm,
        entry=kernel.entry,
        arguments=arguments,
        null_pointers=_parameters(kernel.ptx) - len(arguments),
        constants=dict(variant.constants),
        block_threads=kernel.resources.num_warps * WARP_THREADS,
        shared_bytes=kernel.resources.shared_bytes,
        ptx_version=ptx_version(kernel.ptx),
        driver=capability(sm).driver,
        ptx=_write_code(folder / f"{variant.name}.sm_{sm}.ptx", kernel.ptx.encode()),
        cubin=_write_code(folder / f"{variant.name}.sm_{sm}.cubin", kernel.cubin),
    )


def _parameters(ptx: str) -> int:
    """How many parameters the entry point has."""
    return ptx.partition(".entry")[2].partition(")")[0].count(".param")


def _write_code(path: Path, code: bytes) -> CodeFile:
    path.write_bytes(code)
    return CodeFile(path.name, hashlib.sha256(code).hexdigest())
