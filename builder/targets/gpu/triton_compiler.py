"""Compiles one kernel for one SM with Triton: no GPU, no driver, no torch.

Triton is imported where it is used, since a builder without it does all else.
"""

import hashlib
import io
import json
import os
import re
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from llmbuild.builder.targets.gpu.capabilities import CAPABILITIES, capability
from llmbuild.builder.targets.gpu.compiled_kernel import (
    CompiledKernel,
    Resources,
    ptxas_figures,
)
from llmbuild.errors import BuildError, InternalError
from llmbuild.plugins.common.kernel_variant import KernelVariant

_CONSTANT = "constexpr"
_FORMAT = 1  # of cache entries; a change of CompiledKernel, or of what is compiled, raises it
_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")  # fit for a file's name


def require_triton() -> None:
    """Raises BuildError where Triton is missing, or would interpret kernels."""
    try:
        from triton import knobs
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise BuildError(
            "GPU kernels are compiled by Triton, which isn't installed; "
            """`pip install ".[build,gpu]"` in llmbuild's checkout has it"""
        ) from error
    if knobs.runtime.interpret:
        raise BuildError("TRITON_INTERPRET makes Triton interpret kernels; unset it to compile")


def load_compiler() -> None:
    """Does once what each fork would do again before its kernel: half a second of it."""
    import triton.compiler.code_generator
    import triton.runtime.cache
    from triton.backends.nvidia.compiler import get_ptxas_version

    triton.runtime.cache.triton_key()  # hashes all of Triton, and remembers it
    for sm in CAPABILITIES:
        get_ptxas_version(sm)  # asks ptxas, and remembers it


def launch_arguments(variant: KernelVariant) -> list[tuple[str, str]]:
    """Name and type of each argument that a launcher passes, in order. Two null pointers follow:
    Triton's global and profile scratch, of which our kernels use none."""
    return [(name, kind) for name, kind in variant.signature.items() if kind != _CONSTANT]


def check_variant(variant: KernelVariant) -> None:
    """Raises InternalError when the variant's parts don't fit each other."""
    arguments = list(variant.kernel.arg_names)
    constants = {name for name, kind in variant.signature.items() if kind == _CONSTANT}
    problems = []
    if not _NAME.fullmatch(variant.name):
        problems.append("its name isn't words of a-z, 0-9, _ and - with dots between")
    if list(variant.signature) != arguments:
        problems.append(f"its signature names {list(variant.signature)}, its kernel {arguments}")
    if constants != {*variant.constants}:
        problems.append(f"constants {sorted(variant.constants)} aren't {sorted(constants)}")
    if unknown := {*variant.divisible_by_16} - {name for name, _ in launch_arguments(variant)}:
        problems.append(f"divisible_by_16 names {sorted(unknown)}")
    if problems:
        raise InternalError("; ".join(problems))


def cache_key(variant: KernelVariant, sm: int) -> str:
    """sha256 over all that the compiled kernel depends on. Triton's key of a kernel covers its
    source, that of the functions it calls, and the globals that it reads."""
    import triton

    parts = {
        "format": _FORMAT,
        "triton": triton.__version__,
        "kernel": variant.kernel.cache_key,
        "signature": list(variant.signature.items()),
        "constants": sorted(variant.constants.items()),
        "divisible_by_16": sorted(variant.divisible_by_16),
        "sm": sm,
        "options": _options(variant, sm),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def compile_variant(variant: KernelVariant, sm: int, scratch: Path) -> CompiledKernel:
    """Compiles in this process, whose environment and temporary folder it changes: a process
    compiles one kernel and ends."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    _prepare_process(scratch)
    names = list(variant.signature)
    source = ASTSource(
        variant.kernel,
        signature=dict(variant.signature),
        constexprs=dict(variant.constants),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in variant.divisible_by_16},
    )
    with redirect_stdout(io.StringIO()) as log:
        target = GPUTarget("cuda", sm, 32)
        compiled = triton.compile(source, target=target, options=_options(variant, sm))
    return CompiledKernel(
        entry=compiled.metadata.name,
        ptx=compiled.asm["ptx"],
        cubin=compiled.asm["cubin"],
        resources=_resources(compiled.metadata, log.getvalue()),
    )


def _options(variant: KernelVariant, sm: int) -> dict[str, Any]:
    return {
        "num_warps": variant.num_warps,
        "num_stages": variant.num_stages,
        "ptx_version": capability(sm).ptx_version,
        "enable_fp_fusion": True,  # a fused multiply-add rounds once
        "ptx_options": "",
    }


def _prepare_process(scratch: Path) -> None:
    """No variable of the user's changes what is compiled, and all files go to `scratch`."""
    os.environ.clear()
    os.environ |= {
        "TRITON_CACHE_DIR": str(scratch / "triton"),
        "TRITON_DUMP_PTXAS_LOG": "1",
        "TRITON_DISABLE_LINE_INFO": "1",  # no paths of this machine in what is embedded
    }
    tempfile.tempdir = str(scratch)


def _resources(metadata: Any, ptxas_log: str) -> Resources:
    registers, stack_bytes, spilled_bytes = ptxas_figures(ptxas_log)
    return Resources(
        registers=registers,
        stack_bytes=stack_bytes,
        spilled_bytes=spilled_bytes,
        shared_bytes=metadata.shared,
        tensor_memory_columns=metadata.tmem_size or 0,
        global_scratch_bytes=metadata.global_scratch_size,
        profile_scratch_bytes=metadata.profile_scratch_size,
        num_warps=metadata.num_warps,
    )
