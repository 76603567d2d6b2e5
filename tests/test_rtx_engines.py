"""`llmbuild compile` for tensorrt-rtx: real plans, built without a GPU; the network that each is
built of is run on the CPU and held to the reference as part of the build."""

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from llmbuild import LLM
from llmbuild.builder import rtx_plans, verify_plans
from llmbuild.builder.compile import compile, compile_rank
from llmbuild.errors import BuildError, EngineError, InternalError, RecipeError
from llmbuild.runtime import engine as engine_module
from llmbuild.runtime.engine import open_engine
from llmbuild.runtime.inspect_cli import inspect
from llmbuild.runtime.manifest import read_manifest
from llmbuild.runtime.plan_header import read_plan_header
from llmbuild.verify_cli import verify_command

VERSION = rtx_plans.installed_tensorrt_rtx().__version__
TEXT = "".join(f"{n * n} is the square of {n}. " for n in range(99))
SCHEMES = {
    "fp16": (),
    "bf16": ("precision=bf16",),
    "w4a16": ("quantisation={scheme: w4a16, group_size: 32, method: rtn}",),
    "w8a16": ("quantisation=w8a16",),
    "w8a8": ("quantisation=w8a8-static",),
    "fp8": ("quantisation=fp8_w8a8",),
}

Compiled = Callable[..., Path]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, save_tiny_llama: Callable[..., Path]) -> Path:
    """Of a random model whose rows are of whole groups."""
    folder = tmp_path_factory.mktemp("rtx")
    sizes = {"head_dim": 32, "hidden_size": 64, "intermediate_size": 288, "num_key_value_heads": 3}
    path = save_tiny_llama(folder, **sizes)
    (folder / "text.txt").write_text(TEXT)
    lines = path.read_text().replace("precision: fp32", "precision: fp16").splitlines()
    lines = [line for line in lines if not line.startswith("kv_cache")]
    lines += ["target: {kind: tensorrt-rtx, capabilities: [8.9, 12.0]}"]
    lines += ["calibration: {data: text.txt, sequences: 4, length: 16}"]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def compiled(recipe: Path) -> Compiled:
    """compiled(*overrides): an engine, made when first asked for."""
    engines: dict[tuple[str, ...], Path] = {}

    def build(*overrides: str) -> Path:
        if overrides not in engines:
            out = recipe.parent / f"engine-{len(engines)}"
            engines[overrides] = compile(recipe, out, overrides)
        return engines[overrides]

    return build


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_precision_builds_and_says_what_it_is(compiled: Compiled, scheme: str) -> None:
    root = compiled(*SCHEMES[scheme])
    manifest = read_manifest(root)
    (rank,) = manifest.ranks
    assert rank.executables == {"8.9": "rank0/engine.plan", "12.0": "rank0/engine.plan"}
    header = read_plan_header(root / "rank0/engine.plan")
    assert header.capabilities == ("8.9", "12.0")
    assert header.version == VERSION == manifest.target.version
    assert header.size_bytes == (root / "rank0/engine.plan").stat().st_size
    bits = {4: 7 * 2, 8: 7 * 2}  # linears of two layers; the head is the embedding, quantised too
    quantised = [each.bits for each in manifest.quantised.values()]
    assert all(quantised.count(n) >= count for n, count in bits.items() if n in quantised)
    assert bool(quantised) == (scheme not in ("fp16", "bf16"))


def test_an_fp8_engine_says_so(compiled: Compiled) -> None:
    """The head is the embedding, and has a matrix of its own."""
    root = compiled(*SCHEMES["fp8"])
    manifest, report = read_manifest(root), json.loads((root / "report.json").read_text())
    words = "fp8 by row, fp8 activations, static scales"
    assert manifest.quantised_kinds == report["quantised"] == {words: 15}
    assert "lm_head.weight" in manifest.quantised
    assert "embed.weight" not in manifest.quantised
    rows = 2 * (192 + 96 + 96 + 64 + 288 + 288 + 64) + 257
    items = 2 * (64 * (2 * 192 + 2 * 96) + 3 * 64 * 288) + 257 * 64
    assert report["decode"][0]["weight_bytes"] == items + 4 * rows
    assert 0 < report["emulated"] < report["tolerance"]
    done = CliRunner().invoke(inspect, [str(root)])
    assert f"15 tensors to {words}" in " ".join(done.output.split())


