"""What `llmbuild generate` says beside the text, and the options that shape it."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]

PROMPT = "abc"


def test_generate_tells_its_speed_on_standard_error_alone(
    tiny_engine: Path, run_llmbuild: Run
) -> None:
    done = run_llmbuild("generate", tiny_engine, PROMPT, "--max-tokens", 9)
    assert done.returncode == 0
    assert "tokens/s" not in done.stdout
    assert done.stderr.startswith("9 tokens (length), first after ")
    assert "tokens/s" in done.stderr


def test_one_token_has_no_rate(tiny_engine: Path, run_llmbuild: Run) -> None:
    done = run_llmbuild("generate", tiny_engine, PROMPT, "--max-tokens", 1, "--json")
    completion = json.loads(done.stdout)
    assert completion["ttft_ms"] > 0
    assert completion["tpot_ms"] is None


def test_time_per_token_is_of_the_tokens_after_the_first(
    tiny_engine: Path, run_llmbuild: Run
) -> None:
    done = run_llmbuild("generate", tiny_engine, PROMPT, "--max-tokens", 9, "--json")
    assert json.loads(done.stdout)["tpot_ms"] > 0


def test_text_ends_before_a_stop_string(tiny_engine: Path, run_llmbuild: Run) -> None:
    asked = ("generate", tiny_engine, PROMPT, "--max-tokens", 40, "--json")
    whole = json.loads(run_llmbuild(*asked).stdout)["text"]
    stop = whole[5:7]
    stopped = json.loads(run_llmbuild(*asked, "--stop", "\x01never", "--stop", stop).stdout)
    assert stopped["text"] == whole[: whole.index(stop)]
    assert stopped["finish_reason"] == "stop"


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_system_message_without_a_chat_is_refused(
    tiny_engine: Path, run_llmbuild: Run, more: list[str]
) -> None:
    done = run_llmbuild("generate", tiny_engine, PROMPT, "--system", "Be brief.", *more)
    assert done.returncode == 2
    assert done.stderr == "Error: --system is a message of a chat; give --chat too\n"
