"""Ranks as threads of one program, under the compiler's sanitizers: no data race, no access out of
bounds, and nothing undefined in sums, messages and failures."""

import subprocess
from pathlib import Path

import pytest
from kernel_harness import PLUGINS, PROLOGUE

from llmbuild.builder.targets.cpu.toolchain import find_compiler

pytestmark = pytest.mark.slow

SANITIZERS = {
    "thread": ["-fsanitize=thread"],
    "address, undefined": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
}
PROGRAM = (
    PROLOGUE
    + """
#include <cstdio>
#include <cstdlib>
#include <sys/socket.h>
#include "all_reduce/cpu.h"
#include "common/make_ranks.h"
#include "stage_transfer/cpu.h"

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\\n", what);
  std::exit(3);
}

// The way between all ranks of a world.
struct World {
  int tp, pp;
  bool in_memory;
  int64_t max_floats;
  std::vector<uint8_t> bytes;
  std::vector<std::vector<int>> sockets;
  std::vector<int32_t> firsts;

  World(int tp, int pp, bool in_memory, int64_t max_floats)
      : tp(tp), pp(pp), in_memory(in_memory), max_floats(max_floats),
        bytes(ranks_bytes(tp, pp, max_floats) + 64), firsts(tp + 1) {
    const int world = tp * pp;
    sockets.assign(world, std::vector<int>(world, -1));
    for (int a = 0; a < world; ++a) {
      for (int b = 0; b < a; ++b) {
        int pair[2];
        require(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0, "no sockets");
        sockets[a][b] = pair[0], sockets[b][a] = pair[1];
      }
    }
  }

  std::unique_ptr<Ranks> rank(int r) {
    uint8_t* const aligned = bytes.data() + (64 - uintptr_t(bytes.data()) % 64) % 64;
    const RanksConfig config{r, tp, pp, 2000, in_memory ? aligned : nullptr,
                             int64_t(bytes.size()) - 64, sockets[r].data(), firsts.data()};
    return make_ranks(config, max_floats);
  }

  template <class Body>
  void run(int ranks, Body body) {
    std::vector<std::thread> threads;
    for (int r = 0; r < ranks; ++r) {
      threads.emplace_back([&, r] { const auto self = rank(r); body(*self); });
    }
    for (std::thread& thread : threads) thread.join();
  }
};

void sums(int tp, bool in_memory, int64_t max_floats, int count, int rounds) {
  World world(tp, 1, in_memory, max_floats);
  world.run(tp, [&](Ranks& ranks) {
    std::vector<float> x(count);
    with_team(1 + ranks.rank % 3, [&](const Worker& worker) {
      for (int round = 0; round < rounds; ++round) {
        const Range own = split(count, worker);
        for (int i = own.begin; i < own.end; ++i) x[i] = float(i % 100 + ranks.rank + round);
        worker.barrier();
        all_reduce<1>(worker, ranks, x.data(), count);
        worker.barrier();
        for (int i = own.begin; i < own.end; ++i) {
          const int expected = tp * (i % 100 + round) + tp * (tp - 1) / 2;
          require(x[i] == float(expected), "a sum is wrong");
        }
        worker.barrier();
      }
    });
    require(!ranks.failed(), "ranks failed");
  });
}

void messages(bool in_memory) {
  World world(2, 3, in_memory, 100);
  world.run(6, [&](Ranks& ranks) {
    std::vector<float> x(3 * 5003, ranks.rank < 2 ? float(ranks.rank + 1) : 0.0f);
    with_team(2, [&](const Worker& worker) {
      if (ranks.rank >= 2) receive_rows<3>(worker, ranks, x.data(), 5003);
      worker.barrier();
      if (ranks.rank < 4) send_rows<3>(worker, ranks, x.data(), 5003);
    });
    for (float value : x) require(value == float(ranks.tp_rank() + 1), "a message is wrong");
  });
}

void failures(bool in_memory) {
  World world(3, 1, in_memory, 100);
  world.run(2, [&](Ranks& ranks) {  // rank 2 never comes
    std::vector<float> x(1009);
    with_team(3, [&](const Worker& worker) {
      for (int round = 0; round < 3; ++round) {
        all_reduce<1>(worker, ranks, x.data(), 1009);
        worker.barrier();
      }
    });
    require(ranks.failed(), "nobody failed");
  });
}

int main() {
  for (bool in_memory : {true, false}) {
    for (int tp : {2, 3}) sums(tp, in_memory, 100, 1009, 20);
    sums(3, in_memory, 1 << 15, (1 << 15) + 13, 4);
    messages(in_memory);
    failures(in_memory);
  }
}
"""
)


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_ranks_are_clean_under(sanitizer: str, tmp_path: Path) -> None:
    unit, program = tmp_path / "ranks.cpp", tmp_path / "ranks"
    unit.write_text(PROGRAM)
    options = ["-std=c++17", "-O1", "-g", "-pthread", f"-I{PLUGINS}", *SANITIZERS[sanitizer]]
    command = [*find_compiler().command, *options, str(unit), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stderr == ""
