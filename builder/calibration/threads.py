"""Torch's threads."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """For many small operations in torch, whose threads cost more than they bring: on a machine
    that does something else beside, waiting for them took up to forty times as long. Threads that
    start inside have one each."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
