"""An emulated run in a process of its own, in which Triton interprets kernels: the one that builds
compiles them, and Triton does either, from when it is imported.

As a program (`python -m llmbuild.builder.emulate_apart ROOT BASE_DIR OUT`, the manifest on standard
input) it runs the steps of an engine that isn't published yet.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from llmbuild.errors import InternalError
from llmbuild.runtime.manifest import Manifest
from llmbuild.runtime.replay import STEPS_FILE, load_steps


def emulate_apart(root: Path, manifest: Manifest, base_dir: Path) -> list[NDArray[np.float32]]:
    """The logits of the steps that lie below `root`, of networks that are made again from the
    recipe there. base_dir: the recipe's folder. Raises InternalError where that fails."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "logits.npz"
        module = "llmbuild.builder.emulate_apart"
        run = subprocess.run(
            [sys.executable, "-m", module, str(root), str(base_dir), str(out)],
            input=msgspec.json.encode(manifest),
            env={**os.environ, "TRITON_INTERPRET": "1"},
            capture_output=True,
            check=False,
        )
        if run.returncode != 0:
            last = run.stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise InternalError(
                f"the emulated run ended with status {run.returncode}: {' '.join(last)}"
            )
        with np.load(out, allow_pickle=False) as file:
            return [file[name] for name in file.files]


def _main(root: Path, base_dir: Path, out: Path) -> None:
    from llmbuild.builder.emulate_engine import emulate_engine
    from llmbuild.builder.sources.progress import PlainProgress

    manifest = msgspec.json.decode(sys.stdin.buffer.read(), type=Manifest)
    steps = load_steps(root / STEPS_FILE)
    np.savez(out, *emulate_engine(root, manifest, steps, base_dir, PlainProgress()))


if __name__ == "__main__":
    _main(*map(Path, sys.argv[1:]))
