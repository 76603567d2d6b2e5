"""Engines of several ranks against the engine of one that was compiled from the same recipe."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from llmbuild import LLM, SamplingParams
from llmbuild.builder.compile import compile, compile_rank
from llmbuild.errors import BuildError, EngineError, RecipeError

Compiled = Callable[..., Path]

GREEDY = SamplingParams(max_tokens=14, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=14, ignore_eos=True, temperature=0.9, seed=5)
QUANTISED = (
    "quantisation={scheme: w4a16, group_size: 32, method: rtn}",
    "kv_cache.dtype=int8",
)


def prompts(lengths: tuple[int, ...] = (1, 4, 17, 30, 5)) -> list[list[int]]:
    rng = random.Random(2)
    return [[rng.randrange(256) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def compiled(
    tmp_path_factory: pytest.TempPathFactory, save_tiny_llama: Callable[..., Path]
) -> Compiled:
    """compiled(kv_heads, *overrides): an engine of a random model with six query heads, made when
    first asked for."""
    root = tmp_path_factory.mktemp("parallel")
    engines: dict[tuple[object, ...], Path] = {}

    def build(kv_heads: int, *overrides: str) -> Path:
        recipe = root / str(kv_heads) / "recipe.yaml"
        if not recipe.exists():
            save_tiny_llama(
                root / str(kv_heads),
                num_key_value_heads=kv_heads,
                head_dim=32,
                hidden_size=64,
                intermediate_size=288,
            )
        key = (kv_heads, *overrides)
        if key not in engines:
            engines[key] = compile(recipe, root / f"engine-{len(engines)}", overrides)
        return engines[key]

    return build


def tokens(engine: Path) -> list[tuple[int, ...]]:
    """What it gives for the prompts: together, drawn together, and one by one."""
    with LLM(engine, num_threads=1) as llm:
        together = [*llm.generate(prompts(), GREEDY), *llm.generate(prompts(), DRAWN)]
        alone = [llm.generate(prompt, GREEDY) for prompt in prompts()]
        llm.check()
    return [completion.token_ids for completion in (*together, *alone)]


def assert_same_tokens(compiled: Compiled, kv_heads: int, tp: int, pp: int, *more: str) -> None:
    ranks = compiled(kv_heads, f"parallel={{tp: {tp}, pp: {pp}}}", *more)
    assert len(list(ranks.glob("rank*/weights.safetensors"))) == tp * pp
    assert tokens(ranks) == tokens(compiled(kv_heads, *more))


@pytest.mark.parametrize(("kv_heads", "tp", "pp"), [(3, 2, 1), (3, 1, 2)])
def test_ranks_give_the_tokens_of_one(compiled: Compiled, kv_heads: int, tp: int, pp: int) -> None:
    assert_same_tokens(compiled, kv_heads, tp, pp)


@pytest.mark.slow
def test_quantised_ranks_give_the_tokens_of_one(compiled: Compiled) -> None:
    assert_same_tokens(compiled, 2, 3, 1, *QUANTISED)


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), QUANTISED], ids=["fp32", "int4 and int8 KV"])
@pytest.mark.parametrize("kv_heads", [1, 2, 3])
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (3, 1), (4, 1), (5, 1), (1, 2), (3, 2), (5, 2)])
def test_every_division_gives_the_tokens_of_one(
    compiled: Compiled, kv_heads: int, tp: int, pp: int, more: tuple[str, ...]
) -> None:
    assert_same_tokens(compiled, kv_heads, tp, pp, *more)


@pytest.mark.slow
def test_no_token_beyond_the_vocabulary_is_ever_the_likeliest(
    hf_model: Callable[..., object], compile_engine: Callable[..., Path]
) -> None:
    saved = hf_model("llama", vocab_size=33, tie_word_embeddings=True)
    weights = saved.model.state_dict()  # type: ignore[attr-defined]
    with torch.no_grad():
        for name, weight in weights.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()  # what is left is the token's embedding
        weights["model.embed_tokens.weight"][:, 0] = 9.0
        weights["model.norm.weight"][:] = torch.tensor([-1.0] + [0.01] * 119)
    saved.model.save_pretrained(saved.path)  # type: ignore[attr-defined]
    logits = saved.model(torch.arange(33)[None]).logits  # type: ignore[attr-defined]
    assert (logits < 0).all()
    engine = compile_engine(saved, "parallel.tp=2")
    with LLM(engine, num_threads=1) as llm:
        for params in (GREEDY, DRAWN, SamplingParams(max_tokens=20, temperature=50.0, seed=1)):
            for completion in llm.generate([[token] for token in range(33)], params):
                assert all(0 <= token < 33 for token in completion.token_ids)
        first = [llm.generate([token], SamplingParams(max_tokens=1)) for token in (0, 7, 32)]
    wanted = [int(logits[0, token].argmax()) for token in (0, 7, 32)]
    assert [completion.token_ids[0] for completion in first] == wanted


def test_more_ranks_than_query_heads_are_refused_in_one_line(compiled: Compiled) -> None:
    with pytest.raises(RecipeError) as caught:
        compiled(3, "parallel.tp=7")
    text = "parallel.tp: given 7; the model has 6 query heads, so 1 to 6 is allowed"
    assert str(caught.value) == text


def test_weights_that_ranks_have_in_common_are_stored_once(compiled: Compiled) -> None:
    engine = compiled(3, "parallel={tp: 2, pp: 1}")
    shared = (engine / "stage0" / "weights.safetensors").read_bytes()
    assert b"layers.1.attn_norm.weight" in shared
    for rank in range(2):
        own = (engine / f"rank{rank}" / "weights.safetensors").read_bytes()
        assert b"mlp.down_proj.weight" in own
        assert b"norm.weight" not in own


def test_an_engine_with_a_rank_missing_or_changed_is_refused(
    compiled: Compiled, tmp_path: Path
) -> None:
    engine = compiled(3, "parallel={tp: 2, pp: 1}")
    changes: list[tuple[Callable[[Path], object], str]] = [
        (lambda root: (root / "rank1" / "weights.safetensors").unlink(), "rank1/weights"),
        (lambda root: [path.unlink() for path in (root / "rank1").iterdir()], "rank1/engine"),
        (lambda root: _replace(root, b'"tp_rank": 1', b'"tp_rank": 0'), "altered"),
    ]
    for change, wanted in changes:
        copy = tmp_path / str(len(list(tmp_path.iterdir())))
        subprocess.run(["cp", "-r", engine, copy], check=True)
        change(copy)
        begin = time.monotonic()
        with pytest.raises(EngineError, match=wanted):
            LLM(copy)
        assert time.monotonic() - begin < 10


def _replace(root: Path, old: bytes, new: bytes) -> None:
    path = root / "manifest.json"
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new))


def _workers() -> list[int]:
    """Processes of ranks that this process has started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue
            if parent == os.getpid() and any(b"llmbuild.runtime.parallel" in w for w in words):
                found.append(int(entry.name))
    return sorted(found)


