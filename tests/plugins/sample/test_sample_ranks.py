"""Tokens chosen, and logits brought together, by ranks that have a part of the columns each."""

import numpy as np
import pytest
from kernel_harness import LEVELS, KernelCompiler, Library
from numpy.typing import NDArray
from rank_processes import NEEDED_BYTES, WAYS, Ranks, shared

FIRSTS = (0, 5, 6, 24)  # columns of the ranks: 5, 1 and 18
SOURCE = (
    NEEDED_BYTES
    + """
#include "sample/ranks.h"

// logits: [rows, N] of this rank. all: [rows, vocabulary], on rank 0. tokens: [rows].
template <int N>
int run(Ranks& ranks, const float* logits, int rows, float* all, int32_t* tokens) {
  const bool is_last = ranks.rank >= ranks.chief();
  std::vector<Best> parts(2 * rows), scratch(ranks.tp * rows);
  if (is_last) {
    with_team(2, [&](const Worker& worker) {
      best_of_columns<N>(worker, logits, parts.data(), rows);
    });
  }
  if (is_last && choose_tokens(ranks, parts.data(), 2, scratch.data(), tokens, rows)) {
    send_tokens(ranks, tokens, rows);
  } else if (ranks.rank < ranks.tp) {
    ranks.receive(ranks.chief(), tokens, 4 * rows);
  }
  collect_logits(ranks, logits, rows, all);
  return ranks.failed_rank();
}

extern "C" int sample(const RanksConfig* config, const float* logits, int rows, float* all,
                      int32_t* tokens) {
  const auto ranks = make_ranks(*config, 1000);
  if (ranks->tp_rank() == 0) return run<5>(*ranks, logits, rows, all, tokens);
  if (ranks->tp_rank() == 1) return run<1>(*ranks, logits, rows, all, tokens);
  return run<18>(*ranks, logits, rows, all, tokens);
}
"""
)


@pytest.fixture(scope="module")
def library(compiler: KernelCompiler) -> Library:
    return compiler.library(SOURCE, LEVELS[0])


def rows_of(kind: str) -> NDArray[np.float32]:
    """[rows, 24] with ties between ranks; also with values that aren't finite in every column."""
    logits = -np.random.default_rng(1).integers(0, 3, (701, 24)).astype(np.float32)
    if kind == "ties":
        return logits
    for row in range(48):
        logits[row, [row % 24, 23]] = np.nan if row < 24 else np.inf
    logits[48] = -np.inf
    return logits


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("kind", ["ties", "not finite"])
def test_tokens_and_logits_are_those_of_whole_rows(
    library: Library, kind: str, pp: int, way: str
) -> None:
    logits = rows_of(kind)
    rows = len(logits)
    parts = np.split(logits, FIRSTS[1:-1], axis=1)
    tokens, whole = shared((3 * pp, rows), np.int32), shared(logits.shape, np.float32)

    def body(config: NDArray, rank: int) -> int:
        own = np.ascontiguousarray(parts[rank % 3])
        everything = whole if rank == 0 else None
        return library.call("sample", config, own, rows, everything, tokens[rank])

    ranks = Ranks(library, way, tp=3, pp=pp, token_firsts=FIRSTS)
    assert ranks.run(body) == [-1] * (3 * pp)
    best = logits.argmax(axis=1)
    expected = np.where(np.isfinite(logits.max(axis=1)), best, ~best)
    for rank in range(3):  # of the first stage
        assert tokens[rank].tolist() == expected.tolist()
    assert np.array_equal(whole, logits, equal_nan=True)
