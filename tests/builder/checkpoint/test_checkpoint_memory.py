import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import save_file

LARGEST_BYTES = 8 << 20

READ_ALL = """
import sys
from pathlib import Path
from llmbuild.builder.checkpoint import open_checkpoint

def peak_bytes():
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if "VmHWM" in line)

checkpoint = open_checkpoint(Path(sys.argv[1]))
before = peak_bytes()
total = sum(float(checkpoint.read(name).ravel()[-1]) for name in checkpoint.tensors)
print(peak_bytes() - before, total)
"""


def measured(path: Path) -> tuple[int, float]:
    """Bytes that the peak resident memory rises while all tensors are read, and their sum."""
    done = subprocess.run(
        [sys.executable, "-c", READ_ALL, str(path)], capture_output=True, text=True, check=True
    )
    rise, total = done.stdout.split()
    return int(rise), float(total)


@pytest.mark.skipif(sys.platform != "linux", reason="peak resident memory is read from /proc")
def test_reading_safetensors_holds_one_tensor(tmp_path):
    columns = LARGEST_BYTES // 4 // 1024
    tensors = {f"t{i}": np.full((1024, columns), i, np.float32) for i in range(8)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    rise_bytes, total = measured(tmp_path)
    assert total == sum(range(8))
    assert rise_bytes < 3 * LARGEST_BYTES


@pytest.mark.skipif(sys.platform != "linux", reason="peak resident memory is read from /proc")
def test_reading_gguf_holds_one_dequantised_tensor(write_gguf, llama_metadata):
    rows = LARGEST_BYTES // 4 // 1024
    packed = np.zeros((rows, 1024 // 32 * 18), np.uint8)
    embedding = {"token_embd.weight": np.zeros((10, 32), np.float32)}
    tensors = {f"blk.{i}.ffn_up.weight": (Type.Q4_0, packed) for i in range(8)}
    rise_bytes, total = measured(write_gguf(llama_metadata, embedding | tensors))
    assert total == 0
    assert rise_bytes < 3 * LARGEST_BYTES


# A quarter of the columns of a matrix of 64 MB, as ranks of a tensor-parallel engine have them.
READ_QUARTER = """
import sys
from pathlib import Path
from llmbuild.builder.checkpoint import open_checkpoint
from llmbuild.builder.stages import growth_bytes
from llmbuild.quant.plan import QuantPlan
from llmbuild.quant.reader import PlannedReader

class Tensors:
    def __init__(self, checkpoint):
        self.read, self.read_rows = checkpoint.read, checkpoint.read_rows
        self.shape = lambda name: checkpoint.tensors[name].shape
        self.has_rows = lambda name: checkpoint.tensors[name].by_rows

read = PlannedReader(Tensors(open_checkpoint(Path(sys.argv[1]))), QuantPlan())
rows, columns = read.shape("large")
read.read_part("large", [((0, 1),), ((0, 1),)])  # what reading takes whatever the size
with growth_bytes() as growth:
    part = read.read_part("large", [((0, rows),), ((columns // 4, columns // 2),)])
    print(growth(), part.nbytes)
"""


def grown_for_a_quarter(path: Path) -> tuple[int, int]:
    """By how many bytes resident memory grows at most, and the bytes of the quarter."""
    done = subprocess.run(
        [sys.executable, "-c", READ_QUARTER, str(path)], capture_output=True, text=True, check=True
    )
    grown, share = map(int, done.stdout.split())
    return grown, share


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_reading_a_quarter_of_a_safetensors_matrix_holds_little_beside_it(tmp_path):
    save_file({"large": np.ones((2048, 8192), np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    grown_bytes, share_bytes = grown_for_a_quarter(tmp_path)
    assert share_bytes == 16 << 20
    assert 0.9 * share_bytes < grown_bytes < share_bytes + (16 << 20)


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_reading_a_quarter_of_a_gguf_matrix_holds_little_beside_it(write_gguf, llama_metadata):
    packed = np.zeros((2048, 8192 // 32 * 18), np.uint8)
    embedding = {"token_embd.weight": np.zeros((10, 32), np.float32)}
    path = write_gguf(llama_metadata, embedding | {"large": (Type.Q4_0, packed)})
    grown_bytes, share_bytes = grown_for_a_quarter(path)
    assert share_bytes == 16 << 20
    assert 0.9 * share_bytes < grown_bytes < share_bytes + (16 << 20)
