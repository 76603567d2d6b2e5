import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from llmbuild.runtime.detokenizer import Detokenizer, OutputText, StopMatcher
from llmbuild.runtime.tokenizer import GenerationConfig, Tokenizer

VOCAB = 310  # past the last id of both tokenizers, so that unknown ids occur


def word_tokenizer(decoder):
    words = ["\u2581", "\u2581a", "b", "##c", "d</w>", ".", "e</w>", "\u2581\u2581f", "", "<s>"]
    backend = Backend(models.WordLevel({word: index for index, word in enumerate(words)}, "b"))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(["<s>"])
    return Tokenizer(backend, GenerationConfig(None, [], False))


WORD_TOKENIZERS = [
    word_tokenizer(decoder)
    for decoder in (
        None,
        decoders.Metaspace(),
        decoders.Metaspace(prepend_scheme="never"),
        decoders.WordPiece(),
        decoders.BPEDecoder(suffix="</w>"),
        decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
    )
]


def pieces(tokenizer, ids):
    detokenizer = Detokenizer(tokenizer)
    return [detokenizer.push(token_id) for token_id in ids], detokenizer.finish()


def ids_of(tokenizer, *tokens):
    return [tokenizer._backend.token_to_id(token) for token in tokens]


@settings(deadline=None, max_examples=300)
@given(ids=st.lists(st.integers(0, VOCAB), max_size=40))
def test_stream_of_any_byte_level_ids_is_their_decoding(byte_level, ids):
    parts, rest = pieces(byte_level, ids)
    assert "".join(parts) + rest == byte_level.decode(ids)


# Mostly bytes, spaces and special tokens, where pieces depend on each other.
ODD_PIECES = st.one_of(
    st.integers(0, VOCAB), st.integers(0, 2), st.integers(3, 258), st.sampled_from([259, 287])
)


@settings(deadline=None, max_examples=300)
@given(ids=st.lists(ODD_PIECES, max_size=40))
@example(ids=[287, 1, 1, 287])  # special tokens between words that start with a space
@example(ids=[259, 259, 287])
@example(ids=[3 + 0xE4, 3 + 0xBD, 3 + 0xA0, 3 + 0xFF, 260])  # a wrong byte after a character
def test_stream_of_any_sentencepiece_ids_is_their_decoding(sentencepiece, ids):
    parts, rest = pieces(sentencepiece, ids)
    assert "".join(parts) + rest == sentencepiece.decode(ids)


@pytest.mark.parametrize("tokenizer", WORD_TOKENIZERS)
@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 10)))
@example(ids=[1, 8, 1])  # a token without text between words that start with a space
def test_stream_of_other_decoders_is_their_decoding(tokenizer, ids):
    parts, rest = pieces(tokenizer, ids)
    assert "".join(parts) + rest == tokenizer.decode(ids)


@settings(deadline=None)
@given(text=st.text(st.sampled_from("heё ñ你😀wllo\n")))
def test_no_piece_of_valid_text_has_a_replacement_character(byte_level, sentencepiece, text):
    for tokenizer in (byte_level, sentencepiece):
        parts, rest = pieces(tokenizer, tokenizer.encode(text, with_bos=False))
        assert "\ufffd" not in "".join(parts) + rest
        assert "".join(parts) + rest == text


def test_character_comes_with_its_last_byte(byte_level):
    ids = byte_level.encode("a😀b")
    parts, rest = pieces(byte_level, ids)
    assert [part for part in parts if part] == ["a", "😀", "b"]
    assert rest == ""


def test_text_comes_with_its_token_unless_a_character_is_incomplete(sentencepiece):
    parts, rest = pieces(sentencepiece, sentencepiece.encode("the a", with_bos=False))
    assert parts == ["th", "e", " a"]
    assert rest == ""


def test_incomplete_end_becomes_a_replacement_character_only_at_the_finish(byte_level):
    ids = byte_level.encode("a😀")[:-1]
    parts, rest = pieces(byte_level, ids)
    assert "".join(parts) == "a"
    assert rest == "\ufffd"


def test_special_token_within_a_character_gives_nothing(byte_level):
    ids = byte_level.encode("ñ")
    end = ids_of(byte_level, "<|end|>")
    parts, _ = pieces(byte_level, [ids[0], *end, *ids[1:]])
    assert parts == ["", "", "ñ"]


def cut(text, stop):
    """The text before the stop string that is complete first, found character by character."""
    for end in range(1, len(text) + 1):
        hits = [s for s in stop if text[:end].endswith(s)]
        if hits:
            return text[: end - max(map(len, hits))]
    return None


STOP = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


@settings(deadline=None, max_examples=400)
@given(chunks=st.lists(st.text("ab", max_size=4), max_size=12), stop=STOP)
def test_output_ends_before_the_stop_string_however_text_is_cut(chunks, stop):
    matcher = StopMatcher(stop)
    out, seen = "", ""
    for chunk in chunks:
        seen += chunk
        out += matcher.push(chunk)
        expected = cut(seen, stop)
        assert matcher.is_stopped == (expected is not None)
        if expected is not None:
            assert out == expected
            return
        held = seen[len(out) :]
        assert seen.startswith(out)
        assert held == "" or any(s.startswith(held) for s in stop)
    assert out + matcher.finish() == "".join(chunks)


def test_text_is_held_only_while_it_may_be_a_stop_string():
    matcher = StopMatcher(["END."])
    parts = [matcher.push(character) for character in "xENENDx"]
    assert parts == ["x", "", "", "EN", "", "", "ENDx"]


@pytest.mark.parametrize("stop", [("wo",), ("llo w",), ("é",), ("zzz", "o")])
def test_stop_string_across_tokens_ends_the_output(byte_level, stop):
    text = "hello wo é"
    output = OutputText(byte_level, stop)
    out = ""
    for token_id in byte_level.encode(text):
        out += output.push(token_id)
        if output.is_stopped:
            break
    assert output.is_stopped
    assert out + output.finish() == min((text.split(s)[0] for s in stop), key=len)


def test_stop_string_can_be_completed_by_what_was_held_back(sentencepiece):
    ids = sentencepiece.encode("a €", with_bos=False)  # bytes, held back until the end
    output = OutputText(sentencepiece, ("€",))
    parts = [output.push(token_id) for token_id in ids]
    assert not output.is_stopped
    assert "".join(parts) + output.finish() == "a "
    assert output.is_stopped


def test_all_cuts_of_one_text_give_the_same_output():
    text, stop = "abcabd", ("cab", "abd")
    for cuts in itertools.product([False, True], repeat=len(text) - 1):
        matcher, out, chunk = StopMatcher(stop), "", ""
        for character, is_cut in zip(text, (*cuts, True), strict=True):
            chunk += character
            if is_cut and not matcher.is_stopped:
                out += matcher.push(chunk)
                chunk = ""
        assert out == "ab"
