// Logits, and the choice of tokens, where each rank of the last stage has its part of the logits.
#pragma once

#include "../common/ranks.h"
#include "cpu.h"

namespace llmbuild {

// Brings the columns of all ranks together on rank 0. own: [rows, own tokens] of a rank of the last
// stage. logits: [rows, vocabulary], on rank 0.
inline void collect_logits(Ranks& ranks, const float* own, int rows, float* logits) {
  const std::vector<int32_t>& firsts = ranks.token_firsts;
  const auto own_bytes = [&](int t) { return sizeof(float) * (firsts[t + 1] - firsts[t]); };
  if (ranks.rank > 0) {
    if (ranks.rank >= ranks.chief()) ranks.send(0, own, rows * own_bytes(ranks.tp_rank()));
    return;
  }
  for (int t = 0; t < ranks.tp; ++t) {
    for (int64_t r = 0; r < rows; ++r) {
      float* const columns = logits + r * firsts[ranks.tp] + firsts[t];
      if (ranks.chief() + t > 0) {
        ranks.receive(ranks.chief() + t, columns, own_bytes(t));
      } else {
        std::copy_n(own + r * firsts[1], firsts[1], columns);
      }
    }
  }
}

// The likeliest tokens of `rows` rows, as best_token gives them, on the chief alone: false elsewhere.
// parts: of best_of_columns on every rank of the last stage. bests: [tp, rows], scratch.
inline bool choose_tokens(Ranks& ranks, const Best* parts, int workers, Best* bests, int32_t* tokens,
                          int rows) {
  const int first_token = ranks.token_firsts[ranks.tp_rank()];
  for (int r = 0; r < rows; ++r) {
    bests[r] = best_of_parts(parts, workers, rows, r);
    bests[r].token += first_token;
  }
  const int64_t bytes = int64_t(sizeof(Best)) * rows;
  if (ranks.rank != ranks.chief()) {
    ranks.send(ranks.chief(), bests, bytes);
    return false;
  }
  for (int t = 1; t < ranks.tp; ++t) {
    ranks.receive(ranks.chief() + t, bests + int64_t(t) * rows, bytes);
  }
  for (int r = 0; r < rows; ++r) tokens[r] = best_token(bests, ranks.tp, rows, r);
  return true;
}

// From the chief to every other rank of the first stage.
inline void send_tokens(Ranks& ranks, const int32_t* tokens, int rows) {
  for (int to = 0; to < ranks.tp; ++to) {
    if (to != ranks.rank) ranks.send(to, tokens, int64_t(4) * rows);
  }
}

}  // namespace llmbuild
