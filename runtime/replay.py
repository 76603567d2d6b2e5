"""Replay an engine's verification steps: does it compute, here, what the reference computed?

The build puts the steps and the reference's logits into the engine; `llmbuild verify` replays
them on the machine that will serve. As a program (`python -m llmbuild.runtime.replay ROOT LEVEL
OUT`, the manifest on standard input) it runs an engine that isn't published yet in a process of
its own, so that a crash of native code is seen as one.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import msgspec
import numpy as np
from numpy.typing import NDArray

from llmbuild.errors import EngineError
from llmbuild.runtime.batch import ARRAYS, StepBatch
from llmbuild.runtime.engine import Engine
from llmbuild.runtime.executors.open import open_executor
from llmbuild.runtime.manifest import Manifest

STEPS_FILE = "verify.npz"  # inside the engine; without pickles
RANK_TIMEOUT_S = 1800.0  # for the largest step of a large model on few processors


@dataclass(frozen=True)
class VerificationSteps:
    """Steps that run one after the other on an empty KV cache of `num_blocks` blocks, and the
    reference's logits of each, at the vocabulary's `columns` only."""

    batches: list[StepBatch]
    logits: list[NDArray[np.float32]]  # [R, len(columns)]
    columns: NDArray[np.int64]
    num_blocks: int
    tolerance: float  # largest relative difference that the build allowed


def save_steps(steps: VerificationSteps, path: Path) -> None:
    arrays: dict[str, NDArray[np.generic]] = {
        "columns": steps.columns,
        "num_blocks": np.array(steps.num_blocks),
        "tolerance": np.array(steps.tolerance),
    }
    for index, (batch, logits) in enumerate(zip(steps.batches, steps.logits, strict=True)):
        arrays |= {f"{index}.{name}": getattr(batch, name) for name in ARRAYS}
        arrays[f"{index}.logits"] = logits
    np.savez(path, allow_pickle=False, **arrays)


def load_steps(path: Path) -> VerificationSteps:
    """Raises EngineError for a file that holds none."""
    try:
        with np.load(path, allow_pickle=False) as file:
            count = sum(name.endswith(".logits") for name in file.files)
            return VerificationSteps(
                [StepBatch(**{name: file[f"{i}.{name}"] for name in ARRAYS}) for i in range(count)],
                [file[f"{i}.logits"] for i in range(count)],
                file["columns"],
                int(file["num_blocks"]),
                float(file["tolerance"]),
            )
    except (OSError, EOFError, ValueError, KeyError, AssertionError, BadZipFile) as error:
        raise EngineError(
            f"{path} holds no steps to verify with ({error}); compile the engine again"
        ) from error


def replay(
    engine: Engine, steps: VerificationSteps, num_threads: int | None = None
) -> list[NDArray[np.float32]]:
    """The engine's logits [R, vocab] of each step. num_threads: of each rank, by default the
    processors that it may use."""
    executor = open_executor(
        *(engine, steps.num_blocks, num_threads),
        pin_threads=False,
        rank_timeout_s=RANK_TIMEOUT_S,
    )
    try:
        return [executor.step(batch) for batch in steps.batches]
    finally:
        executor.close()


def relative_difference(got: NDArray[np.float32], want: NDArray[np.float32]) -> float:
    """Largest difference within a row over the row's largest value; infinite where either side
    isn't finite, so that no maximum over steps can lose it."""
    if not (np.isfinite(got).all() and np.isfinite(want).all()):
        return float("inf")
    difference = np.abs(got.astype(np.float64) - want)
    scale = np.abs(want).max(axis=1, initial=0.0, keepdims=True)
    relative = difference / np.maximum(scale, np.finfo(np.float32).tiny)
    return float(relative.max(initial=0.0))


def _main(root: Path, level: str, out: Path) -> None:
    manifest = msgspec.json.decode(sys.stdin.buffer.read(), type=Manifest)
    logits = replay(Engine(root, manifest, level), load_steps(root / STEPS_FILE), num_threads=2)
    np.savez(out, *logits, allow_pickle=False)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
