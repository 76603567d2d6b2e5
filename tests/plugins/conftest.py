"""Makes kernel_harness importable from the kernel tests and gives it a directory to build in."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from kernel_harness import KernelCompiler


@pytest.fixture(scope="session")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> KernelCompiler:
    return KernelCompiler(tmp_path_factory.mktemp("kernels"))
