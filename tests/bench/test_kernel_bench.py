"""The kernel benchmark has every kernel, counts its work as it is, and gives sound numbers."""

import math
import re
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from bench import kernels, machine
from bench.cases import Batch, Case, Shape, cases
from bench.kernels import KernelReport
from bench.roofline import Work
from llmbuild.errors import UserError

TINY = Shape(
    "tiny", hidden=64, inner=128, heads=4, kv_heads=2, head_dim=16, vocab=50, layers=2, block_size=4
)
KERNEL = re.compile(r"^void (\w+)\(const Worker& worker", re.MULTILINE)
AMONG_RANKS = {
    "all_reduce",
    "send_rows",
    "receive_rows",
}  # bench.collectives times sums; they need other ranks


@pytest.fixture(scope="module")
def result(short_samples: None) -> KernelReport:
    return kernels.measure(TINY, threads=2)


def case(kernel: str, what: str, rows: int) -> Case:
    (found,) = (c for c in cases(TINY) if (c.kernel, c.what, c.batch.rows) == (kernel, what, rows))
    return found


def test_every_kernel_of_the_plugins_is_timed(checkout: Path, result: KernelReport) -> None:
    plugins = checkout / "plugins"
    headers = [path for path in plugins.glob("*/*.h") if path.parent.name != "common"]
    defined = {header: set(KERNEL.findall(header.read_text())) for header in headers}
    recognised = [kernels for header, kernels in defined.items() if header.name == "cpu.h"]
    assert all(recognised), "a plugin whose kernels aren't recognised"
    known = set().union(*defined.values())
    assert {timing.kernel for timing in result.timings} == known - AMONG_RANKS


def test_every_case_has_a_line_of_sound_numbers(result: KernelReport) -> None:
    assert len(result.timings) == len(list(cases(TINY)))
    roofs = machine.best_roofs(result.before, result.after)
    for timing in result.timings:
        for number in (timing.seconds, roofs.fraction(timing.work, timing.seconds)):
            assert math.isfinite(number)
            assert number > 0
    lines = kernels.table(result).splitlines()
    assert len(lines) == 2 + len(result.timings)
    assert "nan" not in kernels.table(result)


def test_command_prints_the_table_and_writes_json_and_plot(
    result: KernelReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "measure", lambda shape, threads: result)
    written, drawn = tmp_path / "kernels.json", tmp_path / "plot.svg"
    arguments = ["llama-1.1b", "--json", str(written), "--plot", str(drawn)]
    done = CliRunner().invoke(kernels.main, arguments, catch_exceptions=False)
    assert kernels.table(result) in done.output
    assert machine.summary(result.after) in done.output
    assert msgspec.json.decode(written.read_bytes(), type=KernelReport) == result
    assert "<!-- paged_attention -->" in drawn.read_text()


def test_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"nosuch.*smollm2-135m, llama-1\.1b"):
        CliRunner().invoke(kernels.main, ["nosuch"], catch_exceptions=False)


@pytest.mark.parametrize("batch", [Batch(1, 1, 9), Batch(3, 1, 128), Batch(2, 5, 7)])
def test_keys_are_those_that_a_causal_mask_leaves(batch: Batch) -> None:
    sequence = range(batch.context - batch.new_tokens, batch.context)
    assert batch.keys == batch.sequences * sum(position + 1 for position in sequence)


def test_linear_work_is_its_padded_weights_rows_and_products() -> None:
    # 128 outputs of 64 inputs: 8 whole tiles; 8 rows in, 8 rows out.
    expected = Work(128 * 64 * 2, (8 * 64 + 8 * 128) * 4, 2 * 8 * 128 * 64)
    assert case("linear", "qkv 128x64 bf16", 8).work == expected
    # 50 outputs take the weights of 64.
    assert case("linear", "lm_head 50x64 float", 1).work.cold_bytes == 64 * 64 * 4


def test_int8_linear_work_is_packed_weights_and_rows_with_their_scales_and_sums() -> None:
    # 128 outputs of 2 groups of 32: 16 code bytes, a scale and a minimum of 2 bytes each. 8 rows of
    # 64 codes, 2 scales, 2 groups of 2 sums; 8 rows of 128 outputs.
    packed, rows = 128 * 2 * (16 + 2 + 2), 8 * (64 + 2 * 4 + 2 * 2 * 4 + 128 * 4)
    expected = Work(packed, rows, 0, 2 * 8 * 128 * 64)
    what = "qkv 128x64 int4, groups of 32, with minimum"
    assert case("int8_linear", what, 8).work == expected


def test_decode_attention_reads_each_key_and_value_once() -> None:
    # 128 positions of 2 KV heads of 16, K and V, bf16; 4 query heads of 16, 2 products of 2.
    expected = Work(128 * 2 * 16 * 2 * 2, 2 * 4 * 16 * 4, 128 * 4 * 16 * 4)
    assert case("paged_attention", "decode at 128 bf16", 1).work == expected


def test_experts_without_tokens_are_no_work() -> None:
    expert_bytes = 64 * 64 * 2  # 64 outputs of 64 inputs, bf16
    for rows, experts in ((1, 2), (32, 8)):
        moe = case("moe_linear", "64x64 2 of 8 bf16", rows)
        assert moe.work.cold_bytes == experts * expert_bytes
        assert moe.copy_bytes == 8 * expert_bytes
