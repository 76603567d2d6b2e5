"""The command line as a user meets it: processes, their output, their exit codes."""

import fcntl
import json
import os
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

RunLlmbuild = Callable[..., subprocess.CompletedProcess[str]]

PROMPT = "In the beginning"
EVAL_COMMANDS = ["perplexity", "compare", "retrieval"]
OPENING = ["generate", "verify", "inspect", "eval perplexity", "eval retrieval"]  # an engine
COMMANDS = ["compile", "inspect", "verify", "generate", "eval", "fetch", "plan"]
SECONDS = 120  # that a shared machine may take where an idle one needs a few


@pytest.fixture(scope="session")
def genesis(checkout: Path) -> Path:
    return checkout / "tests" / "data" / "genesis.txt"


Process = subprocess.Popen[str]


@contextmanager
def started(*arguments: object, stdout: int | IO[bytes], **environment: str) -> Iterator[Process]:
    """`llmbuild` running, its stderr in a pipe; killed at the latest when the context ends."""
    command = [sys.executable, "-m", "llmbuild", *map(str, arguments)]
    with subprocess.Popen(
        command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=os.environ | environment
    ) as process:
        try:
            yield process
        finally:
            process.kill()


# What each command is for.


def test_compile_prints_the_engine_path_and_how_it_went(tiny_engine: Path) -> None:
    *notes, path = (tiny_engine.parent / "compile.log").read_text().splitlines()
    assert path == str(tiny_engine)
    for stage in ("fetch", "read checkpoint", "passes", "pack weights", "publish"):
        assert any(re.fullmatch(rf"{stage} +\d+\.\d\d s", line) for line in notes), stage
    assert "    max_sequence_length: 64" in notes  # of the effective recipe, which fills it in
    assert re.fullmatch(r"peak memory \d+ MB", notes[-1])


