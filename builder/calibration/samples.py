"""The model's own samples as calibration tokens: no text is needed, and what they're like is what
the model is asked to go on doing.

Liu et al., "LLM-QAT: Data-Free Quantization Aware Training for Large Language Models", 2023.
"""

import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from llmbuild.errors import BuildError, InternalError

MIN_LENGTH = 3  # BOS, a random token, and one that follows


def sample_tokens(engine_dir: Path, sequences: int, length: int, seed: int) -> NDArray[np.int32]:
    """Tokens [sequences, length] as llmbuild.runtime.draw draws them from an engine, in a process
    of its own. Raises BuildError for a length that leaves nothing to draw."""
    if length < MIN_LENGTH:
        raise BuildError(
            f"calibration.length is {length}; samples of the model have at least {MIN_LENGTH} "
            "tokens: allow more, or give a file as calibration.data"
        )
    wanted = {"engine_dir": str(engine_dir), "sequences": sequences, "length": length, "seed": seed}
    command = [sys.executable, "-m", "llmbuild.runtime.draw"]
    done = subprocess.run(
        command, input=msgspec.json.encode(wanted), capture_output=True, check=False
    )
    if done.returncode != 0:
        last = " ".join(done.stderr.decode(errors="replace").strip().splitlines()[-1:])
        raise InternalError(f"drawing samples ended with status {done.returncode}: {last}")
    tokens = np.array(msgspec.json.decode(done.stdout, type=list[list[int]]), np.int32)
    assert tokens.shape == (sequences, length)
    return tokens
