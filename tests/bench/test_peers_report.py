"""The comparison's tables: medians, ratios and fractions of bounds, beside sums done by hand."""

import pytest

from bench.machine import PEAKS, READ_SIZES, Machine
from bench.peers import report
from bench.peers.bounds import kv_token_bytes, least_work, roofs
from bench.peers.contestant import Result, Visit
from bench.peers.report import Measure, best_peer, fraction, measures, ratio
from bench.peers.run import Comparison
from bench.peers.variants import Variant
from bench.peers.workload import Case

PREFILL = Case("prefill-512", "prefill", [[1] * 512], [1])
DECODE = Case("decode-128", "decode", [[1] * 128], [129])
SERVING = Case("requests-2", "serving", [[1] * 10, [1] * 20], [3, 2])
CASES = [PREFILL, DECODE, SERVING]


def measured_machine(scale: float, bf16: float | None) -> Machine:
    return Machine(
        cpu="a processor",
        threads=2,
        isa_level="x86-64-v3",
        compiler="g++",
        date="2026-01-01",
        load_average=0.1,
        read_bytes_per_s=dict.fromkeys(READ_SIZES, scale * 50e9),
        operations_per_s=dict(zip(PEAKS, (scale * 500e9, bf16, scale * 2000e9), strict=True)),
        barrier_s=1e-6,
    )


def result(name: str, peer: str, rates: dict[str, list[float]], load_s: float) -> Result:
    visits = [Visit(case, rate, 0.0) for case, each in rates.items() for rate in each]
    return Result(
        Variant(name, peer, "model", "int8", 2),
        weights_bytes=100_000_000,
        versions=f"{name} 1.0",
        loads_s=[load_s],
        visits=visits,
    )


OURS = result("ours", "llmbuild", {"prefill-512": [8000], "decode-128": [300, 400, 200]}, 0.2)
FAST = result("fast", "openvino", {"prefill-512": [4000], "decode-128": [100]}, 1.0)
SLIM = result("slim", "onnxruntime", {"prefill-512": [1000], "decode-128": [150]}, 0.1)
COMPARISON = Comparison(
    threads=2,
    repeats=3,
    machines=[measured_machine(1.0, None), measured_machine(1.2, None)],
    results=[OURS, FAST, SLIM],
    absent={"vllm": "no wheel fits"},
)


def measure(name: str) -> Measure:
    (found,) = (each for each in measures(CASES) if each.name == name)
    return found


def test_best_peer_has_the_highest_rate_or_the_lowest_time_and_is_never_ours() -> None:
    results = COMPARISON.results
    assert best_peer(measure("prefill-512 tokens/s"), results) is FAST
    assert best_peer(measure("decode-128 tokens/s"), results) is SLIM
    assert best_peer(measure("load ms"), results) is SLIM
    assert best_peer(measure("requests-2 tokens/s"), results) is None


def test_ratios_are_above_one_where_ours_is_better() -> None:
    assert ratio(measure("decode-128 tokens/s"), OURS, SLIM) == 2.0  # medians: 300 and 150
    assert ratio(measure("load ms"), OURS, FAST) == pytest.approx(5.0)
    assert ratio(measure("prefill-512 ms"), OURS, FAST) == pytest.approx(2.0)
    assert ratio(measure("load ms"), OURS, SLIM) == pytest.approx(0.5)
    assert ratio(measure("requests-2 tokens/s"), OURS, SLIM) is None


def test_work_of_a_prefill_is_all_its_tokens_and_one_row_of_logits() -> None:
    """SmolLM2-135M: 30 layers of 576 x (576 + 192 + 192 + 576) + 3 x 576 x 1536 weights."""
    layers = 30 * (576 * (576 + 192 + 192 + 576) + 3 * 576 * 1536)
    attended = 512 * 513 // 2 * 30 * 4 * 576
    work = least_work(PREFILL, 100, 46080)
    assert work.operations == 2 * layers * 512 + 2 * 49152 * 576 + attended
    assert work.cold_bytes == 100  # once; its own KV is written, not read


def test_work_of_a_decode_reads_weights_and_kv_for_each_token() -> None:
    work = least_work(DECODE, 100, 10)
    assert work.cold_bytes == 128 * 100 + 10 * sum(range(129, 257))
    layers = 30 * (576 * (576 + 192 + 192 + 576) + 3 * 576 * 1536)
    attended = 4 * 30 * 576 * sum(range(129, 257))
    assert work.operations == 128 * 2 * (layers + 49152 * 576) + attended


def test_work_of_requests_together_is_as_many_steps_as_the_longest_output() -> None:
    """10 + 20 prompt tokens, then contexts of 11 and 12 and of 21."""
    work = least_work(SERVING, 100, 10)
    assert work.cold_bytes == 3 * 100 + 10 * (11 + 12 + 21)
    layers = 30 * (576 * (576 + 192 + 192 + 576) + 3 * 576 * 1536)
    keys = 10 * 11 // 2 + 20 * 21 // 2 + 11 + 12 + 21
    logits = 2 * 49152 * 576 * (3 + 2)
    assert work.operations == 2 * layers * (30 + 3) + logits + 4 * 30 * 576 * keys


def test_kv_of_a_token_is_k_and_v_of_all_layers() -> None:
    assert kv_token_bytes(2) == 30 * 2 * 3 * 64 * 2


def test_fraction_is_of_the_best_measurement_of_the_machine() -> None:
    """300 tokens/s of 100 MB and the KV of 192.5 tokens on average, at 60 GB/s."""
    bytes_per_token = 100e6 + 192.5 * 23040
    assert fraction(COMPARISON, DECODE, OURS) == pytest.approx(300 * bytes_per_token / 60e9)
    operations = least_work(PREFILL, 0, 0).operations / 512
    assert fraction(COMPARISON, PREFILL, OURS) == pytest.approx(8000 * operations / 2400e9)
    assert fraction(COMPARISON, SERVING, OURS) is None


def test_peak_of_numbers_that_the_processor_lacks_is_that_of_fp32() -> None:
    assert roofs([measured_machine(1.0, None)], "bf16").operations == 500e9
    assert roofs([measured_machine(1.0, 900e9)], "bf16").operations == 900e9


def test_report_shows_medians_ranges_and_what_is_missing() -> None:
    slim = result("slim", "onnxruntime", {"decode-128": [150]}, 0.1)
    slim.failures["prefill-512"] = "it ended with -9"
    comparison = Comparison(2, 3, COMPARISON.machines, [OURS, FAST, slim], COMPARISON.absent)
    text = report.write(comparison, CASES)
    assert "300 (200..400)" in text
    assert measure("prefill-512 ms").median(OURS) == 64.0  # 512 tokens at 8000 a second
    assert "slim (static)" in text
    assert "- vllm: no wheel fits" in text
    assert "- slim, prefill-512: it ended with -9" in text
    assert "| decode-128 tokens/s | slim | 150 | 2.00x |" in " ".join(text.split())


def test_runs_that_others_disturbed_are_counted() -> None:
    busy = result("busy", "openvino", {}, 1.0)
    busy.visits = [Visit("decode-128", 100, others) for others in (0.0, 0.5, 0.09)]
    text = report.write(Comparison(2, 3, COMPARISON.machines, [busy], {}), CASES)
    assert "In 1 of 3 runs" in text
    assert "No peer" not in text


def test_report_without_peers_says_so() -> None:
    text = report.write(Comparison(2, 3, COMPARISON.machines, [OURS], {}), CASES)
    assert "No peer gave a figure." in text
    assert "## Missing" not in text