def test_same_recipe_compiles_to_the_same_bytes(tmp_path: Path, tiny_engine: Path) -> None:
    """With another cache, another order of hashed sets and in another place, the default one: all
    but the report of how long it took, and the manifest's record of that report."""
    for name in ("recipe.yaml", "model"):
        (tmp_path / name).symlink_to(tiny_engine.parent / name)
    done = subprocess.run(
        [sys.executable, "-m", "llmbuild", "compile", "recipe.yaml"],
        cwd=tmp_path,
        env=os.environ | {"LLMBUILD_CACHE": str(tmp_path / "cache"), "PYTHONHASHSEED": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    again = tmp_path / "engines" / "tiny"
    assert done.stdout == f"{again}\n"
    assert "from the cache" not in done.stderr
    reports = {"report.json", "report.html"}
    first, second = ({f.relative_to(e) for f in e.rglob("*")} for e in (tiny_engine, again))
    assert first == second
    for path in first:
        if (again / path).is_file() and path.name not in {*reports, "manifest.json"}:
            assert (again / path).read_bytes() == (tiny_engine / path).read_bytes(), path
    manifests = [json.loads((e / "manifest.json").read_text()) for e in (tiny_engine, again)]
    for manifest in manifests:
        del manifest["digest"]
        for name in reports:
            del manifest["files"][name]
    assert manifests[0] == manifests[1]


def test_inspect_tells_what_the_engine_is(tiny_engine: Path, run_llmbuild: RunLlmbuild) -> None:
    done = run_llmbuild("inspect", tiny_engine)
    assert done.returncode == 0, done.stderr
    assert "llama, 2 layers, 6 heads, 2 KV heads, head_dim 14" in done.stdout
    told = json.loads(run_llmbuild("inspect", tiny_engine, "--json").stdout)
    kv_bytes_per_token = 2 * 2 * 2 * 14 * 4  # layers, K and V, heads, head_dim, fp32
    assert told["derived"]["kv_bytes_per_token"] == kv_bytes_per_token
    assert told["limits"]["max_sequence_length"] == 64


def test_verify_replays_the_steps(tiny_engine: Path, run_llmbuild: RunLlmbuild) -> None:
    done = run_llmbuild("verify", tiny_engine)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("verified: at most ")


def test_fetch_prints_the_local_path(tiny_engine: Path, run_llmbuild: RunLlmbuild) -> None:
    done = run_llmbuild("fetch", tiny_engine.parent / "recipe.yaml")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).samefile(tiny_engine.parent / "model")


def test_eval_prints_a_line_and_with_json_one_object(
    tiny_engine: Path, genesis: Path, run_llmbuild: RunLlmbuild
) -> None:
    asked = ("eval", "perplexity", tiny_engine, "--text", genesis, "--context", 32, "--windows", 5)
    done = run_llmbuild(*asked)
    assert done.returncode == 0, done.stderr
    result = json.loads(run_llmbuild(*asked, "--json").stdout.splitlines()[-1])
    assert done.stdout.startswith(f"perplexity {result['perplexity']:.4f} over 75 tokens ")
    assert (result["context"], result["windows"], result["num_scored_tokens"]) == (32, 5, 75)


def test_generate_prints_the_text_of_its_json(tiny_engine: Path, run_llmbuild: RunLlmbuild) -> None:
    asked = ("generate", tiny_engine, PROMPT, "--max-tokens", 20)
    done = run_llmbuild(*asked)
    assert done.returncode == 0, done.stderr
    completion = json.loads(run_llmbuild(*asked, "--json").stdout)
    assert done.stdout == completion["text"] + "\n"
    assert len(completion["token_ids"]) == 20
    assert completion["finish_reason"] == "length"
    assert completion["kv_bytes"] == (8 * 16 + 1) * 4 * 448


def test_seeded_sampling_repeats_itself(tiny_engine: Path, run_llmbuild: RunLlmbuild) -> None:
    asked = ("generate", tiny_engine, PROMPT, "--max-tokens", 20, "--temperature", 2, "--json")
    first, again, other = (
        json.loads(run_llmbuild(*asked, "--seed", seed).stdout)["token_ids"] for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    "command", [[], *([name] for name in COMMANDS), *(["eval", name] for name in EVAL_COMMANDS)]
)
def test_help_says_how_a_command_is_used(command: list[str], run_llmbuild: RunLlmbuild) -> None:
    done = run_llmbuild(*command, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: ")
    listed = {"": COMMANDS, "eval": EVAL_COMMANDS}.get("".join(command), ["Options:"])
    assert all(name in done.stdout for name in listed)


def test_output_that_is_no_terminal_has_no_escape_codes(
    tiny_engine: Path, run_llmbuild: RunLlmbuild
) -> None:
    recipe = tiny_engine.parent / "recipe.yaml"
    outputs = [(tiny_engine.parent / "compile.log").read_text()]
    for arguments in (
        ["--help"],
        ["inspect", tiny_engine],
        ["verify", tiny_engine],
        ["fetch", recipe],
        ["fetch", recipe, "--set", "model.source=path:absent"],
    ):
        done = run_llmbuild(*arguments, TERM="xterm-256color")
        outputs.append(done.stdout + done.stderr)
    assert all(outputs)
    assert not any("\x1b" in output for output in outputs)


# What goes wrong.


def assert_refused(done: subprocess.CompletedProcess[str], *named: str) -> None:
    """Exit code 2, nothing on stdout, one message that names what is wrong."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("Error") == 1
    assert "Traceback" not in done.stderr
    for text in named:
        assert text in done.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--max-tokens", "0"], ["max_tokens is 0", ">= 1"]),
        (["--temperature", "nan"], ["temperature is nan", ">= 0"]),
        (["--top-p", "0", "--temperature", "1"], ["top_p is 0.0", "(0, 1]"]),
        (["--seed", "-1", "--temperature", "1"], ["seed is -1"]),
        (["--seed", "1", "--top-k", "5"], ["--top-k and --seed would change nothing"]),
        (["--top-p", "0.5"], ["--top-p would change nothing", "--temperature above 0"]),
        (["--max-tokens", "49"], ["16 tokens", "65 together", "max_sequence_length is 64"]),
        (["--kv-memory", "4KB", "--max-tokens", "9"], ["6 KV blocks", "the pool has 1"]),
        (["--kv-memory", "1KiB"], ["kv_memory is 1024 bytes", "3584"]),
        (["--kv-memory", "lots"], ["'lots' isn't a size", "512MiB"]),
        (["--threads", "0"], ["num_threads is 0", ">= 1"]),
        (["--chat"], ["no chat template"]),
        (["--chat", "--json"], ["no chat template"]),
    ],
    ids=" ".join,
)
def test_generate_refuses_what_it_cannot_do(
    tiny_engine: Path, run_llmbuild: RunLlmbuild, arguments: list[str], named: list[str]
) -> None:
    assert_refused(run_llmbuild("generate", tiny_engine, PROMPT, *arguments), *named)


def test_generate_refuses_an_empty_prompt(tiny_engine: Path, run_llmbuild: RunLlmbuild) -> None:
    assert_refused(run_llmbuild("generate", tiny_engine, ""), "the prompt is empty")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--context", "65"], ["context is 65", "64"]),
        (["--context", "2"], ["context is 2", "3"]),
        (["--context", "8", "--windows", "0"], ["windows is 0", "at least 1"]),
        (["--context", "8", "--threads", "0"], ["num_threads is 0", ">= 1"]),
        (["--context", "8", "--text", "absent.txt"], ["absent.txt", "No such file"]),
    ],
    ids=" ".join,
)
def test_eval_refuses_what_it_cannot_do(
    tiny_engine: Path,
    genesis: Path,
    run_llmbuild: RunLlmbuild,
    arguments: list[str],
    named: list[str],
) -> None:
    done = run_llmbuild("eval", "perplexity", tiny_engine, "--text", genesis, *arguments)
    assert_refused(done, *named)


@pytest.mark.parametrize("command", OPENING)
def test_what_is_no_engine_is_refused_by_every_command(
    tmp_path: Path, genesis: Path, run_llmbuild: RunLlmbuild, command: str
) -> None:
    more = {"generate": [PROMPT], "eval perplexity": ["--text", genesis]}.get(command, [])
    (tmp_path / "empty").mkdir()
    for name, named in (("absent", "doesn't exist"), ("empty", "has no manifest.json")):
        done = run_llmbuild(*command.split(), tmp_path / name, *more)
        assert_refused(done, str(tmp_path / name), named)


@pytest.mark.parametrize("command", OPENING)
def test_flipped_byte_is_refused_by_every_command_with_both_hashes(
    tmp_path: Path, tiny_engine: Path, genesis: Path, run_llmbuild: RunLlmbuild, command: str
) -> None:
    more = {"generate": [PROMPT], "eval perplexity": ["--text", genesis]}.get(command, [])
    engine = shutil.copytree(tiny_engine, tmp_path / "engine")
    weights = engine / "rank0" / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    done = run_llmbuild(*command.split(), engine, *more)
    assert_refused(done, "weights.safetensors: sha256")
    assert len(set(re.findall(r"\b[0-9a-f]{64}\b", done.stderr))) == 2


BAD_OVERRIDES = [
    ("limits.max_tokens=3", ["limits.max_tokens", "nearest known key"]),
    ("precision=int3", ["precision", "int3", "fp32 or bf16"]),
    ("precision", ["precision", "KEY.PATH=VALUE"]),
    ("model.source=path:absent", ["path:absent"]),
]


@pytest.mark.parametrize(("override", "named"), BAD_OVERRIDES)
def test_fetch_refuses_a_bad_override(
    tiny_engine: Path, run_llmbuild: RunLlmbuild, override: str, named: list[str]
) -> None:
    done = run_llmbuild("fetch", tiny_engine.parent / "recipe.yaml", "--set", override)
    assert_refused(done, *named)


@pytest.mark.parametrize(("override", "named"), BAD_OVERRIDES[:1])
def test_compile_refuses_a_bad_override(
    tmp_path: Path,
    tiny_engine: Path,
    run_llmbuild: RunLlmbuild,
    override: str,
    named: list[str],
) -> None:
    recipe = tiny_engine.parent / "recipe.yaml"
    done = run_llmbuild("compile", recipe, "-o", tmp_path / "out", "--set", override)
    assert_refused(done, *named)
    assert list(tmp_path.iterdir()) == []


def test_recipe_that_is_not_there_is_refused(tmp_path: Path, run_llmbuild: RunLlmbuild) -> None:
    assert_refused(run_llmbuild("fetch", tmp_path / "absent.yaml"), "absent.yaml", "No such file")


def test_a_tolerance_below_rounding_is_the_recipes_fault_and_leaves_the_engine_that_was_there(
    tmp_path: Path, tiny_engine: Path, run_llmbuild: RunLlmbuild
) -> None:
    """No two orders of summation agree to 1e-12."""
    engine = shutil.copytree(tiny_engine, tmp_path / "engine")
    done = run_llmbuild(
        *("compile", tiny_engine.parent / "recipe.yaml", "-o", engine),
        *("--set", "verify.tolerance=1e-12"),
        LLMBUILD_CACHE=str(tiny_engine.parent / "cache"),
    )
    assert done.returncode == 2
    assert "verify.tolerance: given 1e-12; logits differ by " in done.stderr
    assert "give more, or leave it out for 0.0001" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == [engine]
    manifest = "manifest.json"
    assert (engine / manifest).read_bytes() == (tiny_engine / manifest).read_bytes()


def test_more_threads_than_the_system_gives_are_refused(tiny_engine: Path) -> None:
    """Each thread's stack takes 8 MiB of addresses, of which there are 4 GiB here."""
    stack, addresses = 8 << 20, 4 << 30

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_STACK, (stack, stack))
        resource.setrlimit(resource.RLIMIT_AS, (addresses, addresses))

    command = [sys.executable, "-m", "llmbuild", "generate", str(tiny_engine), PROMPT]
    done = subprocess.run(
        [*command, "--max-tokens", "3", "--threads", "1000"],
        preexec_fn=limit,
        capture_output=True,
        text=True,
        check=False,
    )
    warning, error = done.stderr.strip().splitlines()
    assert warning.startswith("Warning: num_threads is 1000")
    assert error.startswith("Error: can't start 1000 threads")
    assert "give fewer threads" in error
    assert (done.returncode, done.stdout) == (2, "")


# Streams and signals.


@pytest.fixture
def packets() -> Iterator[tuple[int, int]]:
    """A pipe that keeps writes apart and holds one: its writer waits until that is read."""
    reader, writer = os.pipe2(os.O_DIRECT | os.O_CLOEXEC)
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, select.PIPE_BUF)
    yield reader, writer
    os.close(reader)


