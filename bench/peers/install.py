"""Installs peers from the package index, each in a virtual environment of its own."""

import shutil
import sys
from collections.abc import Sequence

from bench import machine
from bench.peers.llama_cpp_build import SOURCES, build_server
from bench.peers.variants import PEERS, Peer
from bench.peers.work_folder import Unavailable, WorkFolder

FREE_GB = 8  # must be left on the disk before a peer is installed
STAMP = "installed"  # written last, so what an interrupted install left is not used


def missing(names: Sequence[str], work: WorkFolder) -> list[Peer]:
    """Of these peers and of what they need, those that are yet to be installed."""
    wanted = dict.fromkeys(need for name in names for need in (*PEERS[name].needs, name))
    return [PEERS[name] for name in wanted if not is_installed(PEERS[name], work)]


def is_installed(peer: Peer, work: WorkFolder) -> bool:
    stamp = work.venv(peer.name) / STAMP
    return stamp.exists() and stamp.read_text() == _stamp(peer)


def install(peer: Peer, work: WorkFolder) -> None:
    """Does nothing if that was done; Unavailable if it can't be."""
    if is_installed(peer, work):
        return
    venv = work.venv(peer.name)
    shutil.rmtree(venv, ignore_errors=True)
    venv.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(venv.parent).free
    if free < FREE_GB << 30:
        raise Unavailable(
            f"{free / 2**30:.1f} GB are free below {work.root}, and an install needs {FREE_GB}"
        )
    log = f"install-{peer.name}"
    work.log(log).unlink(missing_ok=True)
    pip = [str(work.python(peer.name)), "-m", "pip"]
    work.run(log, [sys.executable, "-m", "venv", venv])
    work.run(log, [*pip, "install", *peer.requirements])
    if peer.removed:
        work.run(log, [*pip, "uninstall", "-y", *peer.removed])
    if peer.name == "llama_cpp":
        build_server(venv, log, work)
    (venv / STAMP).write_text(_stamp(peer))


def _stamp(peer: Peer) -> str:
    """What an install is good for: builds are for this processor alone."""
    lines = [*peer.requirements, f"python {sys.version}", machine._cpu_model()]
    if peer.name == "llama_cpp":
        lines.append(SOURCES)
    return "\n".join(lines)
