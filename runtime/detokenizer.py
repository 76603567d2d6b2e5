"""Text from token ids as they come: whole characters only, and an end at stop strings."""

from collections.abc import Sequence

from llmbuild.runtime.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # what decoders put for bytes that aren't (yet) a character


class Detokenizer:
    """Gives each token's text as soon as no later token can change it.

    The texts of all `push` and the `finish` joined are the decoding of all ids at once, for any
    ids. Only ids since an anchor are decoded each time. Decoders treat the first token apart
    (they strip a leading space), so an anchor is a token that has text of its own; and the text
    must be complete there, so that nothing before it matters any more.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # from the anchor on
        self._emitted = 0  # characters of their text that are given out

    def push(self, token_id: int) -> str:
        """The text that is certain now; empty while a character is incomplete."""
        piece = self._tokenizer.pieces[token_id]
        if piece.is_silent:
            return ""
        self._ids.append(token_id)
        # One byte that is wrong changes the text of its whole run of byte tokens, so a run is
        # held back until a token of another kind ends it.
        if piece.is_byte:
            return ""
        text = self._tokenizer.decode(self._ids)
        if text.endswith(REPLACEMENT):
            return ""
        new = text[self._emitted :]
        self._emitted = len(text)
        if piece.text:
            self._ids = [token_id]
            self._emitted = len(piece.text)
        return new

    def finish(self) -> str:
        """What was held back; a character left incomplete by the last token becomes U+FFFD."""
        text = self._tokenizer.decode(self._ids)[self._emitted :]
        self._ids = []
        self._emitted = 0
        return text


class StopMatcher:
    """Ends a text before the stop string that is completed first.

    If several are completed by the same character, the longest counts. Text that may be the
    start of a stop string is held back.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._held = ""
        self.is_stopped = False

    def push(self, text: str) -> str:
        """The text that can be given out now."""
        assert not self.is_stopped
        if not self._stop:
            return text
        text = self._held + text
        matches = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if matches:
            self.is_stopped = True
            self._held = ""
            return text[: min(matches)[1]]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text held back, when no more comes."""
        text, self._held = self._held, ""
        return text


class OutputText:
    """The text of one request's output, from its token ids and stop strings."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._matcher = StopMatcher(stop)

    @property
    def is_stopped(self) -> bool:
        """A stop string has been completed: nothing more is given out."""
        return self._matcher.is_stopped

    def push(self, token_id: int) -> str:
        return self._matcher.push(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """What was held back; it can still complete a stop string."""
        if self.is_stopped:
            return ""
        text = self._matcher.push(self._detokenizer.finish())
        return text + self._matcher.finish()


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that starts `stop` without completing it."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
