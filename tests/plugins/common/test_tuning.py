"""The table of tiles."""

import pytest

from llmbuild.plugins.common import tuning
from llmbuild.plugins.common.tuning import Tiles, tuned


def test_sm_without_an_entry_takes_the_nearest_below(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Tiles(16, 16, 16, 4, 2, "here"), Tiles(32, 16, 16, 4, 2, "there")
    monkeypatch.setattr(tuning, "_TABLE", {"op": {80: first, 90: second}})
    assert [tuned("op", sm) for sm in (80, 86, 89)] == [first] * 3
    assert [tuned("op", sm) for sm in (90, 100, 120)] == [second] * 3


@pytest.mark.parametrize("op", tuning._TABLE)
def test_every_operation_has_tiles_for_every_sm(op: str) -> None:
    for sm in (80, 86, 89, 90, 100, 120):
        tiles = tuned(op, sm)
        sizes = (tiles.rows, tiles.columns, tiles.depth, tiles.num_warps, tiles.num_stages)
        assert min(sizes) >= 1
        assert tiles.num_warps & (tiles.num_warps - 1) == 0
        assert tiles.source
