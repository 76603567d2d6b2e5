"""Makes each variant's model out of one source, the GGUF file of the demo's recipe."""

import shutil
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from bench.peers.install import install
from bench.peers.llama_cpp_build import binaries
from bench.peers.variants import OURS, PEERS, Variant
from bench.peers.work_folder import CHECKOUT, WorkFolder
from llmbuild.builder.recipe.recipe import load_recipe
from llmbuild.builder.sources import fetch, parse_source
from llmbuild.builder.sources.progress import stderr_progress
from llmbuild.cache import cache_root

RECIPES = Path(__file__).parent / "recipes"
DEMO_RECIPE = CHECKOUT / "recipes" / "smollm2-135m.yaml"


def convert(variant: Variant, work: WorkFolder) -> Path:
    """The variant's file or folder, made unless it's there; Unavailable if it can't be.

    Ours is compiled anew, as what compiles it changes.
    """
    work.models.mkdir(parents=True, exist_ok=True)
    if variant.peer == OURS:
        return compile_engine(variant, work)
    source = fetch_source()
    match variant.peer:
        case "llama_cpp":
            return requantised(variant.model, source, work)
        case "openvino":
            return exported_by_optimum(variant.model, source, work)
        case "onnxruntime":
            return built_for_onnxruntime(variant.model, source, work)
        case _:
            return hugging_face_model(variant.model, source, work)


@cache
def fetch_source() -> Path:
    """The GGUF file; SourceError if it can't be had."""
    model = load_recipe(DEMO_RECIPE, ()).model
    return fetch(
        parse_source(model.source),
        model.sha256,
        base_dir=DEMO_RECIPE.parent,
        cache_dir=cache_root(),
        progress=stderr_progress(),
    )


def weights_bytes(model: Path) -> int:
    """The size of a model's weights, which is that of its largest file."""
    files = [model] if model.is_file() else model.rglob("*")
    return max(file.stat().st_size for file in files if file.is_file())


def compile_engine(variant: Variant, work: WorkFolder) -> Path:
    engine = work.models / variant.model
    shutil.rmtree(engine, ignore_errors=True)
    recipe = RECIPES / f"{variant.model}.yaml"
    log = f"convert-{variant.model}"
    work.run(log, [sys.executable, "-m", "llmbuild", "compile", recipe, "-o", engine])
    return engine


def requantised(name: str, source: Path, work: WorkFolder) -> Path:
    """The source itself where `name` asks for its own type, another type made of it otherwise."""
    kind = Path(name).stem.rpartition("-")[2].upper()
    if f".{kind}." in source.name:
        return source
    quantise = binaries(work.venv("llama_cpp")) / "llama-quantize"
    return _made(name, work, lambda out: [quantise, "--allow-requantize", source, out, kind])


def hugging_face_model(name: str, source: Path, work: WorkFolder) -> Path:
    install(PEERS["transformers"], work)
    dtype = {"bf16": "bfloat16", "fp32": "float32"}[name.rpartition("-")[2]]
    script = Path(__file__).with_name("gguf_to_hugging_face.py")
    python = work.python("transformers")
    return _made(name, work, lambda out: [python, script, source, dtype, out])


def exported_by_optimum(name: str, source: Path, work: WorkFolder) -> Path:
    model = hugging_face_model("hugging-face-fp32", source, work)
    kind = name.rpartition("-")[2]
    groups = ("--group-size", "32", "--ratio", "1.0") if kind == "int4" else ()
    export = [work.venv("openvino") / "bin" / "optimum-cli", "export", "openvino"]
    task = ("--task", "text-generation-with-past", "--weight-format", kind)
    return _made(name, work, lambda out: [*export, "--model", model, *task, *groups, out])


def built_for_onnxruntime(name: str, source: Path, work: WorkFolder) -> Path:
    """Groups of 32; accuracy level 4 multiplies in int8."""
    model = hugging_face_model("hugging-face-fp32", source, work)
    kind = name.rpartition("-")[2]
    options = ["block_size=32", "accuracy_level=4"]
    if kind == "int4":
        options += ["is_symmetric=false", "algo_config=rtn_last"]
    build = [str(work.python("onnxruntime")), "-m", "onnxruntime_genai.models.builder", "-e", "cpu"]
    extra = ["--extra_options", *options]
    return _made(name, work, lambda out: [*build, "-i", model, "-p", kind, "-o", out, *extra])


def _made(name: str, work: WorkFolder, command: Callable[[Path], Sequence[str | Path]]) -> Path:
    """What `command` writes to the path that it's given, complete or not at all."""
    made, partial = work.models / name, work.models / f"partial-{name}"
    if not made.exists():
        if partial.is_dir():
            shutil.rmtree(partial)
        partial.unlink(missing_ok=True)
        work.log(f"convert-{name}").unlink(missing_ok=True)
        work.run(f"convert-{name}", command(partial))
        partial.rename(made)
    return made
