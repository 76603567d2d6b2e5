"""A compile's memory follows its largest tensor, not the model's size."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

COMPILE = """
import sys
from pathlib import Path
from llmbuild.builder.compile import compile

compile(sys.argv[1], sys.argv[2])
status = Path("/proc/self/status").read_text()
print(next(int(line.split()[1]) << 10 for line in status.splitlines() if "VmHWM" in line))
"""

# 24 layers of 16.7 MB. The largest packed tensor is gate and up merged, 8.5 MB.
SIZES = {
    "hidden_size": 640,
    "intermediate_size": 1664,
    "num_attention_heads": 10,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
LARGEST_BYTES = 2 * SIZES["intermediate_size"] * SIZES["hidden_size"] * 4


def compiled(recipe: Path) -> tuple[int, str]:
    """The peak resident bytes of a compile in a process of its own, and what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(recipe), str(recipe.parent / "engine")],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout), done.stderr


@pytest.mark.slow
def test_compile_holds_a_few_tensors_at_a_time(
    tmp_path: Path, save_tiny_llama: Callable[..., Path]
) -> None:
    """The fixed part is measured too: a tiny model has the same graph."""
    large = save_tiny_llama(tmp_path / "large", num_hidden_layers=24, **SIZES)
    size_bytes = (large.parent / "model" / "model.safetensors").stat().st_size
    assert size_bytes > 40 * LARGEST_BYTES
    peak_bytes, printed = compiled(large)
    tiny_bytes, _ = compiled(save_tiny_llama(tmp_path / "tiny", num_hidden_layers=24))
    print(
        f"\n{size_bytes / 1e6:.0f} MB of weights: peak {peak_bytes / 1e6:.0f} MB, tiny model's "
        f"{tiny_bytes / 1e6:.0f} MB, largest packed tensor {LARGEST_BYTES / 1e6:.1f} MB"
    )
    assert peak_bytes - tiny_bytes < 8 * LARGEST_BYTES
    told = re.search(r"^peak memory (\d+) MB$", printed, re.MULTILINE)
    assert told is not None
    assert int(told[1]) * 1e6 == pytest.approx(peak_bytes, rel=0.02)
