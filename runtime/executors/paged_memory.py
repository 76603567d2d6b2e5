"""The memory of a plan with paged KV pools."""

import numpy as np

from llmbuild.runtime.executors.cuda import Cuda
from llmbuild.runtime.executors.execution import Execution
from llmbuild.runtime.executors.paged_kv import PagedSteps, pool_offsets
from llmbuild.runtime.executors.plan_memory import Placed, PlanMemory, padded
from llmbuild.runtime.manifest import Manifest, Rank
from llmbuild.runtime.target import ALIGNMENT_BYTES


class PoolMemory(PlanMemory[Execution]):
    """Pools lie one after the other. The plan is given each one's address in an input of its own,
    which never changes. Blocks are only read where they have been written, so that a step that went
    wrong leaves nothing to clear."""

    def __init__(
        self, cuda: Cuda, manifest: Manifest, rank: Rank, num_blocks: int, steps: PagedSteps
    ) -> None:
        """Takes nothing yet."""
        kv = manifest.kv_of(rank)
        self._offsets, kv_bytes = pool_offsets(kv, num_blocks)
        input_bytes = sum(padded(4 * size) for size in steps.most_numbers.values())
        super().__init__(
            *(cuda, rank, manifest.limits.max_sequences, kv_bytes),
            f"the KV cache of {num_blocks} blocks of {kv.block_size} tokens",
            max(input_bytes, ALIGNMENT_BYTES * len(self._offsets)),
        )

    def take(self) -> None:
        super().take()
        places = {name: ALIGNMENT_BYTES * index for index, name in enumerate(self._offsets)}
        size = ALIGNMENT_BYTES * len(places)
        base = self._take_device(size, "addresses")
        for name, place in places.items():
            address = np.array([self._cache_base + self._offsets[name]], np.int64)
            self._staging[place : place + address.nbytes] = address.view(np.uint8)
        self._cuda.copy_to_device(base, self._host[0], size)
        self._cuda.synchronise()  # before inputs are written there
        self._addresses = {name: base + place for name, place in places.items()}

    def place(self, execution: Execution) -> Placed:
        return self._placed(execution.inputs, execution.is_decode, {}, self._addresses)
