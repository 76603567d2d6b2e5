"""KV pools of an emulated network: memory of this process, which plugins are given by address."""

import numpy as np
from numpy.typing import NDArray

from llmbuild.runtime.executors.paged_kv import pool_offsets
from llmbuild.runtime.manifest import KVLayout
from llmbuild.runtime.target import ALIGNMENT_BYTES


class EmulatedPools:
    """addresses: feeds of the inputs with the pools' addresses, valid as long as this lives."""

    def __init__(self, kv: KVLayout, num_blocks: int) -> None:
        offsets, size = pool_offsets(kv, num_blocks)
        self._memory = np.zeros(size + ALIGNMENT_BYTES, np.uint8)
        base = -(-self._memory.ctypes.data // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.addresses: dict[str, NDArray[np.int64]] = {
            name: np.array([base + offset], np.int64) for name, offset in offsets.items()
        }
