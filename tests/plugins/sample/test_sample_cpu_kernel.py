import numpy as np
import pytest
from kernel_harness import EACH_LEVEL, KernelCompiler, Library

WIDTHS = (1, 2, 15, 16, 17, 1009, 1024, 1025, 3072, 5003)

SOURCE = """
#include "sample/cpu.h"
template <int N>
void likeliest(int threads, const float* logits, int32_t* tokens, int rows) {
  std::vector<Best> parts(size_t(threads) * rows);
  with_team(threads, [&](const Worker& worker) {
    best_of_columns<N>(worker, logits, parts.data(), rows);
    worker.barrier();
    if (worker.id > 0) return;
    for (int r = 0; r < rows; ++r) tokens[r] = best_token(parts.data(), threads, rows, r);
  });
}
""" + "\n".join(
    f'extern "C" void likeliest_{n}(int threads, const float* logits, int32_t* tokens, int rows) '
    f"{{ likeliest<{n}>(threads, logits, tokens, rows); }}"
    for n in WIDTHS
)


@pytest.fixture(scope="module", params=EACH_LEVEL)
def library(request: pytest.FixtureRequest, compiler: KernelCompiler) -> Library:
    return compiler.library(SOURCE, request.param)


def likeliest(library: Library, logits: np.ndarray, threads: int) -> list[int]:
    rows, width = logits.shape
    tokens = np.full(rows, 10**6, np.int32)
    library.call(f"likeliest_{width}", threads, logits.astype(np.float32), tokens, rows)
    return tokens.tolist()


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("width", WIDTHS)
def test_token_is_numpys_argmax(library: Library, width: int, threads: int) -> None:
    logits = np.random.default_rng(width).standard_normal((5, width))
    assert likeliest(library, logits, threads) == logits.astype(np.float32).argmax(1).tolist()


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("width", WIDTHS)
def test_ties_go_to_the_lowest_id(library: Library, width: int, threads: int) -> None:
    rng = np.random.default_rng(width)
    logits = np.concatenate([np.zeros((1, width)), -rng.integers(0, 3, (20, width))])
    assert likeliest(library, logits, threads) == logits.argmax(1).tolist()


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_value_that_is_not_finite_is_told_wherever_it_stands(
    library: Library, width: int, threads: int, bad: float
) -> None:
    """Also beside larger ids with others, and among values that are larger than all before."""
    places = sorted({0, width // 3, width // 2, width - 1})
    logits = np.tile(np.arange(width, dtype=np.float64), (len(places) + 1, 1))
    for row, place in enumerate(places):
        logits[row, place] = bad
    logits[-1, places] = bad
    expected = [~place for place in places] + [~places[0]]
    assert likeliest(library, logits, threads) == expected


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("width", WIDTHS)
def test_impossible_tokens_lose_and_a_row_of_them_has_no_token(
    library: Library, width: int, threads: int
) -> None:
    logits = np.full((3, width), -np.inf)
    logits[0, -1] = np.finfo(np.float32).min
    logits[1, width // 2] = -1e30
    assert likeliest(library, logits, threads) == [width - 1, width // 2, ~0]
