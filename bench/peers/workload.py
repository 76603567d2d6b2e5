"""What every engine is asked to do: token ids, the same in each run, greedy, EOS ignored."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

SEED = 7
TOKEN_IDS = range(64, 49152)  # of SmolLM2's vocabulary, without its special tokens
DECODED = 128
BLOCK_TOKENS = 64  # a request's KV memory is a multiple of it


@dataclass(frozen=True)
class Case:
    """Requests that are submitted together. repeats: how often in one run, whose median counts."""

    name: str
    measure: Literal["prefill", "decode", "serving"]
    prompts: list[list[int]]
    new_tokens: list[int]
    repeats: int = 1

    @property
    def measured_tokens(self) -> int:
        """Those of the rate: the prompt's, the output's after the first, or all output's."""
        match self.measure:
            case "prefill":
                return len(self.prompts[0])
            case "decode":
                return self.new_tokens[0] - 1
            case "serving":
                return sum(self.new_tokens)

    def tokens_per_s(self, first_s: float, total_s: float) -> float:
        """first_s, total_s: from submission to the first token, and to the last."""
        match self.measure:
            case "prefill":
                return self.measured_tokens / first_s
            case "decode":
                return self.measured_tokens / (total_s - first_s)
            case "serving":
                return self.measured_tokens / total_s


def make_cases() -> list[Case]:
    """A prompt of 512; 128 tokens after a short and after a long prompt; mixed requests."""
    rng = random.Random(SEED)

    def prompt(length: int) -> list[int]:
        return rng.choices(TOKEN_IDS, k=length)

    def mixed(count: int) -> Case:
        prompts = [prompt(rng.randint(64, 256)) for _ in range(count)]
        new_tokens = [rng.randint(64, 128) for _ in range(count)]
        return Case(f"requests-{count}", "serving", prompts, new_tokens)

    return [
        Case("prefill-512", "prefill", [prompt(512)], [1], repeats=5),
        Case("decode-128", "decode", [prompt(128)], [1 + DECODED]),
        Case("decode-2048", "decode", [prompt(2048)], [1 + DECODED]),
        mixed(8),
        mixed(32),
    ]


def max_sequence(cases: Sequence[Case]) -> int:
    """Tokens of the longest request, in whole blocks."""
    return max(length for case in cases for length in _lengths(case))


def max_kv_tokens(cases: Sequence[Case]) -> int:
    """Tokens, in whole blocks, of all requests of the largest case."""
    return max(sum(_lengths(case)) for case in cases)


def _lengths(case: Case) -> list[int]:
    return [
        -(-(len(prompt) + new) // BLOCK_TOKENS) * BLOCK_TOKENS
        for prompt, new in zip(case.prompts, case.new_tokens, strict=True)
    ]
