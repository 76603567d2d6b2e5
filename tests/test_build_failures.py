"""A build that fails, or is killed, publishes nothing and says what is wrong."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmbuild.builder.compile import compile
from llmbuild.errors import EngineError, UserError
from llmbuild.runtime.api import LLM
from llmbuild.runtime.manifest import Manifest, encode, seal

RunLlmbuild = Callable[..., subprocess.CompletedProcess[str]]
Tensors = dict[str, np.ndarray]

GATE = "model.layers.1.mlp.gate_proj.weight"


def refusal(recipe: Path) -> str:
    """What the build of a recipe says as it refuses it. Nothing may be left of the build.

    A UserError is what the command line prints alone, with exit code 2 (tests/test_cli.py).
    """
    out = recipe.parent / "engines" / "out"
    with pytest.raises(UserError) as refused:
        compile(recipe, out)
    assert not out.exists()
    assert list(out.parent.iterdir()) == []
    return str(refused.value)


def change_tensors(recipe: Path, change: Callable[[Tensors], object]) -> None:
    path = recipe.parent / "model" / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def change_config(recipe: Path, **values: Any) -> None:
    path = recipe.parent / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture
def recipe(tmp_path: Path, save_tiny_llama: Callable[..., Path]) -> Path:
    return save_tiny_llama(tmp_path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        pytest.param(
            lambda tensors: tensors.pop(GATE), [f"missing: {GATE}", "(80, 48)"], id="removed"
        ),
        pytest.param(
            lambda tensors: tensors.update({"model.layers.2.extra": np.zeros(3, np.float32)}),
            ["not part of the model: model.layers.2.extra"],
            id="added",
        ),
        pytest.param(
            lambda tensors: tensors.update({GATE: np.zeros((81, 48), np.float32)}),
            [f"misshapen: {GATE}", "(81, 48)", "(80, 48)"],
            id="misshapen",
        ),
        pytest.param(
            lambda tensors: tensors.update({GATE: np.zeros((80, 48), np.int32)}),
            [GATE, "I32"],
            id="integers",
        ),
    ],
)
def test_checkpoint_that_does_not_fit_its_config_is_refused(
    recipe: Path, change: Callable[[Tensors], object], named: list[str]
) -> None:
    change_tensors(recipe, change)
    message = refusal(recipe)
    assert all(text in message for text in named), message


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"attention_sinks": 4}, ["attention_sinks (4)", "doesn't understand"]),
        (
            {"rope_scaling": {"rope_type": "spiral", "factor": 2.0}},
            ["rope_type is 'spiral'", "'llama3'"],
        ),
        ({"num_key_value_heads": 4}, ["num_key_value_heads is 4", "divisor of", "6"]),
        ({"num_attention_heads": 5, "head_dim": None}, ["num_", "is", "5"]),
        ({"model_type": "mamba"}, ["'mamba'", "llama", "qwen3"]),
        ({"vocab_size": "257"}, ["vocab_size is '257'", "integer"]),
    ],
    ids=["unknown key", "unknown RoPE", "KV heads", "heads", "unknown family", "wrong type"],
)
def test_config_that_is_not_understood_is_refused(
    recipe: Path, values: dict[str, Any], named: list[str]
) -> None:
    change_config(recipe, **values)
    message = refusal(recipe)
    assert all(text in message for text in named), message


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "model.safetensors"])
def test_checkpoint_without_one_of_its_files_is_refused(recipe: Path, name: str) -> None:
    (recipe.parent / "model" / name).unlink()
    assert name.partition(".")[0] in refusal(recipe)


def test_checkpoint_cut_short_is_refused(recipe: Path) -> None:
    path = recipe.parent / "model" / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    assert "model.safetensors" in refusal(recipe)


def test_machine_without_a_compiler_is_told_what_to_install(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UserError, match=r"needs a C\+\+17 compiler: install g\+\+"):
        compile(recipe, tmp_path / "engines" / "out")
    assert not (tmp_path / "engines").exists()


def test_output_path_in_use_is_refused_and_left_alone(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(UserError, match="mine is a directory that isn't an engine"):
        compile(recipe, tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


@pytest.mark.slow
def test_killed_compile_never_leaves_a_part_of_an_engine(
    recipe: Path, tmp_path: Path, run_llmbuild: RunLlmbuild
) -> None:
    engines = tmp_path / "engines"
    command = [sys.executable, "-m", "llmbuild", "compile", str(recipe), "-o"]

    def start(name: str, cache: str) -> subprocess.Popen[bytes]:
        """A compile with a cache of its own: an empty one lets the compiler run."""
        return subprocess.Popen(
            [*command, str(engines / name)],
            env=os.environ | {"LLMBUILD_CACHE": str(tmp_path / cache)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    begun = time.monotonic()
    assert start("whole", "cache").wait() == 0
    duration = time.monotonic() - begun
    num_staged = 0
    for index in range(6):
        process = start("out", f"cache-{index}")
        time.sleep(duration * (index + 0.7) / 6)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if (engines / "out").exists():
            assert run_llmbuild("verify", engines / "out").returncode == 0
        num_staged += sum(path.name.startswith(".out.staging-") for path in engines.iterdir())
    assert num_staged > 0, "every kill came before the build's first file or after its last"
    assert start("out", "cache").wait() == 0
    assert {path.name for path in engines.iterdir()} == {"whole", "out"}
    assert run_llmbuild("verify", engines / "out").returncode == 0


RESEALED: dict[str, Callable[[dict[str, Any]], object]] = {
    "more tokens": lambda m: m["limits"].update(max_step_tokens=25),
    "more sequences": lambda m: m["limits"].update(max_sequences=9),
    "longer sequences": lambda m: m["limits"].update(max_sequence_length=65),
    "another block": lambda m: m["kv"].update(block_size=8),
    "another KV dtype": lambda m: [
        run.update(v_dtype="bf16") for layer in m["kv"]["layers"] for run in layer["heads"]
    ],
    "fewer logits": lambda m: [
        *(each.update(vocab_size=100) for each in (m, m["model"])),
        m["ranks"][0]["tokens"].update(count=100),
    ],
    "another arena": lambda m: m["ranks"][0].update(arena_bytes=1),
}


@pytest.mark.parametrize("change", RESEALED.values(), ids=RESEALED)
def test_a_resealed_manifest_at_odds_with_the_executable_is_refused(
    tiny_engine: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    engine = tmp_path / "engine"
    shutil.copytree(tiny_engine, engine)
    content = json.loads((engine / "manifest.json").read_text())
    change(content)
    manifest = seal(msgspec.convert(content, Manifest))
    (engine / "manifest.json").write_bytes(encode(manifest))
    with pytest.raises(EngineError, match=r"was compiled for .*, and the manifest says "):
        LLM(engine)


def test_a_forked_process_is_told_to_open_the_engine_itself(tiny_engine: Path) -> None:
    code = (
        "import os, sys, llmbuild\n"
        "llm = llmbuild.LLM(sys.argv[1], num_threads=2)\n"
        "child = os.fork()\n"
        "if child:\n"
        "    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "try:\n"
        "    llm.generate('hi', llmbuild.SamplingParams(max_tokens=4))\n"
        "except llmbuild.errors.UserError as error:\n"
        "    os._exit(7 if 'open it here' in str(error) else 1)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tiny_engine)], timeout=60, check=False)
    assert done.returncode == 7


def test_output_to_a_full_disk_is_one_message(run_llmbuild: Callable[..., Any]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "llmbuild", "models"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "No space left on device" in done.stderr
