"""SmolLM2-135M-Instruct, a real model: its engines against transformers on the same GGUF file."""

import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmbuild import LLM, SamplingParams
from llmbuild.builder.compile import compile

pytestmark = pytest.mark.slow

RunLlmbuild = Callable[..., "subprocess.CompletedProcess[str]"]

CONTEXT = 512
MAX_TOKENS = 64
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "1, 1, 2, 3, 5, 8, 13,",
    "Q: What is the largest planet of the solar system?\nA:",
    "Dear Sir or Madam,\n\nI am writing to",
    "The three primary colours are",
    "In 1969, the first human",
    "To make bread you need flour, water,",
    "Le chat est assis sur",
    "SELECT name, age FROM people WHERE",
    "A photon is",
    'She opened the old book and read aloud: "',
    "The opposite of hot is",
    "Die Würde des Menschen ist",
    "import numpy as np\n\nx = np.linspace(0, 1, 11)\n",
    "Shakespeare wrote",
    "Roses are red,\nviolets are blue,\n",
    "x",
]
QUESTION = "Explain in a few sentences why the sky is blue."


@pytest.fixture(scope="session")
def gguf(checkout: Path, run_llmbuild: RunLlmbuild) -> Path:
    done = run_llmbuild("fetch", checkout / "recipes" / "smollm2-135m-fp32.yaml")
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


@pytest.fixture(scope="session")
def fp32_engine(checkout: Path, gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = checkout / "recipes" / "smollm2-135m-fp32.yaml"
    return compile(recipe, tmp_path_factory.mktemp("smollm2") / "fp32")


@pytest.fixture(scope="session")
def bf16_engine(checkout: Path, gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = checkout / "recipes" / "smollm2-135m.yaml"
    return compile(recipe, tmp_path_factory.mktemp("smollm2") / "bf16")


@pytest.fixture(scope="session")
def tokenizer(gguf: Path) -> Any:
    return AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)


@pytest.fixture(scope="session")
def fp32_model(gguf: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    ).eval()


def greedy(model: Any, prompt_ids: list[int], count: int) -> list[int]:
    """The next `count` tokens by transformers, one forward a token, EOS being a token like any."""
    tokens, past = torch.tensor([prompt_ids]), None
    generated: list[int] = []
    with torch.no_grad():
        for _ in range(count):
            out = model(tokens, past_key_values=past, use_cache=True)
            past = out.past_key_values
            generated.append(int(out.logits[0, -1].argmax()))
            tokens = torch.tensor([generated[-1:]])
    return generated


@pytest.fixture(scope="session")
def prompt_ids(tokenizer: Any) -> list[list[int]]:
    return [tokenizer(prompt, add_special_tokens=False).input_ids for prompt in PROMPTS]


@pytest.fixture(scope="session")
def expected(fp32_model: Any, prompt_ids: list[list[int]]) -> list[list[int]]:
    return [greedy(fp32_model, ids, MAX_TOKENS) for ids in prompt_ids]


def test_prompts_have_the_tokens_of_transformers(
    fp32_engine: Path, prompt_ids: list[list[int]]
) -> None:
    with LLM(fp32_engine) as llm:
        completions = llm.generate(PROMPTS, SamplingParams(max_tokens=1))
    assert [list(c.prompt_token_ids) for c in completions] == prompt_ids


def test_greedy_tokens_equal_transformers_alone(
    fp32_engine: Path, prompt_ids: list[list[int]], expected: list[list[int]]
) -> None:
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    with LLM(fp32_engine) as llm:
        got = [list(llm.generate(ids, params).token_ids) for ids in prompt_ids]
    assert got == expected


def test_greedy_tokens_equal_transformers_together_under_preemption(
    fp32_engine: Path, prompt_ids: list[list[int]], expected: list[list[int]]
) -> None:
    """20 sequences of 65 to 82 tokens would take 5 or 6 blocks of 16 each; the pool has 41."""
    lengths = [MAX_TOKENS - 3 * index for index in range(len(PROMPTS))]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
    with LLM(fp32_engine, num_blocks=42, chunk_tokens=7) as llm:
        completions = llm.generate(prompt_ids, params)
        llm.check()
    got = [list(completion.token_ids) for completion in completions]
    assert got == [tokens[:n] for tokens, n in zip(expected, lengths, strict=True)]
    assert sum(completion.num_preemptions for completion in completions) > 0


def test_chat_answer_is_the_greedy_answer_of_transformers(
    fp32_engine: Path, fp32_model: Any, tokenizer: Any, run_llmbuild: RunLlmbuild
) -> None:
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_dict=False
    )
    answer = greedy(fp32_model, prompt, MAX_TOKENS)
    done = run_llmbuild(
        "generate", fp32_engine, QUESTION, "--chat", "--max-tokens", MAX_TOKENS, "--json"
    )
    completion = json.loads(done.stdout)
    assert completion["prompt_token_ids"] == prompt
    ended = completion["finish_reason"] == "eos"
    assert completion["token_ids"] == answer[: len(completion["token_ids"])]
    assert len(completion["token_ids"]) == MAX_TOKENS or ended
    assert "sky" in completion["text"].lower()


def test_bf16_perplexity_is_that_of_transformers(
    bf16_engine: Path, gguf: Path, tokenizer: Any, checkout: Path, run_llmbuild: RunLlmbuild
) -> None:
    text = checkout / "tests" / "data" / "genesis.txt"
    done = run_llmbuild(
        "eval", "perplexity", bf16_engine, "--text", text, "--context", CONTEXT, "--json"
    )
    got = json.loads(done.stdout.splitlines()[-1])
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16
    ).eval()
    ids = tokenizer(text.read_text(), add_special_tokens=False).input_ids
    want, windows = perplexity(model, ids)
    print(f"\nperplexity: {got['perplexity']:.4f}, transformers' {want:.4f}")
    assert got["windows"] == windows
    assert got["perplexity"] == pytest.approx(want, rel=3e-3)


def perplexity(model: Any, ids: list[int]) -> tuple[float, int]:
    """By transformers, over whole windows, the second half of each scored; and their number."""
    windows = np.array(ids[: len(ids) // CONTEXT * CONTEXT]).reshape(-1, CONTEXT)
    nll = []
    with torch.no_grad():
        for window in torch.from_numpy(windows):
            logits = model(window[None]).logits[0].float()
            losses = torch.nn.functional.cross_entropy(logits[:-1], window[1:], reduction="none")
            nll += losses[CONTEXT // 2 :].double().tolist()
    return math.exp(math.fsum(nll) / len(nll)), len(windows)
