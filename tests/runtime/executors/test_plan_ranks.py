"""Engines of several ranks on GPUs that aren't there: each rank is a thread with a fake GPU, and
TensorRT's collectives add up what the emulated networks of all have. Nothing here has run on a GPU,
and NCCL is a stand-in."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeCuda, Status
from fake_tensorrt import FakeTensorRT
from plan_harness import Compiled, prefill, reference_tokens

from llmbuild import LLM, SamplingParams
from llmbuild.builder import rtx_plans
from llmbuild.builder.compile import compile
from llmbuild.builder.targets.tensorrt.built_plan import shapes_of
from llmbuild.builder.targets.tensorrt.emulation.emulate import Emulated, emulate
from llmbuild.builder.targets.tensorrt.profiles import profiles
from llmbuild.errors import EngineError, RankError, UserError
from llmbuild.runtime import engine as engine_module
from llmbuild.runtime.engine import open_engine
from llmbuild.runtime.executors import cuda, rtx_plan
from llmbuild.runtime.executors.open import open_executor
from llmbuild.runtime.executors.plan_executor import PlanExecutor
from llmbuild.runtime.parallel import plan_ranks, plan_worker
from llmbuild.runtime.parallel.messages import Channel

TP = 2  # of 3 KV heads and 257 tokens
PROMPTS = [[7, 200, 31], [5], list(range(40, 61))]


class Exchange:
    """What NCCL does: sums what all ranks bring."""

    def __init__(self) -> None:
        self.parts: list[Any] = [None] * TP
        self.barrier = threading.Barrier(TP, timeout=60)

    def of(self, rank: int) -> Callable[[Any], Any]:
        def total(part: Any) -> Any:
            self.parts[rank] = part
            try:
                self.barrier.wait()
                summed = np.sum(self.parts, axis=0)
                self.barrier.wait()
            except threading.BrokenBarrierError:
                return part  # what an aborted collective leaves is nothing to count on
            return summed

        return total


class StandInCommunicator:
    """ends: all that are there."""

    capsule = "NCCL's"

    def __init__(self, machine: "Machine", of: bytes, num_ranks: int, rank: int) -> None:
        assert (of, num_ranks) == (b"id", TP)
        self.machine, self.rank = machine, rank
        try:
            machine.joined.wait()  # as ncclCommInitRank does
        except threading.BrokenBarrierError as error:
            raise EngineError("nobody else came") from error
        machine.open_ends.add(rank)

    def abort(self) -> None:
        self.machine.exchange.barrier.abort()
        self.machine.gpus[self.rank].is_lost = True
        self.close()

    def close(self) -> None:
        self.machine.open_ends.discard(self.rank)


class Machine:
    """GPUs, and threads in place of the ranks' processes."""

    def __init__(self, compiled: "CompiledRanks") -> None:
        self.exchange = compiled.exchange
        self.exchange.barrier.reset()
        self.gpus = [FakeCuda(number=rank, count=TP) for rank in range(TP)]
        self.trts = [
            FakeTensorRT(gpu, emulated, profiles(shapes, compiled.limits))
            for gpu, emulated in zip(self.gpus, compiled.networks, strict=True)
            for shapes in [shapes_of(emulated.lowering.inputs)]
        ]
        self.joined = threading.Barrier(TP, timeout=60)
        self.open_ends: set[int] = set()
        self.of_thread = threading.local()
        self.threads: list[threading.Thread] = []
        self.channels: dict[int, Channel] = {}

    @property
    def rank(self) -> int:
        return getattr(self.of_thread, "rank", 0)

    def start(self, rank: int, descriptors: list[int], command: object) -> "RankThread":
        return RankThread(self, rank)


class RankThread:
    """In place of a process."""

    id = 99

    def __init__(self, machine: Machine, rank: int) -> None:
        self.ours, theirs = socket.socketpair()
        self.channel = Channel(self.ours)
        machine.channels[rank] = channel = Channel(theirs)

        def work() -> None:
            machine.of_thread.rank = rank
            try:
                plan_worker.run(channel)
            except (ConnectionError, RankError, OSError):
                pass
            finally:
                channel.close()

        self.thread = threading.Thread(target=work, daemon=True)
        machine.threads.append(self.thread)
        self.thread.start()

    def how_it_ended(self) -> str:
        return "was ended"

    def wait(self, deadline: float) -> None:
        self.thread.join(max(0.0, deadline - time.monotonic()))

    def end(self) -> None:
        """Its channel is gone, as after a kill."""
        with suppress(OSError):
            self.ours.shutdown(socket.SHUT_RDWR)


