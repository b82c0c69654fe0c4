"""Parts of a text by its tokens."""

from __future__ import annotations

from hf_diffkv.plot.pieces import pieces_of_ids, pieces_of_text


class Bytes:
    """Tokens are bytes of UTF-8."""

    is_fast = False

    def __call__(self, text: str, **kwargs: object) -> dict:
        return {"input_ids": list(text.encode())}

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return bytes(tokens).decode(errors="replace")


def test_characters_of_several_tokens_appear_once() -> None:
    pieces = ["a", "", "é", "", "", "€", "b"]
    assert pieces_of_ids(Bytes(), list("aé€b".encode())) == pieces
    assert pieces_of_text(Bytes(), "aé€b") == (list("aé€b".encode()), pieces)
