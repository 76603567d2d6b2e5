"""A file in memory that native code reads by its address."""

import ctypes
import mmap
import os
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_int64,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


class MappedFile:
    """A whole file, read-only: pages are read when they are first needed, and processes share
    them. (The module mmap tells no address of memory that can't be written.)"""

    address = 0  # while nothing is mapped

    def __init__(self, path: Path) -> None:
        """Raises OSError; an empty file can't be mapped."""
        with path.open("rb", buffering=0) as file:
            self.size_bytes = os.fstat(file.fileno()).st_size
            address = _libc.mmap(
                None, self.size_bytes, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0
            )
        if address == _FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
        self.address = address

    def first_bytes(self, count: int) -> bytes:
        """So many, or as many as the file has."""
        return ctypes.string_at(self.address, min(count, self.size_bytes))

    def close(self) -> None:
        """Unmap it: nothing may read it any more. Closing twice is allowed."""
        if self.address:
            _libc.munmap(self.address, self.size_bytes)
            self.address = 0

    def __del__(self) -> None:
        self.close()