def test_a_rank_that_is_killed_fails_the_request_by_name_and_leaves_nothing(
    compiled: Compiled,
) -> None:
    engine = compiled(3, "parallel={tp: 2, pp: 1}")
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    with LLM(engine, num_threads=1) as llm:
        (worker,) = _workers()
        stream = llm.stream(prompts()[0], params)
        next(stream)
        os.kill(worker, signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(Exception, match="rank 1"):
            for _ in stream:
                pass
        assert time.monotonic() - begin < 20
        assert _workers() == []
    with LLM(engine, num_threads=1) as llm:
        assert len(llm.generate(prompts()[0], params).token_ids) == 30
    assert _workers() == []


def test_a_rank_that_is_stuck_is_noticed_within_the_time_limit(compiled: Compiled) -> None:
    engine = compiled(3, "parallel={tp: 2, pp: 1}")
    with LLM(engine, num_threads=1, rank_timeout_s=2.0) as llm:
        (worker,) = _workers()
        os.kill(worker, signal.SIGSTOP)
        begin = time.monotonic()
        with pytest.raises(Exception, match="rank 1"):
            llm.generate(prompts()[0], GREEDY)
        assert time.monotonic() - begin < 20
        assert _workers() == []


def test_workers_end_when_their_parent_is_killed(compiled: Compiled) -> None:
    engine = compiled(3, "parallel={tp: 2, pp: 1}")
    code = (
        "import sys, time; from llmbuild import LLM; llm = LLM(sys.argv[1], num_threads=1);"
        "print('open', flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(engine)], stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"open\n"
        workers = [*_children_of(parent.pid)]
        assert len(workers) == 1
        parent.kill()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline, "a worker outlives its parent"
        time.sleep(0.05)


def _children_of(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        yield from map(int, (task / "children").read_text().split())


def test_ranks_that_are_built_one_by_one_are_published_when_the_last_is_there(
    compiled: Compiled, tmp_path: Path, save_tiny_llama: Callable[..., Path]
) -> None:
    recipe = save_tiny_llama(tmp_path / "m")
    overrides = ["parallel.tp=2"]
    out = tmp_path / "engine"
    assert compile_rank(1, recipe, out, overrides) is None
    assert not out.exists()
    with pytest.raises(BuildError, match="another recipe"):
        compile_rank(0, recipe, out, [*overrides, "buckets=[1]"])
    assert compile_rank(0, recipe, out, overrides) == out
    together = compile(recipe, tmp_path / "together", overrides)
    for path in sorted(together.rglob("*.so")) + sorted(together.rglob("*.safetensors")):
        assert (out / path.relative_to(together)).read_bytes() == path.read_bytes()
    assert not list(tmp_path.glob(".*"))
    with pytest.raises(RecipeError, match="0 to 1 is allowed"):
        compile_rank(2, recipe, out, overrides)
    with pytest.raises(RecipeError, match="one rank"):
        compile_rank(0, recipe, out)
