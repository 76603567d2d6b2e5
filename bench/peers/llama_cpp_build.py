"""Builds llama.cpp for this processor from the sources that llama-cpp-python brings along."""

import os
import shutil
import tarfile
from pathlib import Path

from bench.peers.work_folder import WorkFolder

SOURCES = "llama-cpp-python==0.3.36"
TARGETS = ("llama-server", "llama-quantize")
OPTIONS = (
    *("-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON"),
    *("-DGGML_NATIVE=ON", "-DGGML_OPENMP=ON"),
    *("-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_UI=OFF"),
    *("-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"),
)


def binaries(venv: Path) -> Path:
    """The folder of llama-server and llama-quantize."""
    return venv / "build" / "bin"


def build_server(venv: Path, log: str, work: WorkFolder) -> None:
    """Into `venv`, whose packages have cmake and ninja; some minutes on two processors."""
    path = {"PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    fetched, sources, build = venv / "fetched", venv / "sources", venv / "build"
    pip = [str(venv / "bin" / "python"), "-m", "pip"]
    as_source = ("--no-deps", "--no-binary", ":all:", "--no-build-isolation")
    work.run(log, [*pip, "download", *as_source, "-d", fetched, SOURCES], path)
    (archive,) = fetched.iterdir()
    with tarfile.open(archive) as tar:
        tar.extractall(sources, filter="data")
    (vendored,) = sources.glob("*/vendor/llama.cpp")
    work.run(log, ["cmake", "-S", vendored, "-B", build, *OPTIONS], path)
    jobs = str(len(os.sched_getaffinity(0)))
    work.run(log, ["cmake", "--build", build, "-j", jobs, "--target", *TARGETS], path)
    shutil.rmtree(fetched)
    shutil.rmtree(sources)
