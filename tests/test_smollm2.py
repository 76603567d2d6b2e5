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

from llmbuild import LLM, Completion, SamplingParams
from llmbuild.builder.compile import compile

pytestmark = pytest.mark.slow

RunLlmbuild = Callable[..., subprocess.CompletedProcess[str]]

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
    'She opened the old book and read aloud: "',
    "Die Würde des Menschen ist",
    "import numpy as np\n\nx = np.linspace(0, 1, 11)\n",
    "x",
]
GENESIS_CHARACTERS = [101, 229, 350, 613]  # whose lengths make the 20 prompts differ more
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


def greedy_choices(model: Any, prompt_ids: list[int], answer_ids: list[int]) -> list[int]:
    """The likeliest token by transformers at each place of an answer, given what stands before.

    They are the answer if and only if the answer is the greedy one, by induction from its start.
    """
    tokens = torch.tensor([[*prompt_ids, *answer_ids[:-1]]])
    with torch.no_grad():
        logits = model(tokens).logits[0, len(prompt_ids) - 1 :]
    choices: list[int] = logits.argmax(dim=-1).tolist()
    return choices


@pytest.fixture(scope="session")
def prompts(checkout: Path) -> list[str]:
    text = (checkout / "tests" / "data" / "genesis.txt").read_text()
    return PROMPTS + [text[:length] for length in GENESIS_CHARACTERS]


@pytest.fixture(scope="session")
def answers_alone(fp32_engine: Path, prompts: list[str]) -> list[Completion]:
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    with LLM(fp32_engine) as llm:
        return [llm.generate(prompt, params) for prompt in prompts]


def test_prompts_have_the_tokens_of_transformers(
    tokenizer: Any, prompts: list[str], answers_alone: list[Completion]
) -> None:
    assert len(prompts) == 20
    for prompt, answer in zip(prompts, answers_alone, strict=True):
        expected = tokenizer(prompt, add_special_tokens=False).input_ids
        assert list(answer.prompt_token_ids) == expected


def test_greedy_tokens_equal_transformers_alone(
    fp32_model: Any, answers_alone: list[Completion]
) -> None:
    for answer in answers_alone:
        got = list(answer.token_ids)
        assert len(got) == MAX_TOKENS
        assert got == greedy_choices(fp32_model, list(answer.prompt_token_ids), got)


def test_greedy_tokens_equal_transformers_together_under_preemption(
    fp32_engine: Path, fp32_model: Any, prompts: list[str]
) -> None:
    """The prompts take 1 to 10 blocks of 16 tokens and each answer up to 4 more; the pool has 24,
    and chunks of 7 tokens begin and end anywhere in a block."""
    lengths = [MAX_TOKENS - 2 * index for index in range(len(prompts))]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
    with LLM(fp32_engine, num_blocks=25, chunk_tokens=7) as llm:
        answers = llm.generate(prompts, params)
        llm.check()
    assert [len(answer.token_ids) for answer in answers] == lengths
    for answer in answers:
        got = list(answer.token_ids)
        assert got == greedy_choices(fp32_model, list(answer.prompt_token_ids), got)
    assert sum(answer.num_preemptions for answer in answers) > 0


def test_chat_answer_is_the_greedy_answer_of_transformers(
    fp32_engine: Path, fp32_model: Any, tokenizer: Any, run_llmbuild: RunLlmbuild
) -> None:
    prompt_ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_dict=False
    )
    done = run_llmbuild(
        "generate", fp32_engine, QUESTION, "--chat", "--max-tokens", MAX_TOKENS, "--json"
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["prompt_token_ids"] == prompt_ids
    assert answer["token_ids"] == greedy_choices(fp32_model, prompt_ids, answer["token_ids"])
    assert len(answer["token_ids"]) == MAX_TOKENS or answer["finish_reason"] == "eos"
    assert "sky" in answer["text"].lower()


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
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
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
