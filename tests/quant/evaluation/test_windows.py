"""Which windows of a text are run, and which texts and numbers are refused."""

from collections.abc import Callable
from pathlib import Path

import pytest

from llmbuild.errors import RequestError
from llmbuild.quant.evaluation.windows import check_context, read_windows, slots_for
from llmbuild.runtime.manifest import Manifest
from llmbuild.runtime.tokenizer import Tokenizer


def test_windows_follow_one_another_without_special_tokens(
    tokenizer: Tokenizer, text_path: Path
) -> None:
    windows = read_windows(tokenizer, 256, text_path, 13, 5)
    ids = tokenizer.encode(text_path.read_text(encoding="utf-8"), with_bos=False)
    assert windows.shape == (5, 13)
    assert windows.flatten().tolist() == ids[:65]


def test_short_text_has_the_windows_it_has(tokenizer: Tokenizer, text_path: Path) -> None:
    windows = read_windows(tokenizer, 256, text_path, 50, 64)
    assert len(windows) == len(text_path.read_bytes()) // 50


def test_text_without_one_window_is_refused_with_both_numbers(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "short.txt"
    path.write_text("0123456789")
    with pytest.raises(RequestError, match="has 10 tokens; one window needs 11"):
        read_windows(tokenizer, 256, path, 11, 1)


@pytest.mark.parametrize("context", [65, 2, 0, -1])
def test_context_past_the_limit_or_without_a_scored_token_is_refused(
    make_manifest: Callable[..., Manifest], context: int
) -> None:
    with pytest.raises(RequestError, match=rf"context is {context} .* 3 .* 64"):
        check_context(make_manifest(), context)


def test_no_windows_are_refused(tokenizer: Tokenizer, text_path: Path) -> None:
    with pytest.raises(RequestError, match="windows is 0"):
        read_windows(tokenizer, 256, text_path, 9, 0)


@pytest.mark.parametrize("content", [None, b"abc\xff" * 50])
def test_text_that_cannot_be_read_is_refused(
    tokenizer: Tokenizer, tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "bad.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RequestError, match=r"bad\.txt (can't be read|isn't UTF-8)"):
        read_windows(tokenizer, 256, path, 9, 1)


def test_slots_take_no_more_blocks_than_the_fullest_step_needs(
    make_manifest: Callable[..., Manifest],
) -> None:
    limits = make_manifest(max_step_tokens=29, max_sequences=9).limits
    slots = slots_for(limits, 4, (7, 13))
    assert (slots.count, slots.blocks_each, slots.num_blocks) == (4, 4, 17)
    assert slots_for(limits, 4, (1, 13)).num_blocks == 5