class CompiledRanks:
    """An engine of ranks, and what emulates it."""

    def __init__(self, root: Path, made: list[Any]) -> None:
        self.root, self.exchange, self.limits = root, Exchange(), made[0][2]
        self.networks: list[Emulated] = [
            emulate(*arguments[:5], self.exchange.of(rank)) for rank, arguments in enumerate(made)
        ]


@pytest.fixture(scope="module")
def ranks(compiled: Compiled) -> CompiledRanks:
    """Of the same model as `compiled`."""
    recipe = compiled.root.parent / "recipe.yaml"
    build_plan, made = rtx_plans.build_plan, []

    def recording(*arguments: Any) -> Any:
        made.append(arguments)
        return build_plan(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rtx_plans, "build_plan", recording)
        overrides = ["precision=fp16", f"parallel.tp={TP}"]
        return CompiledRanks(compile(recipe, compiled.root.parent / "ranks", overrides), made)


@pytest.fixture
def machine(
    ranks: CompiledRanks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Machine]:
    made = Machine(ranks)
    version = rtx_plans.installed_tensorrt_rtx().__version__
    monkeypatch.setattr(engine_module, "compute_capability", lambda: "8.9")
    monkeypatch.setattr(engine_module, "rtx_version", lambda: version)
    monkeypatch.setattr(cuda, "load_bindings", lambda: made.gpus[made.rank])
    monkeypatch.setattr(rtx_plan, "load_tensorrt", lambda: made.trts[made.rank])
    monkeypatch.setenv("LLMBUILD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(plan_ranks, "unique_id", lambda: b"id")
    monkeypatch.setattr(plan_ranks, "RankProcess", made.start)
    for module in (plan_ranks, plan_worker):
        monkeypatch.setattr(
            module, "Communicator", lambda *arguments: StandInCommunicator(made, *arguments)
        )
    yield made
    made.exchange.barrier.abort()  # a process would have been killed
    for thread in made.threads:
        thread.join(10)
        assert not thread.is_alive()


def test_ranks_give_the_tokens_of_one(
    compiled: Compiled, ranks: CompiledRanks, machine: Machine
) -> None:
    """Greedy tokens are those of the reference; sampled ones are drawn from all tokens' logits."""
    greedy = SamplingParams(max_tokens=7, ignore_eos=True)
    with LLM(ranks.root) as llm:
        done = llm.generate(PROMPTS, greedy)
        assert machine.open_ends == {*range(TP)}
        contexts = [context for trt in machine.trts for context in trt.contexts]
        assert {context.communicator for context in contexts} == {"NCCL's"}
        assert len({len(trt.contexts) for trt in machine.trts}) == 1
        assert all(gpu.calls["cudaGraphLaunch"] > 0 for gpu in machine.gpus)
        sampled = SamplingParams(max_tokens=5, ignore_eos=True, temperature=1.5, seed=3)
        (drawn,) = llm.generate([PROMPTS[0]], sampled)
        llm.check()
    for prompt, completion in zip(PROMPTS, done, strict=True):
        assert completion.error is None
        assert list(completion.token_ids) == reference_tokens(compiled, prompt, 7)
    assert max(drawn.token_ids) >= 257 // TP  # not of rank 0's alone
    assert not machine.open_ends
    assert all(gpu.is_empty for gpu in machine.gpus)


def test_logits_come_in_the_order_of_tokens(
    compiled: Compiled, ranks: CompiledRanks, machine: Machine
) -> None:
    from llmbuild.builder.graph.reference import run_steps
    from llmbuild.plugins.common.kv_pools import LayerPools

    config, batch = compiled.config, prefill([3, 250, 9], 0)
    shape, dtypes = (2, config.num_kv_heads, 64, config.head_dim), ["fp32"] * config.num_kv_heads
    pools = [LayerPools.filled(shape, dtypes, dtypes) for _ in range(config.num_layers)]
    (expected,) = run_steps(compiled.step, compiled.read, [batch], pools)
    executor = open_executor(open_engine(ranks.root), 3)
    try:
        logits = executor.step(batch)
    finally:
        executor.close()
    assert logits.shape == expected.shape
    assert np.abs(logits - expected).max() < 0.03 * np.abs(expected).max()


def test_a_rank_that_goes_in_a_step_is_named_and_nothing_hangs(
    ranks: CompiledRanks, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = open_executor(open_engine(ranks.root), 3)
    step = PlanExecutor.step

    def leaving(self: Any, batch: Any) -> Any:
        if machine.rank == 1:
            raise ConnectionError
        return step(self, batch)

    monkeypatch.setattr(PlanExecutor, "step", leaving)
    for _ in range(2):  # it stays so
        with pytest.raises(RankError, match=r"^rank 1 \(process 99\) was ended; all ranks were"):
            executor.step(prefill([1, 2], 0))
    executor.close()


def test_a_rank_that_keeps_others_waiting_is_given_up(
    ranks: CompiledRanks, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = open_executor(open_engine(ranks.root), 3, rank_timeout_s=1.0)
    step, stuck = PlanExecutor.step, threading.Event()

    def waiting(self: Any, batch: Any) -> Any:
        if machine.rank == 1:
            stuck.wait(30)
        return step(self, batch)

    monkeypatch.setattr(PlanExecutor, "step", waiting)
    threading.Timer(4, stuck.set).start()
    with pytest.raises(RankError, match=r"^rank 1 \(process 99\) didn't answer within 1 s"):
        executor.step_greedy(prefill([1, 2], 0))
    executor.close()


def test_a_rank_that_can_not_open_its_plan_is_named(ranks: CompiledRanks, machine: Machine) -> None:
    machine.trts[1].broken = "deserialize"
    with pytest.raises(EngineError, match=r"^rank 1: .*engine\.plan can't be loaded"):
        open_executor(open_engine(ranks.root), 3)
    assert not machine.open_ends
    assert machine.gpus[0].is_empty


def test_ranks_that_do_not_meet_are_given_up(
    ranks: CompiledRanks, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*arguments: Any) -> Any:
        raise ConnectionError

    monkeypatch.setattr(plan_worker, "Communicator", gone)
    monkeypatch.setattr(plan_ranks, "START_S", 0.5)
    with pytest.raises(EngineError, match=r"^the ranks didn't meet in NCCL within 0\.5 s"):
        open_executor(open_engine(ranks.root), 3, rank_timeout_s=0.1)
    machine.joined.abort()
    assert machine.gpus[0].is_empty


def test_too_few_gpus_are_told(ranks: CompiledRanks, machine: Machine) -> None:
    for gpu in machine.gpus:
        gpu.count = 1
    with pytest.raises(EngineError, match="rank 1: rank 1 needs GPU 1, and this machine has 1"):
        open_executor(open_engine(ranks.root), 3)


def test_rank_0s_own_failure_is_told(ranks: CompiledRanks, machine: Machine) -> None:
    executor = open_executor(open_engine(ranks.root), 3, rank_timeout_s=2.0)
    machine.gpus[0].failing["cudaMemcpyAsync"] = Status.cudaErrorIllegalAddress
    with pytest.raises(RankError, match=r"^rank 0, this process, has failed: cudaMemcpyAsync"):
        executor.step(prefill([1, 2], 0))
    executor.close()


def test_a_launcher_is_refused(
    ranks: CompiledRanks, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", 0), ("WORLD_SIZE", TP), ("MASTER_ADDR", "::1")):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(UserError, match="2 ranks on GPUs are started by one process"):
        open_executor(open_engine(ranks.root), 3)


@pytest.mark.parametrize(
    ("rows", "token"),
    [
        ([(1.0, 4), (3.0, 9), (2.0, 15)], 9),
        ([(3.0, 4), (3.0, 9), (3.0, 15)], 4),  # the lowest of a tie
        ([(1.0, 4), (np.nan, 9), (2.0, 15)], ~9),
        ([(1.0, 4), (2.0, 9), (np.inf, 15)], ~15),
    ],
)
def test_the_likeliest_of_all_ranks_is_found(rows: list[tuple[float, int]], token: int) -> None:
    parts = [np.array([row], plan_worker.LARGEST).tobytes() for row in rows]
    assert plan_ranks._likeliest(parts).tolist() == [token]