def test_inspect_shows_inputs_outputs_sizes_and_the_capabilities_read_back(
    compiled: Compiled,
) -> None:
    done = CliRunner().invoke(inspect, [str(compiled())])
    assert done.exit_code == 0, done.output
    size = (compiled() / "rank0/engine.plan").stat().st_size
    assert f"plan rank0/engine.plan: {size:,} bytes" in done.output or f"{size / 1e6:,.1f} MB" in (
        done.output
    )
    assert f"TensorRT for RTX {VERSION}, for 8.9, 12.0" in done.output
    lines = [" ".join(line.split()) for line in done.output.splitlines()]
    for line in (
        "input token_ids int32 [B, L]",
        "input cache.0-1.v fp16 [B, 3, 64, 32]",
        "output cache.0-1.v.updated fp16 [B, 3, 64, 32]",
        "output logits fp32 [R, 257]",
    ):
        assert line in lines


def test_the_plan_has_the_inputs_and_outputs_that_the_manifest_tells(compiled: Compiled) -> None:
    content = (compiled() / "rank0/engine.plan").read_bytes()
    for tensor in read_manifest(compiled()).ranks[0].plan_tensors:
        assert tensor.name.encode() in content


def test_report_tells_what_a_decode_step_reads(compiled: Compiled) -> None:
    """Linears of two layers, and the head, which is the embedding."""
    layer = 64 * (2 * 192 + 2 * 96) + 3 * 64 * 288
    items = 2 * layer + 257 * 64
    (plain,) = json.loads((compiled() / "report.json").read_text())["decode"]
    assert plain["weight_bytes"] == 2 * items
    assert plain["kv_bytes"] == 64 * 2 * 2 * 3 * 32 * 2
    assert plain["operations"] == 2 * (items + 2 * 2 * 6 * 32 * 64)
    root = compiled(*SCHEMES["w4a16"])
    report = json.loads((root / "report.json").read_text())
    assert report["decode"][0]["weight_bytes"] == items * (4 + 16 / 32) / 8
    assert 0 < report["emulated"] < report["tolerance"] == 0.03
    assert report["ranks"][0]["plan_bytes"] == (root / "rank0/engine.plan").stat().st_size


@pytest.mark.parametrize(
    ("quantisation", "kinds"),
    [
        ("{scheme: fp8_w8a8, method: smoothquant}", {"fp8 by row": 15}),
        (
            "{scheme: w8a8-static, overrides: [{match: '*.q_proj.weight', scheme: fp8_w8a8}]}",
            {"fp8 by row": 2, "int8 by row": 13},
        ),
    ],
    ids=["smoothed", "beside int8"],
)
def test_fp8_may_be_smoothed_and_stand_beside_int8(
    compiled: Compiled, quantisation: str, kinds: dict[str, int]
) -> None:
    """Of one value then, which is rounded to both, each with a scale of its own."""
    found: dict[str, int] = {}
    manifest = read_manifest(compiled(f"quantisation={quantisation}"))
    for words, count in manifest.quantised_kinds.items():
        kind = words.partition(",")[0]
        found[kind] = found.get(kind, 0) + count
    assert found == kinds


@pytest.mark.parametrize("scheme", ["w8a8", "fp8"])
def test_ranks_with_rounded_activations_are_held_to_the_reference(
    compiled: Compiled, scheme: str
) -> None:
    """One scale for all columns, whichever rank has them."""
    assert len(read_manifest(compiled(*SCHEMES[scheme], "parallel.tp=3")).ranks) == 3


def test_ranks_have_plans_with_collectives(compiled: Compiled) -> None:
    """The build holds the three networks together to the reference."""
    root = compiled("parallel.tp=3")
    manifest = read_manifest(root)
    assert len(manifest.ranks) == 3
    for index, rank in enumerate(manifest.ranks):
        assert rank.heads.count == 2
        content = (root / f"rank{index}/engine.plan").read_bytes()
        assert b"all_reduce.dist_collective" in content


def test_stages_have_plans_that_pass_activations_on(compiled: Compiled) -> None:
    first, second = read_manifest(compiled("parallel.pp=2")).ranks
    assert "next_hidden" in [tensor.name for tensor in first.plan_tensors if not tensor.is_input]
    assert "hidden" in [tensor.name for tensor in second.plan_tensors if tensor.is_input]


