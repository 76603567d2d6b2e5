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

// A step whose arrays lie one after the other, in the order of its fields.
inline Step step_of(const int32_t* arrays, int tokens, int sequences, int logit_rows, int blocks) {
  const int32_t* const positions = arrays + tokens;
  const int32_t* const query_start = positions + tokens;
  const int32_t* const kv_lengths = query_start + sequences + 1;
  const int32_t* const block_tables = kv_lengths + sequences;
  const int32_t* const rows = block_tables + int64_t(sequences) * blocks;
  return {tokens,    sequences,   logit_rows, blocks,       arrays,
          positions, query_start, kv_lengths, block_tables, rows};
}

}  // namespace llmbuild
