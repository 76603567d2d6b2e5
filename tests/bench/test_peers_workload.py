"""The peers' workload: the same for every engine and on every day, of the sizes that it claims."""

import hashlib
import json

import pytest

from bench.peers.workload import Case, make_cases, max_kv_tokens, max_sequence

VOCABULARY = 49152
DIGEST = "ccd3b863ae918f6c1b2110436c26afd29d3230c60565244da09799bbfe703a3e"


def by_name(name: str) -> Case:
    (case,) = (case for case in make_cases() if case.name == name)
    return case


def test_token_ids_never_change() -> None:
    """Figures of different days are of the same work; a change here is a new benchmark."""
    requests = [[case.name, case.prompts, case.new_tokens] for case in make_cases()]
    assert hashlib.sha256(json.dumps(requests).encode()).hexdigest() == DIGEST


def test_token_ids_are_ordinary_ones_of_the_vocabulary() -> None:
    ids = {token for case in make_cases() for prompt in case.prompts for token in prompt}
    assert min(ids) > 16  # SmolLM2's special tokens come first
    assert max(ids) < VOCABULARY


@pytest.mark.parametrize("length", [128, 2048])
def test_decode_is_128_tokens_after_the_first(length: int) -> None:
    case = by_name(f"decode-{length}")
    assert [len(prompt) for prompt in case.prompts] == [length]
    assert case.measured_tokens == 128
    assert case.new_tokens == [129]


@pytest.mark.parametrize("count", [8, 32])
def test_mixed_requests_have_the_lengths_that_they_claim(count: int) -> None:
    case = by_name(f"requests-{count}")
    assert len(case.prompts) == len(case.new_tokens) == count
    assert all(64 <= len(prompt) <= 256 for prompt in case.prompts)
    assert all(64 <= new <= 128 for new in case.new_tokens)
    assert len(set(case.new_tokens)) > 1


def test_rates_count_what_each_case_measures() -> None:
    """First token after 0.5 s, the last after 2.5 s."""
    assert by_name("prefill-512").tokens_per_s(0.5, 2.5) == pytest.approx(1024)
    assert by_name("decode-128").tokens_per_s(0.5, 2.5) == pytest.approx(64)
    case = by_name("requests-8")
    assert case.tokens_per_s(0.5, 2.5) == pytest.approx(sum(case.new_tokens) / 2.5)


def test_reserved_tokens_hold_every_request_in_whole_blocks() -> None:
    cases = [
        Case("one", "decode", [[1] * 64], [1]),
        Case("two", "serving", [[1] * 60, [1] * 10], [4, 55]),
    ]
    assert max_sequence(cases) == 128  # 65 tokens are two blocks of 64
    assert max_kv_tokens(cases) == 64 + 128  # 64 tokens, 65 tokens
