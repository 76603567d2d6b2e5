"""The memory that the ranks of a host share, as Python sees it."""

import ctypes
import mmap
import os


class RanksMemory:
    """Shared memory without a name, so that nothing is left of it whoever is killed. Its first
    word is `failed`: 0, or 1 + the rank for which nobody is to wait any more."""

    def __init__(self, descriptor: int) -> None:
        """Takes over the descriptor. Raises OSError where it can't be mapped."""
        self.descriptor = descriptor
        self.size_bytes = os.fstat(descriptor).st_size
        self._map = mmap.mmap(descriptor, self.size_bytes)
        self._failed = ctypes.c_int32.from_buffer(self._map)

    @staticmethod
    def create(size_bytes: int) -> "RanksMemory":
        """Zeroed. Raises OSError."""
        descriptor = os.memfd_create("llmbuild ranks")
        try:
            os.ftruncate(descriptor, size_bytes)
            return RanksMemory(descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def address(self) -> int:
        return ctypes.addressof(self._failed)

    def set_failed(self, rank: int) -> None:
        """Ends all waiting, unless another rank was told of before."""
        if self._failed.value == 0:
            self._failed.value = 1 + rank
