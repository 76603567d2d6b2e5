"""Where installed peers, converted models and logs lie, and how commands run there."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmbuild.cache import cache_root

CHECKOUT = Path(__file__).parents[2]


class Unavailable(Exception):
    """A peer that can't take part, and why."""


@dataclass(frozen=True)
class WorkFolder:
    """A folder whose content can all be made again."""

    root: Path

    @classmethod
    def default(cls) -> "WorkFolder":
        return cls(cache_root() / "peers")

    @property
    def models(self) -> Path:
        return self.root / "models"

    def venv(self, peer: str) -> Path:
        return self.root / "venvs" / peer

    def python(self, peer: str) -> Path:
        return self.venv(peer) / "bin" / "python"

    def log(self, name: str) -> Path:
        path = self.root / "logs" / f"{name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def run(
        self, name: str, command: Sequence[str | Path], env: Mapping[str, str] | None = None
    ) -> None:
        """A command, its output added to the log `name`; Unavailable if it fails."""
        log = self.log(name)
        with log.open("ab") as output:
            output.write(f"$ {' '.join(map(str, command))}\n".encode())
            output.flush()
            done = subprocess.run(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | (env or {}),
                cwd=self.root,
            )
        if done.returncode != 0:
            raise Unavailable(f"{last_line(log)} (see {log})")


def last_line(log: Path) -> str:
    """The last that a failed program said."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "it said nothing")