def read_packet(reader: int) -> bytes:
    ready, _, _ = select.select([reader], [], [], SECONDS)
    assert ready, f"nothing was written in {SECONDS} s"
    return os.read(reader, select.PIPE_BUF)


def test_generate_writes_text_as_it_comes(
    tiny_engine: Path, packets: tuple[int, int], run_llmbuild: RunLlmbuild
) -> None:
    reader, writer = packets
    asked = ("generate", tiny_engine, PROMPT, "--max-tokens", 40)
    with started(*asked, stdout=writer) as process:
        os.close(writer)
        written = [read_packet(reader)]
        assert process.poll() is None, "it ended before its first text was taken"
        while packet := read_packet(reader):
            written.append(packet)
        assert process.wait(SECONDS) == 0
    assert len(written) >= 5  # a call of the engine runs up to 8 steps
    assert b"".join(written).decode() == run_llmbuild(*asked).stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_generate_ends_quietly(
    tiny_engine: Path, packets: tuple[int, int], number: signal.Signals
) -> None:
    reader, writer = packets
    with started("generate", tiny_engine, PROMPT, "--max-tokens", 40, stdout=writer) as process:
        os.close(writer)
        read_packet(reader)
        process.send_signal(number)
        while read_packet(reader):
            pass
        assert process.wait(SECONDS) == 128 + number
        assert process.stderr is not None
        assert process.stderr.read() == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_compile_ends_soon_and_leaves_nothing(
    tmp_path: Path, tiny_engine: Path, number: signal.Signals
) -> None:
    recipe, out = tiny_engine.parent / "recipe.yaml", tmp_path / "engines" / "out"
    cache = {"LLMBUILD_CACHE": str(tmp_path / "cache")}  # an empty one, so that g++ has to run
    with started(*("compile", recipe, "-o", out), stdout=subprocess.DEVNULL, **cache) as process:
        assert process.stderr is not None
        while not process.stderr.readline().startswith("lower"):
            assert process.poll() is None
        assert len(list(out.parent.iterdir())) == 1
        time.sleep(0.3)
        process.send_signal(number)
        sent = time.monotonic()
        assert process.wait(SECONDS) == 128 + number
        assert time.monotonic() - sent < 10
        assert process.stderr.read() == ""
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize("command", ["generate", "inspect"])
def test_reader_that_leaves_early_is_no_error(tiny_engine: Path, command: str) -> None:
    more = [PROMPT, "--max-tokens", 40] if command == "generate" else []
    reader, writer = os.pipe()
    os.close(reader)
    with started(command, tiny_engine, *more, stdout=writer) as process:
        os.close(writer)
        process.wait(SECONDS)
        assert process.stderr is not None
        assert process.stderr.read() == ""
