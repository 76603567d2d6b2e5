"""Generated engines under the compiler's sanitizers and valgrind: no access out of bounds, no
undefined behaviour, nothing read before it is written, and the reference's logits all the same."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from numpy.typing import NDArray

from llmbuild.builder.compile import compile
from llmbuild.builder.targets.cpu import toolchain
from llmbuild.runtime.batch import ARRAYS
from llmbuild.runtime.isa import supported_levels
from llmbuild.runtime.manifest import read_manifest
from llmbuild.runtime.replay import STEPS_FILE, load_steps, relative_difference

pytestmark = pytest.mark.slow

THREADS = 2
WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
VARIANTS: dict[str, dict[str, Any]] = {
    "int4, int8 KV": {
        "quantisation": {"scheme": "w4a8", "method": "rtn"},
        "kv_cache": {"dtype": "int8", "block_size": 16},
    },
    "int8, bf16 KV": {"quantisation": "w8a8", "kv_cache": {"dtype": "bf16", "block_size": 5}},
    "int4 weights alone": {
        "quantisation": {"scheme": "w4a16", "symmetric": False, "method": "rtn"}
    },
    "mixed KV": {
        "kv_cache": {
            "dtype": "int4",
            "block_size": 16,
            "overrides": [
                {"match": "*.k.0", "dtype": "int8-static"},
                {"match": "*.v.1", "dtype": "bf16"},
            ],
        },
        "calibration": {"sequences": 2, "length": 24},
    },
    "bf16": {"precision": "bf16"},
}
SANITIZED = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


@pytest.fixture(params=VARIANTS)
def engine(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    save_tiny_llama: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[Path, str]:
    """A tiny Llama's engine and its source."""
    recipe = save_tiny_llama(tmp_path / "source", **WIDE)
    content = yaml.safe_load(recipe.read_text()) | VARIANTS[request.param]
    if isinstance(content.get("quantisation"), str):
        content["quantisation"] = {"scheme": content["quantisation"], "group_size": 32}
    elif "quantisation" in content:
        content["quantisation"]["group_size"] = 32
    recipe.write_text(yaml.safe_dump(content))
    sources: list[str] = []
    original = toolchain.compile

    def noting(source: str, level: str, out: Path) -> toolchain.CompileRecord:
        sources.append(source)
        return original(source, level, out)

    monkeypatch.setattr(toolchain, "compile", noting)
    return compile(recipe, tmp_path / "engine"), sources[-1]  # before it, one that draws samples


def build(source: str, level: str, extra: list[str], folder: Path) -> Path:
    unit, program = folder / "driver.cpp", folder / f"driver-{level}"
    unit.write_text(source + (Path(__file__).parent / "engine_driver.cpp").read_text())
    flags = [flag for flag in toolchain.flags(level) if flag not in ("-shared", "-O3")]
    includes = [f"-I{root}" for root in toolchain.include_dirs()]
    command = [*toolchain.find_compiler().command, *flags, *extra, *includes]
    built = subprocess.run(
        [*command, str(unit), "-o", str(program)], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    return program


def run(root: Path, command: list[str], folder: Path) -> None:
    """Runs the verification steps; asserts that nothing is reported and the logits are right."""
    manifest, steps = read_manifest(root), load_steps(root / STEPS_FILE)
    raw = (root / manifest.ranks[0].weights).read_bytes()
    (folder / "weights").write_bytes(raw[8 + int.from_bytes(raw[:8], "little") :])
    kv_bytes = steps.num_blocks * manifest.kv.block_bytes
    numbers = [THREADS, manifest.vocab_size, steps.num_blocks, kv_bytes, len(steps.batches)]
    for batch in steps.batches:
        arrays: list[NDArray[np.int32]] = [np.ravel(getattr(batch, name)) for name in ARRAYS]
        head = (batch.num_tokens, batch.num_sequences, len(batch.logit_rows))
        length = sum(map(len, arrays))
        numbers += [*head, batch.block_tables.shape[1], length, *np.concatenate(arrays).tolist()]
    (folder / "steps").write_bytes(np.array(numbers, np.int32).tobytes())
    files = [str(folder / name) for name in ("weights", "steps", "logits")]
    done = subprocess.run([*command, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    logits = np.fromfile(folder / "logits", np.float32).reshape(-1, manifest.vocab_size)
    expected = np.concatenate(steps.logits)
    assert relative_difference(logits[:, steps.columns], expected) <= steps.tolerance


@pytest.mark.parametrize("level", supported_levels())
def test_generated_code_is_clean_under_address_and_undefined_sanitizers(
    engine: tuple[Path, str], level: str, tmp_path: Path
) -> None:
    root, source = engine
    run(root, [str(build(source, level, SANITIZED, tmp_path))], tmp_path)


@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind isn't installed")
@pytest.mark.parametrize("level", [x for x in ("x86-64-v3", "x86-64") if x in supported_levels()])
def test_generated_code_reads_nothing_before_it_is_written(
    engine: tuple[Path, str], level: str, tmp_path: Path
) -> None:
    """valgrind knows no AVX-512. KV slots that no step wrote hold zeros here, as in an engine."""
    root, source = engine
    program = build(source, level, ["-O2", "-g"], tmp_path)
    command = ["valgrind", "--error-exitcode=9", "--fair-sched=yes", "--leak-check=full"]
    run(root, [*command, str(program)], tmp_path)
