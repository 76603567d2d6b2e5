"""The benchmark of sums over ranks runs real ranks, and counts what they have to move."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from bench import collectives, machine
from bench.collectives import CollectivesReport, Timing


@pytest.fixture(scope="module")
def result(short_samples: None) -> Iterator[CollectivesReport]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "ROWS", (1, 3))
        patch.setattr(collectives, "HIDDEN", (5, 64))
        patch.setattr(collectives, "CALLS", (5, 20))
        yield collectives.measure((2, 3), threads=1)


def test_every_size_has_a_line_of_sound_numbers(result: CollectivesReport) -> None:
    sizes = [(timing.ranks, timing.rows, timing.hidden) for timing in result.timings]
    assert sizes == [(n, rows, hidden) for n in (2, 3) for rows in (1, 3) for hidden in (5, 64)]
    for timing in result.timings:
        assert 0 < timing.p50_s <= timing.p99_s
        assert 0 < timing.bound_s < float("inf")
    assert len(collectives.table(result).splitlines()) == 2 + 8


def test_ranks_move_their_part_and_their_share_of_the_sum() -> None:
    """Of 12 floats, 48 bytes, three ranks sum 16 each."""
    part, sums = 2 * 48, 3 * 16 + 2 * 2 * 16
    timing = Timing(ranks=3, rows=3, hidden=4, p50_s=1.0, p99_s=1.0, copy_bytes_per_s=16.0)
    assert timing.bytes_moved == part + sums
    assert timing.bound_s == (part + sums) / 16


@pytest.mark.parametrize(("processors", "crowded"), [(6, ""), (5, "3 ranks"), (3, "2 and 3 ranks")])
def test_ranks_without_processors_of_their_own_are_told(
    result: CollectivesReport, processors: int, crowded: str
) -> None:
    changed = CollectivesReport(2, processors, result.before, result.after, result.timings)
    assert collectives.remark(changed).startswith(crowded)
    assert bool(collectives.remark(changed)) == bool(crowded)


def test_command_prints_the_table_and_writes_json(
    result: CollectivesReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "measure", lambda ranks, threads: result)
    written = tmp_path / "collectives.json"
    arguments = ["--ranks", "2", "--json", str(written)]
    done = CliRunner().invoke(collectives.main, arguments, catch_exceptions=False)
    assert collectives.table(result) in done.output
    assert machine.summary(result.after) in done.output
    assert msgspec.json.decode(written.read_bytes(), type=CollectivesReport) == result
