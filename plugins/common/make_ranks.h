// The way to the other ranks that a configuration names.
#pragma once

#include <memory>

#include "rank_memory.h"
#include "rank_sockets.h"

namespace llmbuild {

// max_floats: the most that is reduced, or sent, at once, as for ranks_bytes(). Throws where the
// configuration can't be.
inline std::unique_ptr<Ranks> make_ranks(const RanksConfig& config, int64_t max_floats) {
  if (config.memory == nullptr) return std::make_unique<SocketRanks>(config);
  return std::make_unique<MemoryRanks>(config, max_floats);
}

}  // namespace llmbuild
