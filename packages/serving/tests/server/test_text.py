"""Text of answers as it comes: strings that end it, characters of several tokens, thoughts and calls of tools."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("hf_diffkv_serving.server.parts", exc_type=ImportError)

from hf_diffkv_serving.server.parts import ReasoningText, ToolCall
from hf_diffkv_serving.server.text import StopStrings, Transcript, joined
from serving_app import markup, tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

LETTERS = st.text("ab", max_size=12)
CALL = '[{"name": "height", "arguments": {"tree": "oak"}}]'


def ended(text: str, strings: list[str]) -> tuple[str, bool]:
    """The text before the string that is complete first, by trying every length."""
    for length in range(len(text) + 1):
        found = [string for string in strings if text[:length].endswith(string)]
        if found:
            return text[: length - max(map(len, found))], True
    return text, False


@given(st.lists(LETTERS, max_size=6), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_a_text_ends_before_the_first_string_that_is_complete(pieces: list[str], strings: list[str]) -> None:
    stops, said = StopStrings(strings), []
    for i, piece in enumerate(pieces):
        said.append(stops.feed(piece))
        text, found = ended("".join(pieces[: i + 1]), strings)
        assert stops.found is found and text.startswith("".join(said))
        if found:
            break
        # what is held back may begin a string, and nothing else is
        held = text[len("".join(said)) :]
        assert not held or any(string.startswith(held) for string in strings)
    if not stops.found:
        said.append(stops.flush())
    assert "".join(said) == ended("".join(pieces), strings)[0]


def say(transcript: Transcript, ids: list[int]) -> list[Any]:
    pieces = transcript.begin()
    for token in ids:
        pieces += transcript.add(token)
        if transcript.stopped:
            break
    return pieces + transcript.end()


def test_a_stop_string_across_tokens() -> None:
    ids = tokenizer()("@oak=5305 and @elm=1177").input_ids
    transcript = Transcript(tokenizer(), stops=("30x", " and @e"))
    pieces = [transcript.add(token) for token in ids[:7]]
    # "3" and "30" may begin the first
    assert joined([piece for each in pieces for piece in each], str) == "@oak=5"
    whole = Transcript(tokenizer(), stops=("30x", " and @e"))
    assert joined(say(whole, ids), str) == "@oak=5305" and whole.stopped
    without = Transcript(tokenizer(), stops=("77 ",))
    assert joined(say(without, ids), str) == "@oak=5305 and @elm=1177" and not without.stopped


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte."""
    vocabulary = {f"<0x{i:02X}>": i for i in range(256)}
    inner = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def test_characters_of_several_tokens() -> None:
    ids = list("aé€🌳b".encode())
    transcript = Transcript(byte_tokenizer())
    pieces = [joined(transcript.add(token), str) for token in ids]
    assert [piece for piece in pieces if piece] == ["a", "é", "€", "🌳", "b"]
    assert transcript.end() == [] and transcript.decoded == 5
    # an answer may end within one
    cut = Transcript(byte_tokenizer())
    assert joined(say(cut, ids[:-3]), str) == "aé€" + byte_tokenizer().decode(ids[-5:-3]) == "aé€\ufffd\ufffd"
    stopped = Transcript(byte_tokenizer(), stops=("🌳",))
    assert joined(say(stopped, ids), str) == "aé€"


def test_bytes_that_are_no_character_are_replaced() -> None:
    spaced = [decoders.Replace("_", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ids = {f"<0x{i:02X}>": i for i in range(256)} | {"_so": 256, "_it": 257}
    inner = Tokenizer(models.BPE(ids, [], byte_fallback=True))
    inner.decoder = decoders.Sequence(spaced)
    own = PreTrainedTokenizerFast(tokenizer_object=inner)
    # a whole character, the beginning of another one, and a word
    assert joined(say(Transcript(own), [*"é".encode(), 0xE2, 256, 257, *"é".encode()]), str) == "é\ufffd so ité"
    assert joined(say(Transcript(own), [*"é".encode(), 0xE2, 0xC3, 257, 0xE2]), str) == "é\ufffd\ufffd it\ufffd"
    # the first space belongs to a text that continues another one
    assert joined(say(Transcript(own), [256, 257]), str) == "so it"
    for before in ([256], list("🌳".encode()), [0xE2, *"🌳".encode()], [0xE2, 256, *"🌳".encode()]):
        assert joined(say(Transcript(own, before=before), [256, 257]), str) == " so it", before
    assert joined(say(Transcript(own, before=[0xE2] * 20), [256, 257]), str).endswith("so it")


def parsed(text: str, **options: Any) -> list[Any]:
    ids = tokenizer()(text).input_ids
    return say(Transcript(tokenizer(), markup(), **options), ids)


def test_thoughts_and_calls() -> None:
    pieces = parsed(f"<why>so it is{CALL}")
    assert joined(pieces, ReasoningText) == "why" and joined(pieces, str) == "so it is"
    calls = [piece for piece in pieces if isinstance(piece, ToolCall)]
    assert calls == [ToolCall("height", '{"tree": "oak"}')]
    # within thoughts as well
    pieces = parsed("<why not>so", stops=("y n",))
    assert joined(pieces, ReasoningText) == "wh" and joined(pieces, str) == ""


def test_calls_are_text_where_none_may_be_made() -> None:
    ids = tokenizer()(f"<why>so {CALL} it is").input_ids
    pieces = say(Transcript(tokenizer(), markup(calls=False)), ids)
    assert joined(pieces, ReasoningText) == "why" and joined(pieces, str) == f"so {CALL} it is"
    assert not any(isinstance(piece, ToolCall) for piece in pieces)


@pytest.mark.parametrize(
    "text",
    ["so [no call]", 'so [{"name": 5}]', "so [1]", 'so [{"name": "a"', "<why>[{]", '[{"name": 5, "arguments": {}}]'],
)
def test_calls_that_are_none_are_said(text: str) -> None:
    end = tokenizer().eos_token
    for ending in ("", end):
        pieces = parsed(text + ending)
        assert not any(isinstance(piece, ToolCall) for piece in pieces)
        assert joined(pieces, str) == text.removeprefix("<why>")
    # those behind it are found
    pieces = parsed(f"{text.removesuffix(']')}] and {CALL[1:-1].join('[]')} too{end}")
    assert ToolCall("height", '{"tree": "oak"}') in pieces and joined(pieces, str).endswith("] and  too")
