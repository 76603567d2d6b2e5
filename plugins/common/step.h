// One step's ragged batch, as the kernels see it.
#pragma once

#include <cstdint>

namespace llmbuild {

// token_ids, positions: [num_tokens]. query_start: [num_sequences + 1], token offsets.
// kv_lengths: [num_sequences], length after the step. block_tables: [num_sequences,
// max_blocks_per_sequence]. logit_rows: [num_logit_rows]. Positions of a sequence's tokens in one
// step are consecutive.
struct Step {
  int num_tokens, num_sequences, num_logit_rows, max_blocks_per_sequence;
  const int32_t *token_ids, *positions, *query_start, *kv_lengths, *block_tables, *logit_rows;

  const int32_t* block_table(int sequence) const {
    return block_tables + int64_t(sequence) * max_blocks_per_sequence;
  }

  // The sequence that token `token` belongs to, looking from `sequence` on.
  int sequence_of(int token, int sequence = 0) const {
    while (token >= query_start[sequence + 1]) ++sequence;
    return sequence;
  }
};

// Row of a pool [blocks, HKV, BS, D] that holds (position, head), counted in rows of D.
template <int HKV, int BS>
inline int64_t pool_row(const int32_t* block_table, int position, int head) {
  return (int64_t(block_table[position / BS]) * HKV + head) * BS + position % BS;
}

}  // namespace llmbuild
