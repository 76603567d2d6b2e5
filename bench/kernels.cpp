// The data that kernels are timed on. kernels.py puts the plugins' headers before this and a
// LLMBUILD_BENCH for every kernel after it.

using namespace llmbuild;

namespace {

// As in kernels.py, field for field.
struct Setup {
  uint8_t* cold;  // `copies` regions of `copy_bytes`; call i uses region i modulo their number
  int64_t copy_bytes, copies;
  uint8_t* warm;  // four sections of `section_bytes`
  int64_t section_bytes;
  int threads, sequences, new_tokens, context, block_size;
};

// Equal sequences of `context` tokens after the step, each in blocks of its own.
struct Batch {
  std::vector<int32_t> positions, query_start, kv_lengths, block_tables;
  Step step{};

  explicit Batch(const Setup& setup) {
    const int blocks = (setup.context + setup.block_size - 1) / setup.block_size;
    for (int s = 0; s < setup.sequences; ++s) {
      query_start.push_back(s * setup.new_tokens);
      kv_lengths.push_back(setup.context);
      for (int t = setup.new_tokens; t > 0; --t) positions.push_back(setup.context - t);
      for (int b = 0; b < blocks; ++b) block_tables.push_back(s * blocks + b);
    }
    query_start.push_back(setup.sequences * setup.new_tokens);
    step.num_tokens = setup.sequences * setup.new_tokens;
    step.num_sequences = setup.sequences;
    step.max_blocks_per_sequence = blocks;
    step.positions = positions.data();
    step.query_start = query_start.data();
    step.kv_lengths = kv_lengths.data();
    step.block_tables = block_tables.data();
  }
};

// EXPERTS and TOP_K of a mixture of experts; the tokens' choices go round all experts in turn.
constexpr int kExperts = 8, kTopK = 2;

struct Routing {
  std::vector<int32_t> experts, starts, rows_of, slot_of;

  explicit Routing(int rows) : experts(rows * kTopK), starts(kExperts + 1) {
    rows_of = slot_of = experts;
    for (int i = 0; i < rows * kTopK; ++i) experts[i] = i % kExperts;
    moe_sort<kExperts, kTopK>(Worker{0, 1}, experts.data(), starts.data(), rows_of.data(),
                              slot_of.data(), rows);
  }
};

// What a kernel's arguments are taken from.
struct Data {
  uint8_t* cold;
  float *a, *b, *c, *d;  // activations
  Step step;
  int rows, slots;
  const int32_t *row_index, *tile_index;  // of rows that follow each other, of one row in each tile
  int32_t *experts, *starts, *rows_of, *slot_of;

  template <class T>
  T* at(int64_t offset = 0) const {
    return reinterpret_cast<T*>(cold) + offset;
  }
};

template <class F>
double time_kernel(const Setup& setup, int64_t first, int64_t calls, F kernel) {
  const Batch batch(setup);
  const int rows = batch.step.num_tokens;
  Routing routing(rows);
  std::vector<int32_t> row_index(rows), tile_index(rows);
  for (int r = 0; r < rows; ++r) {
    row_index[r] = rows - 1 - r;
    tile_index[r] = row_index[r] * kLanes + r % kLanes;
  }
  const auto section = [&](int i) {
    return reinterpret_cast<float*>(setup.warm + i * setup.section_bytes);
  };
  Data data{};
  data.cold = setup.cold;
  data.a = section(0), data.b = section(1), data.c = section(2), data.d = section(3);
  data.step = batch.step;
  data.rows = rows, data.slots = rows * kTopK;
  data.row_index = row_index.data(), data.tile_index = tile_index.data();
  data.experts = routing.experts.data(), data.starts = routing.starts.data();
  data.rows_of = routing.rows_of.data(), data.slot_of = routing.slot_of.data();
  return seconds_per_call(setup.threads, first, calls, [&](const Worker& worker, int64_t i) {
    Data copy = data;
    copy.cold += i % setup.copies * setup.copy_bytes;
    kernel(worker, copy);
  });
}

}  // namespace

#define LLMBUILD_BENCH(NAME, ...)                                                         \
  LLMBUILD_EXPORT double NAME(const Setup* setup, int64_t first, int64_t calls) {         \
    return time_kernel(*setup, first, calls,                                              \
                       [](const Worker& worker, const Data& d) { (void)d; __VA_ARGS__; }); \
  }
