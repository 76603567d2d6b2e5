import os

import pytest

from llmbuild.errors import UserError
from llmbuild.runtime.threads import choose_num_threads, choose_pinning


@pytest.fixture(autouse=True)
def four_processors(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {2, 3, 5, 7})


def test_default_is_every_processor(capsys):
    assert choose_num_threads(None) == 4
    assert choose_num_threads(4) == 4
    assert capsys.readouterr() == ("", "")


def test_more_threads_than_processors_are_warned_of_in_one_line(capsys):
    assert choose_num_threads(5) == 5
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Warning: num_threads is 5, but this process may use 4 processors")
    assert err.count("\n") == 1


@pytest.mark.parametrize("num_threads", [0, -1, 1.5, True, "2", 1 << 17])
def test_what_is_no_number_of_threads_is_refused(num_threads):
    with pytest.raises(UserError, match="num_threads"):
        choose_num_threads(num_threads)


@pytest.mark.parametrize(("num_threads", "pins"), [(1, False), (3, False), (4, True), (5, False)])
def test_threads_are_pinned_by_default_where_each_has_a_processor(num_threads, pins):
    assert choose_pinning(None, num_threads) is pins


def test_stated_pinning_is_kept():
    assert choose_pinning(True, 3) is True
    assert choose_pinning(False, 4) is False


@pytest.mark.parametrize("pin_threads", [0, 1, "yes"])
def test_what_is_no_choice_is_refused(pin_threads):
    with pytest.raises(UserError, match="pin_threads"):
        choose_pinning(pin_threads, 4)
