"""The compiler is found, called for a level, and its results cached; it never outlives a build."""

import ctypes
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from llmbuild.builder.targets.cpu import toolchain
from llmbuild.builder.targets.cpu.toolchain import (
    compile,
    find_compiler,
    flags,
    include_dirs,
    resolve_levels,
)
from llmbuild.errors import BuildError, InternalError
from llmbuild.runtime.isa import LEVELS, missing_flags, supported_levels

HERE = [level.name for level in LEVELS.values() if level.machine == platform.machine()]
ELSEWHERE = next(name for name in LEVELS if name not in HERE)
EXPORT = 'extern "C" __attribute__((visibility("default"))) '
SEVEN = EXPORT + "int answer() { return 7; }\n"

# The kernel's name of each feature that the compiler announces with a macro.
FEATURE_OF_MACRO = {
    "__ABM__": "abm",
    "__ARM_NEON": "asimd",
    "__AVX2__": "avx2",
    "__AVX512BW__": "avx512bw",
    "__AVX512CD__": "avx512cd",
    "__AVX512DQ__": "avx512dq",
    "__AVX512F__": "avx512f",
    "__AVX512VL__": "avx512vl",
    "__AVX512VNNI__": "avx512_vnni",
    "__AVXVNNI__": "avx_vnni",
    "__AVX__": "avx",
    "__BMI2__": "bmi2",
    "__BMI__": "bmi1",
    "__F16C__": "f16c",
    "__FMA__": "fma",
    "__FXSR__": "fxsr",
    "__GCC_HAVE_SYNC_COMPARE_AND_SWAP_16": "cx16",
    "__LAHF_SAHF__": "lahf_lm",
    "__LZCNT__": "abm",
    "__MMX__": "mmx",
    "__MOVBE__": "movbe",
    "__POPCNT__": "popcnt",
    "__SSE2__": "sse2",
    "__SSE3__": "pni",
    "__SSE4_1__": "sse4_1",
    "__SSE4_2__": "sse4_2",
    "__SSE__": "sse",
    "__SSSE3__": "ssse3",
    "__XSAVE__": "xsave",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMBUILD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def native() -> str:
    return supported_levels()[0]


def write_script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def answer(library: Path) -> int:
    return int(ctypes.CDLL(str(library)).answer())


@pytest.mark.parametrize("level", supported_levels())
def test_compiled_code_runs_on_its_level(tmp_path: Path, level: str) -> None:
    source = EXPORT + (
        "int answer() {\n#if defined __AVX512VNNI__\n  return 5;\n"
        "#elif defined __AVX512F__\n  return 4;\n#elif defined __AVXVNNI__\n  return 3;\n"
        "#elif defined __AVX2__\n  return 2;\n#else\n  return 1;\n#endif\n}\n"
    )
    record = compile(source, level, tmp_path / "out.so")
    assert not record.cached
    assert record.seconds > 0
    ranks = {"x86-64-v4-vnni": 5, "x86-64-v4": 4, "x86-64-v3-vnni": 3, "x86-64-v3": 2}
    assert answer(tmp_path / "out.so") == ranks.get(level, 1)


@pytest.mark.parametrize("level", HERE)
def test_a_level_needs_what_its_compiler_flags_let_the_code_use(level: str) -> None:
    printed = subprocess.run(
        [*find_compiler().command, *flags(level), "-dM", "-E", "-x", "c++", os.devnull],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    macros = set(re.findall(r"^#define (\w+)", printed, re.MULTILINE))
    used = {FEATURE_OF_MACRO[macro] for macro in macros & {*FEATURE_OF_MACRO}}
    assert used
    assert used <= LEVELS[level].flags


def test_flags_keep_ieee_arithmetic(tmp_path: Path, native: str) -> None:
    source = EXPORT + (
        "int answer(volatile float* x) { float lost = (x[0] + x[1]) - x[1];\n"
        "  return (lost == 0.0f) + 2 * (x[2] != x[2]) + 4 * (1.0f / x[3] < 0.0f); }\n"
    )
    compile(source, native, tmp_path / "out.so")
    values = (ctypes.c_float * 4)(1.0, 1e9, float("nan"), -0.0)
    assert ctypes.CDLL(str(tmp_path / "out.so")).answer(values) == 7


def test_the_same_source_gives_the_same_bytes_wherever_it_is_compiled(
    tmp_path: Path, native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries = []
    for place in ("one", "another/and/longer"):
        folder = tmp_path / place
        (folder / "plugins" / "thing").mkdir(parents=True)
        header = folder / "plugins" / "thing" / "cpu.h"
        header.write_text("inline const char* here() { return __FILE__; }\n")
        monkeypatch.setattr(toolchain, "include_dirs", lambda at=folder: [at / "plugins"])
        monkeypatch.setenv("LLMBUILD_CACHE", str(folder / "cache"))
        monkeypatch.setenv("TMPDIR", str(folder))
        monkeypatch.setattr("tempfile.tempdir", None)
        monkeypatch.chdir(folder)
        source = '#include "thing/cpu.h"\nnamespace { int hidden = 3; }\n' + EXPORT
        source += "const char* answer() { return here() + hidden * 0; }\n"
        record = compile(source, native, folder / "out.so")
        assert not record.cached
        libraries.append((folder / "out.so").read_bytes())
    assert b"plugins/thing/cpu.h" in libraries[0]
    assert str(tmp_path).encode() not in libraries[0]
    assert libraries[0] == libraries[1]


def test_the_second_compile_comes_from_the_cache(tmp_path: Path, native: str) -> None:
    first = compile(SEVEN, native, tmp_path / "first.so")
    second = compile(SEVEN, native, tmp_path / "second.so")
    assert (first.cached, second.cached) == (False, True)
    assert first.key == second.key
    assert (tmp_path / "first.so").read_bytes() == (tmp_path / "second.so").read_bytes()


def test_the_key_follows_all_that_the_bytes_depend_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = find_compiler()
    header = tmp_path / "include" / "linear" / "cpu.h"
    header.parent.mkdir(parents=True)
    header.write_text("// one\n")
    monkeypatch.setattr(toolchain, "include_dirs", lambda: [tmp_path / "include"])

    def key(source: str = SEVEN, level: str = HERE[0], version: str = compiler.version) -> str:
        return toolchain.cache_key(source, level, toolchain.Compiler(compiler.command, version))

    keys = [key(), key(source=SEVEN + " "), key(version="g++ 99")]
    keys += [key(level=level) for level in HERE[1:]]
    header.write_text("// two\n")
    keys.append(key())
    header.rename(header.with_name("other.h"))
    keys.append(key())
    monkeypatch.setattr(toolchain, "__version__", "99.0")
    keys.append(key())
    monkeypatch.setattr(toolchain, "_FLAGS", ["-O1"])
    keys.append(key())
    assert len({*keys}) == len(keys)


@pytest.mark.parametrize("damage", ["flip", "truncate", "digest", "no digest", "no library"])
def test_a_damaged_cache_entry_is_rebuilt(
    tmp_path: Path, cache: Path, native: str, damage: str
) -> None:
    record = compile(SEVEN, native, tmp_path / "first.so")
    library = cache / "objects" / record.key / "engine.so"
    digest = cache / "objects" / record.key / "engine.so.sha256"
    good = library.read_bytes()
    if damage == "flip":
        library.write_bytes(good[:500] + bytes([good[500] ^ 1]) + good[501:])
    elif damage == "truncate":
        library.write_bytes(good[:-1])
    elif damage == "digest":
        digest.write_bytes(b"\xff" * 64)
    else:
        (digest if damage == "no digest" else library).unlink()
    assert not compile(SEVEN, native, tmp_path / "second.so").cached
    assert (tmp_path / "second.so").read_bytes() == good
    assert compile(SEVEN, native, tmp_path / "third.so").cached


def test_include_paths_of_the_environment_do_not_enter(
    tmp_path: Path, native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stray.h").write_text("#define ANSWER 8\n")
    monkeypatch.setenv("CPLUS_INCLUDE_PATH", str(tmp_path))
    source = "#if __has_include(<stray.h>)\n#error found\n#endif\n" + SEVEN
    compile(source, native, tmp_path / "out.so")
    assert answer(tmp_path / "out.so") == 7


def test_headers_of_the_plugins_are_found() -> None:
    assert [(path / "registry.py").is_file() for path in include_dirs()] == [True]


def test_refused_generated_code_is_kept_and_its_error_shown(
    tmp_path: Path, cache: Path, native: str
) -> None:
    source = EXPORT + "int answer() { return undeclared_name; }\n"
    with pytest.raises(InternalError, match="undeclared_name") as caught:
        compile(source, native, tmp_path / "out.so")
    (kept,) = (cache / "failed").iterdir()
    assert str(kept) in str(caught.value)
    assert kept.read_text() == source
    assert not (tmp_path / "out.so").exists()


def test_no_compiler_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"neither g\+\+ nor clang\+\+ .* install g\+\+"):
        find_compiler()


def test_cxx_that_is_not_there_is_refused_though_another_compiler_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O9")
    with pytest.raises(BuildError, match="CXX names 'no-such-compiler'"):
        find_compiler()


def test_cxx_is_called_with_its_options_from_any_folder(
    tmp_path: Path, native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = find_compiler()
    called = tmp_path / "called"
    write_script(tmp_path / "mine", f'echo "$1" >> {called}\nshift\nexec {real.command[0]} "$@"')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXX", "./mine --through")
    compile(SEVEN, native, tmp_path / "out.so")
    assert answer(tmp_path / "out.so") == 7
    assert {*called.read_text().split()} == {"--through"}
    assert find_compiler().name == real.name


def test_a_compiler_that_does_not_answer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(write_script(tmp_path / "broken", "echo no licence >&2; exit 3")))
    with pytest.raises(BuildError, match=r"status 3 and printed 'no licence'"):
        find_compiler()


def test_a_compiler_too_old_for_the_flags_is_the_users_to_change(
    tmp_path: Path, native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        'case "$*" in *--version*) echo old 4.8;; *) echo "bad value for -march"; exit 1;; esac'
    )
    monkeypatch.setenv("CXX", str(write_script(tmp_path / "old", script)))
    with pytest.raises(BuildError, match=r"old 4\.8 can't compile .* bad value"):
        compile(SEVEN, native, tmp_path / "out.so")


def test_levels_are_resolved_best_first_and_once(native: str) -> None:
    assert resolve_levels(["native"]) == [native]
    assert resolve_levels([*reversed(HERE), "native", native]) == HERE


@pytest.mark.parametrize("level", ["x86-64-v5", ELSEWHERE])
def test_a_level_that_cannot_be_compiled_here_is_refused(tmp_path: Path, level: str) -> None:
    for attempt in (
        lambda: resolve_levels([level]),
        lambda: compile(SEVEN, level, tmp_path / "out.so"),
    ):
        with pytest.raises(BuildError, match=level):
            attempt()


@pytest.mark.parametrize("level", HERE)
def test_a_level_that_the_processor_lacks_compiles_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    (tmp_path / "cpuinfo").write_text("flags : fpu\nFeatures : none\n")
    assert missing_flags(level, tmp_path / "cpuinfo") != []
    monkeypatch.setattr("llmbuild.runtime.isa.processor_flags", lambda cpuinfo: frozenset())
    compile(SEVEN, level, tmp_path / "out.so")
    assert (tmp_path / "out.so").read_bytes().startswith(b"\x7fELF")


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LLMBUILD_CACHE", str(tmp_path / "file"))
    with pytest.raises(BuildError, match="LLMBUILD_CACHE"):
        compile(SEVEN, native, tmp_path / "out.so")


def endless_compiler(tmp_path: Path) -> tuple[Path, Path]:
    """A compiler whose own child never ends, as the pass that g++ starts, and the file that this
    child writes its process id to."""
    pid = tmp_path / "pid"
    script = f'case "$*" in *--version*) echo endless 1.0;; *) sh -c \'echo $$ > {pid}.new;'
    script += f" mv {pid}.new {pid}; exec sleep 300'; exit 0;; esac"
    return write_script(tmp_path / "endless", script), pid


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or is a zombie that only its parent's wait keeps."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until(condition: Callable[[], bool], limit_s: float = 10.0) -> bool:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_compiler_ends_with_the_build(
    tmp_path: Path, native: str, number: signal.Signals
) -> None:
    compiler, pid_file = endless_compiler(tmp_path)
    build = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, pathlib; from llmbuild.builder.targets.cpu.toolchain import compile\n"
            "compile('', sys.argv[1], pathlib.Path(sys.argv[2]))",
            native,
            str(tmp_path / "out.so"),
        ],
        env=os.environ | {"CXX": str(compiler), "TMPDIR": str(tmp_path)},
        stderr=subprocess.DEVNULL,
    )
    assert wait_until(pid_file.exists)
    pid = int(pid_file.read_text())
    assert not has_ended(pid)
    build.send_signal(number)
    build.wait(10)
    assert wait_until(lambda: has_ended(pid))


def test_a_compiler_that_hangs_is_ended_with_its_children(
    tmp_path: Path, native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, pid_file = endless_compiler(tmp_path)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(toolchain, "TIMEOUT_S", 1)
    with pytest.raises(BuildError, match=r"endless 1\.0 didn't finish within 1 s"):
        compile(SEVEN, native, tmp_path / "out.so")
    assert wait_until(lambda: has_ended(int(pid_file.read_text())))


def test_nothing_is_left_in_the_temporary_folder(
    tmp_path: Path, native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    compile(SEVEN, native, tmp_path / "out.so")
    with pytest.raises(InternalError):
        compile("no C++", native, tmp_path / "out.so")
    assert list(scratch.iterdir()) == []
