// Runs an engine's verification steps without Python, so that sanitizers and valgrind see nothing
// but generated code. Weights and KV are allocated to the byte. Included before this: the engine.
//
// driver WEIGHTS STEPS LOGITS: WEIGHTS is the data of the weights file; STEPS is int32: threads,
// vocabulary, blocks, KV bytes, steps; then of each step its tokens, sequences, logit rows and
// blocks per sequence, the length of its arrays, and them.
#include <cstdio>
#include <vector>

namespace {

template <class T>
std::vector<T> read_all(const char* path) {
  std::FILE* file = std::fopen(path, "rb");
  std::fseek(file, 0, SEEK_END);
  std::vector<T> data(std::ftell(file) / sizeof(T));
  std::rewind(file);
  if (std::fread(data.data(), sizeof(T), data.size(), file) != data.size()) std::abort();
  std::fclose(file);
  return data;
}

uint8_t* allocate(int64_t bytes) {
  return static_cast<uint8_t*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
}

}  // namespace

int main(int, char** arguments) {
  const std::vector<uint8_t> file = read_all<uint8_t>(arguments[1]);
  const std::vector<int32_t> numbers = read_all<int32_t>(arguments[2]);
  uint8_t* weights = allocate(file.size());
  std::copy(file.begin(), file.end(), weights);
  const int32_t* next = numbers.data();
  const int threads = *next++, vocab = *next++, blocks = *next++, kv_bytes = *next++;
  uint8_t* kv = allocate(kv_bytes);
  std::fill(kv, kv + kv_bytes, uint8_t(0));
  void* engine = llmbuild_create(weights, nullptr, kv, blocks, threads, 0, nullptr);
  std::FILE* out = std::fopen(arguments[3], "wb");
  for (int steps = *next++; steps > 0; --steps) {
    const int32_t* const sizes = next;  // tokens, sequences, logit rows, blocks per sequence
    const int rows = sizes[2], length = next[4];
    const std::vector<int32_t> arrays(next + 5, next + 5 + length);
    next += 5 + length;
    std::vector<float> logits(int64_t(rows) * vocab);
    if (llmbuild_step(engine, arrays.data(), sizes, 1, logits.data())) return 1;
    std::fwrite(logits.data(), sizeof(float), logits.size(), out);
  }
  std::fclose(out);
  llmbuild_destroy(engine);
  std::free(kv);
  std::free(weights);
}
