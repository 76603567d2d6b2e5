"""The forms in which kernels are listed and written."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from llmbuild.builder.targets.gpu.compiled_kernel import CompiledKernel, Resources
from llmbuild.builder.targets.gpu.kernel_folder import write_kernels
from llmbuild.builder.targets.gpu.kernel_table import lines, markdown, rows
from llmbuild.builder.targets.gpu.kernels import Compiled, Request
from llmbuild.errors import BuildError
from llmbuild.plugins.common.kernel_variant import KernelVariant

PTX = """\
.version 8.0
.target sm_80
.visible .entry add(
	.param .u64 .ptr .global .align 16 add_param_0,
	.param .u32 add_param_1,
	.param .u64 .ptr .global .align 1 add_param_2,
	.param .u64 .ptr .global .align 1 add_param_3
)
{
	ld.param.b32 	%r1, [add_param_1];
}
"""


def compiled(name: str, sm: int, registers: int, **more: Any) -> Compiled:
    signature = {"x": "*fp16", "BLOCK": "constexpr", "size": "i32", "MASK": "constexpr"}
    constants = {"BLOCK": 1024, "MASK": None}
    kernel: Any = None  # is not asked
    variant = KernelVariant(name, kernel, signature, constants, 4, 1, **more)
    uses = Resources(registers, 0, 0, 2048, 0, 0, 0, 4)
    return Request(variant, sm), CompiledKernel("add", PTX, b"\x7fELF", uses)


KERNELS = [
    compiled("add", 80, 26, bytes_per_token=6),
    compiled("add", 90, 28, bytes_per_token=6),
    compiled("subtract.wide", 90, 255),
]


def test_lines_are_one_for_each_kernel_and_sm() -> None:
    header, *body = [line.split("  ") for line in lines(rows(KERNELS))]
    assert header[0] == "kernel"
    words = [[word.strip() for word in line if word.strip()] for line in body]
    assert words == [
        ["add", "80", "26", "2048", "0", "4", "100%"],
        ["add", "90", "28", "2048", "0", "4", "100%"],
        ["subtract.wide", "90", "255", "2048", "0", "4", "12%"],
    ]


def test_lines_of_no_kernels_are_the_header() -> None:
    assert len(list(lines([]))) == 1


def test_markdown_has_a_line_for_each_kernel_and_a_column_for_each_sm() -> None:
    assert list(markdown(rows(KERNELS))) == [
        "| kernel | bytes a token | SM 80 | SM 90 |",
        "| --- | --- | --- | --- |",
        "| add | 6 | 26, 2048, 100% | 28, 2048, 100% |",
        "| subtract.wide | - | - | 255, 2048, 12% |",
    ]


def test_folder_says_how_to_launch_each_kernel(tmp_path: Path) -> None:
    write_kernels(KERNELS, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    first, _, last = index["kernels"]
    assert first == {
        "name": "add",
        "sm": 80,
        "entry": "add",
        "arguments": [["x", "*fp16"], ["size", "i32"]],
        "null_pointers": 2,
        "constants": {"BLOCK": 1024, "MASK": None},
        "block_threads": 128,
        "shared_bytes": 2048,
        "ptx_version": 80,
        "driver": "R525",
        "ptx": {"name": "add.sm_80.ptx", "sha256": hashlib.sha256(PTX.encode()).hexdigest()},
        "cubin": {"name": "add.sm_80.cubin", "sha256": hashlib.sha256(b"\x7fELF").hexdigest()},
    }
    assert last["name"] == "subtract.wide"
    named = [entry[kind]["name"] for entry in index["kernels"] for kind in ("ptx", "cubin")]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"index.json", *named}
    assert (tmp_path / "out" / "add.sm_80.ptx").read_text() == PTX


def test_folder_in_use_stays_as_it_is(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").touch()
    with pytest.raises(BuildError, match="isn't an empty folder"):
        write_kernels(KERNELS, out)
    (tmp_path / "file").touch()
    with pytest.raises(BuildError, match="isn't an empty folder"):
        write_kernels(KERNELS, tmp_path / "file")
    assert [path.name for path in out.iterdir()] == ["mine"]


def test_folder_that_fails_leaves_nothing(tmp_path: Path) -> None:
    uncompiled: Any = (KERNELS[0][0], None)
    with pytest.raises(AttributeError):
        write_kernels([*KERNELS, uncompiled], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_empty_folder_is_filled(tmp_path: Path) -> None:
    write_kernels(KERNELS, tmp_path)
    assert (tmp_path / "index.json").exists()
