"""SmolLM2-135M-Instruct divided among ranks, against the engine of one rank: 9 query heads and 3 KV
heads, so that two ranks are uneven."""

from collections.abc import Callable
from pathlib import Path

import pytest

from llmbuild import LLM, SamplingParams
from llmbuild.builder.compile import compile

pytestmark = pytest.mark.slow

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Q: What is the largest planet of the solar system?\nA:",
    "x",
]
INT4 = "quantisation={scheme: w4a16, group_size: 64, method: rtn}"
INT8_KV = "kv_cache.dtype=int8"

Compiled = Callable[..., Path]


@pytest.fixture(scope="module")
def compiled(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """compiled(*overrides): the engine, made when first asked for."""
    root = tmp_path_factory.mktemp("smollm2")
    recipe = checkout / "recipes" / "smollm2-135m-fp32.yaml"
    engines: dict[tuple[str, ...], Path] = {}

    def build(*overrides: str) -> Path:
        limits = "limits={max_sequence_length: 512, max_step_tokens: 64, max_sequences: 8}"
        if overrides not in engines:
            out = root / f"engine-{len(engines)}"
            engines[overrides] = compile(recipe, out, [limits, *overrides])
        return engines[overrides]

    return build


def tokens(engine: Path, max_tokens: int) -> list[tuple[int, ...]]:
    """Of the prompts together, then one by one."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    with LLM(engine) as llm:
        together = llm.generate(PROMPTS, params)
        alone = [llm.generate(prompt, params) for prompt in PROMPTS]
    return [completion.token_ids for completion in (*together, *alone)]


@pytest.mark.parametrize("more", [(), (INT4,)], ids=["fp32", "int4"])
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (3, 1), (1, 2), (3, 2)])
def test_ranks_give_the_tokens_of_one(
    compiled: Compiled, tp: int, pp: int, more: tuple[str, ...]
) -> None:
    ranks = compiled(*more, f"parallel={{tp: {tp}, pp: {pp}}}")
    assert tokens(ranks, 48) == tokens(compiled(*more), 48)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (3, 1), (1, 2), (3, 2)])
def test_ranks_with_int8_kv_begin_with_the_tokens_of_one(
    compiled: Compiled, tp: int, pp: int
) -> None:
    """The last bit of a sum decides ties between codes of the KV cache, and with every token more
    of them have fallen differently: until some text goes on differently, too."""
    ranks = compiled(INT4, INT8_KV, f"parallel={{tp: {tp}, pp: {pp}}}")
    assert tokens(ranks, 24) == tokens(compiled(INT4, INT8_KV), 24)