def test_a_network_that_diverges_is_not_published(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = recipe.parent / "diverged"
    monkeypatch.setattr(verify_plans, "relative_difference", lambda got, expected: 0.1)
    with pytest.raises(InternalError, match="emulated network's logits differ"):
        compile(recipe, out)
    assert not out.exists()


def test_ranks_are_not_compiled_one_by_one(recipe: Path) -> None:
    with pytest.raises(RecipeError, match="leave it out"):
        compile_rank(0, recipe, recipe.parent / "rank", ["parallel.tp=3"])


def test_without_tensorrt_it_says_what_to_install(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tensorrt_rtx", None)
    out = recipe.parent / "none"
    with pytest.raises(BuildError, match=r"pip install '\.\[build,tensorrt-rtx\]'"):
        compile(recipe, out)
    assert not out.exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["quantisation={scheme: w8a16, symmetric: false}"], "grids are symmetric"),
        (["quantisation={scheme: w8a16, group_size: 32}"], "a group a row, not one of 32"),
        (["quantisation={scheme: w4a16, group_size: row}"], "not row"),
        (["quantisation={scheme: w4a16, group_size: 256}"], "32, 64, 96, 128, 160, 192 columns"),
        (["quantisation=w4a16", "precision=bf16"], "needs precision fp16"),
        (["quantisation=fp8_w8a8", "target.capabilities=[8.6]"], "fp8_w8a8 needs one of 8.9, 12.0"),
        (["target.capabilities={}"], "a compute capability or a list of them"),
    ],
)
def test_what_a_plan_can_not_have_is_refused_by_the_recipe(
    recipe: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        compile(recipe, recipe.parent / "refused", overrides)


def test_heads_that_do_not_fit_are_refused(
    tmp_path: Path, save_tiny_llama: Callable[..., Path]
) -> None:
    path = save_tiny_llama(tmp_path, head_dim=30)
    with pytest.raises(RecipeError, match=r"multiple of 8 elements.*have 30"):
        compile(path, tmp_path / "engine", ["target=tensorrt-rtx", "precision=fp16", "kv_cache={}"])


@pytest.mark.parametrize(
    "overrides", [(), ("parallel.tp=3",), SCHEMES["fp8"]], ids=["alone", "tp=3", "fp8"]
)
def test_verify_emulates_an_engine(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    root = compiled(*overrides)
    monkeypatch.chdir(root.parent)
    done = CliRunner().invoke(verify_command, [str(root), "--emulate"])
    assert done.exit_code == 0, done.output
    assert "emulated, not run on a GPU" in done.output
    assert "verified: at most" in done.output


def test_an_engine_of_another_recipe_is_not_emulated(
    copied: Path, compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(compiled().parent)
    change_file(copied, "recipe.yaml", lambda text: text.replace(b"tokens: 24", b"tokens: 20"))
    done = CliRunner().invoke(verify_command, [str(copied), "--emulate"])
    assert "recipe.yaml makes another limits" in str(done.exception)


def test_a_model_that_is_gone_is_looked_for_here(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(copied)
    done = CliRunner().invoke(verify_command, [str(copied), "--emulate"])
    assert "with --emulate it starts at the current folder" in str(done.exception)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"fp16"', b'"bf16"', "other caches than its layers: cache.0.k"),
        (b'"max_sequence_length": 64', b'"max_sequence_length": 65', "sequences of 65"),
        (b'"int32"', b'"int33"', "dtype 'int33' of a plan"),
    ],
)
def test_a_manifest_that_its_plan_contradicts_is_refused(
    copied: Path, old: bytes, new: bytes, message: str
) -> None:
    path = copied / "manifest.json"
    content = path.read_bytes()
    begin = content.index(b'"plan_tensors"') if b"fp16" in old or b"int32" in old else 0
    path.write_bytes(content[:begin] + content[begin:].replace(old, new, 1))
    seal_again(copied)
    with pytest.raises(EngineError, match=message):
        read_manifest(copied)


def test_emulation_is_not_for_the_cpu(tiny_engine: Path) -> None:
    done = CliRunner().invoke(verify_command, [str(tiny_engine), "--emulate"])
    assert "this one is for cpu" in str(done.exception)


def test_slots_that_would_not_be_aligned_are_refused(
    tmp_path: Path, save_tiny_llama: Callable[..., Path]
) -> None:
    """A position of one head of 8 takes 16 bytes, so 16 of them end at a multiple of 256."""
    path = save_tiny_llama(tmp_path, num_key_value_heads=1, head_dim=8)
    overrides = ["target=tensorrt-rtx", "precision=fp16", "kv_cache={}"]
    with pytest.raises(RecipeError, match="has to be a multiple of 16"):
        compile(path, tmp_path / "engine", [*overrides, "limits.max_sequence_length=63"])


# Loading, on a machine whose GPU and installation are pretended.


@pytest.fixture
def on_ada(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of compute capability 8.9 and the version that builds here."""
    monkeypatch.setattr(engine_module, "compute_capability", lambda: "8.9")
    monkeypatch.setattr(engine_module, "rtx_version", lambda: VERSION)


@pytest.fixture
def copied(compiled: Compiled, tmp_path: Path) -> Path:
    """A copy of an engine, to be damaged."""
    import shutil

    return Path(shutil.copytree(compiled(), tmp_path / "engine"))


def change_plan(root: Path, change: Callable[[bytes], bytes]) -> None:
    change_file(root, "rank0/engine.plan", change)


def change_file(root: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Change a file, and let the manifest know it as published."""
    before = (root / name).read_bytes()
    after = change(before)
    assert after != before
    (root / name).write_bytes(after)
    manifest = root / "manifest.json"
    text = manifest.read_text()
    record = json.loads(text)["files"][name]
    old, new = json.dumps(record["sha256"]), json.dumps(hashlib.sha256(after).hexdigest())
    begin = text.index(f'"{name}": {{', text.index('"files"'))
    tail = text[begin:].replace(old, new, 1)
    tail = tail.replace(f'"size_bytes": {len(before)}', f'"size_bytes": {len(after)}', 1)
    manifest.write_text(text[:begin] + tail)
    seal_again(root)


def seal_again(root: Path) -> None:
    """Write the digest of the manifest as it is."""
    manifest = root / "manifest.json"
    text = manifest.read_text()
    digest = text.split('"digest": "')[1].split('"')[0]
    text = text.replace(digest, "")
    sealed = hashlib.sha256(text.encode()).hexdigest()
    manifest.write_text(text.replace('"digest": ""', f'"digest": "{sealed}"'))


@pytest.mark.usefixtures("on_ada")
def test_an_engine_for_this_gpu_opens(compiled: Compiled) -> None:
    assert open_engine(compiled()).variant == "8.9"


@pytest.mark.usefixtures("on_ada")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: plan[:-1], "damaged"),
        (lambda plan: plan[:40], "no TensorRT plan"),
        (lambda plan: b"x" + plan[1:], "no TensorRT plan"),
        (lambda plan: plan[:32] + struct.pack("<I", 8) + plan[36:], "12.0 is wanted"),
        (lambda plan: plan[:24] + bytes([1, 6, 0, 9]) + plan[28:], "RTX 1.6.0.9"),
    ],
    ids=["truncated", "cut to nothing", "another file", "wrong mask", "wrong version"],
)
def test_a_plan_that_is_not_what_the_manifest_says_is_refused(
    copied: Path, change: Callable[[bytes], bytes], message: str
) -> None:
    change_plan(copied, change)
    with pytest.raises(EngineError, match=message):
        open_engine(copied)
    done = CliRunner().invoke(inspect, [str(copied)])
    assert message in str(done.exception)


@pytest.mark.usefixtures("on_ada")
def test_a_damaged_plan_is_refused_by_its_digest(copied: Path) -> None:
    path = copied / "rank0/engine.plan"
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)
    with pytest.raises(EngineError, match="sha256"):
        open_engine(copied)


@pytest.mark.usefixtures("on_ada")
def test_another_gpu_is_refused(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "compute_capability", lambda: "8.6")
    with pytest.raises(EngineError, match=r"capabilities 8\.9, 12\.0, and this GPU has 8\.6"):
        open_engine(compiled())


@pytest.mark.usefixtures("on_ada")
def test_another_version_is_refused(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "rtx_version", lambda: "1.6.0.9")
    with pytest.raises(EngineError, match=r"and 1\.6\.0\.9 is installed"):
        open_engine(compiled())


def test_without_a_gpu_it_says_what_is_needed(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", fail)
    with pytest.raises(EngineError, match="needs an NVIDIA GPU and its driver"):
        LLM(compiled())
