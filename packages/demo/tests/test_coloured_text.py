"""The coloured text against levels counted here, one by one."""

from __future__ import annotations

import html
import re
import sys
from pathlib import Path

import pytest
import torch
from hf_diffkv_demo import coloured_text as plot
from matplotlib.colors import to_rgb
from matplotlib.image import imread
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_diffkv import DiffKVCache
from hf_diffkv.compat import passing
from hf_diffkv.plot.palette import LEVELS

ROOT = Path(__file__).parents[3]
TINY_LM = ROOT / "examples" / "models" / "tiny-lm"
TEXT = (ROOT / "examples" / "prompts" / "recall.txt").read_text()[:300] + "<&>\n\nend"
NAMES = {0: "pruned", 1: "low", 2: "high", 3: "window"}
SPAN = re.compile(r'<span class="([^"]*)" style="([^"]*)" title="([^"]*)">(.*?)</span>', re.DOTALL)


@pytest.fixture(scope="module")
def ran() -> tuple:
    """A tokenizer, a cache that holds every level, and ids as `generate` returns them; tokens are characters."""
    tokenizer, model = AutoTokenizer.from_pretrained(TINY_LM), AutoModelForCausalLM.from_pretrained(TINY_LM)
    cache = DiffKVCache(model, alpha_high=1.5, alpha_low=0.5, window=20)
    inputs = tokenizer(TEXT, return_tensors="pt")
    ids = model.generate(**inputs, **passing(cache), max_new_tokens=4, do_sample=False)[0]
    assert len(ids) == len(TEXT) + 4 == cache.get_seq_length() + 1
    return tokenizer, cache, ids


def characters(shown: plot.ColouredText) -> list[tuple[str, str, str]]:
    """Character, colour and classes of each token, from the page."""
    found = []
    for kind, style, _, text in SPAN.findall(shown.html()):
        colour = re.match(r"background:(#\w+);", style)[1]
        found += [(c, colour, kind) for c in html.unescape(text).replace("↵\n", "\n")]
    return found


def mean_colour(codes: list[int]) -> list[float]:
    parts = [to_rgb(LEVELS[NAMES[code]]) for code in codes]
    return [sum(channel) / len(parts) for channel in zip(*parts)]


@pytest.mark.parametrize("place", [{}, {"layer_idx": 4}, {"layer_idx": 2, "head": 1}], ids=["all", "layer", "head"])
def test_words_have_the_colours_of_their_levels(ran: tuple, place: dict) -> None:
    tokenizer, cache, ids = ran
    layers = [place["layer_idx"]] if place else range(6)
    levels = torch.cat([cache.levels(index)[0] for index in layers])
    if "head" in place:
        levels = levels[place["head"], None]
    shown = characters(plot.text(cache, ids, tokenizer, generated_from=len(TEXT), **place))
    assert "".join(c for c, _, _ in shown) == tokenizer.decode(ids[:-1])
    codes = levels.T.tolist()
    assert {code for token in codes for code in token} == set(NAMES)
    # eight bits for each channel
    for (_, colour, _), token in zip(shown, codes, strict=True):
        assert to_rgb(colour) == pytest.approx(mean_colour(token), abs=0.5001 / 255)
    for index, (_, _, kind) in enumerate(shown):
        assert ("generated" in kind.split()) == (index >= len(TEXT))
        alike = len(set(codes[index])) == 1
        assert kind.split()[1] == (NAMES[codes[index][0]] if alike else "mixed")


def test_legend_and_titles_count(ran: tuple) -> None:
    tokenizer, cache, ids = ran
    shown = plot.text(cache, ids, tokenizer, layer_idx=1)
    levels = cache.levels(1)[0]
    for code, name in NAMES.items():
        share = (levels == code).float().mean().item()
        assert shown.totals()[name] == pytest.approx(share)
        assert f">{name} {share:.0%}</span>" in shown.html()
    said = [title.partition(";")[0] for _, _, title, _ in SPAN.findall(shown.html())]
    assert any(re.fullmatch(r"(high|low|window|pruned) 50%, (high|low|window|pruned) 50%", one) for one in said)


def test_a_page_and_a_picture_are_saved(ran: tuple, tmp_path: Path) -> None:
    tokenizer, cache, ids = ran
    shown = plot.text(cache, ids, tokenizer, layer_idx=0, head=0)
    page = shown.save(tmp_path / "text.html").read_text()
    assert shown.html() in page and page.startswith("<!doctype html>")
    assert shown._repr_html_() == shown.html()
    picture = imread(shown.save(tmp_path / "text.png"))
    codes = cache.levels(0)[0, 0].tolist()
    areas = {name: (abs(picture[..., :3] - to_rgb(colour)).max(-1) < 0.01).sum() for name, colour in LEVELS.items()}
    assert all(areas[name] > 0 for code, name in NAMES.items() if code in codes)
    # a character is a cell; ink covers a part of it, and the legend adds cells
    assert (areas["high"] > areas["window"]) == (codes.count(2) > codes.count(3))


def test_a_picture_wraps_and_keeps_each_character_in_its_cell() -> None:
    from hf_diffkv_demo.coloured_text import LINE_CELLS, _parts

    pieces = ["a" * (LINE_CELLS - 1), "漢", "é\n", "\n", "b\t", "c" * 97, " ", "dd", "d e"]
    counts = [index % 2 for index in range(len(pieces))]
    shown = plot.ColouredText(pieces, {"high": counts, "low": [1 - count for count in counts]}, "")
    found = [(line, column, cells, text) for line, column, cells, text, _ in _parts(shown)]
    # the first word is too long for a line, the last one goes to the next
    start = [
        (0, 0, 99, "a" * 99),
        (1, 0, 2, "漢"),
        (1, 2, 2, "é "),
        (2, 0, 1, " "),
        (3, 0, 2, "b "),
        (3, 2, 97, "c" * 97),
    ]
    assert found == [*start, (3, 99, 1, " "), (4, 0, 2, "dd"), (4, 2, 3, "d e")]
    with pytest.raises(ValueError, match="save it as .html"):
        plot.ColouredText(["\n"] * 600, {"high": [1] * 600}, "").save("text.png")


def test_wrong_uses_are_explained(ran: tuple) -> None:
    tokenizer, cache, ids = ran
    for arguments, message in {
        ((ids[:9], tokenizer), ()): "tokens has 9 tokens, but the cache has seen",
        ((ids,), ()): "give tokenizer as well",
        ((ids, tokenizer), (("head", 0),)): "head=0 needs layer_idx",
        ((ids, tokenizer), (("head", 2), ("layer_idx", 0))): "layer 0 has 2 KV heads",
        ((ids, tokenizer), (("layer_idx", 6),)): "layer_idx=6 does not exist",
        ((ids, tokenizer), (("request", 1),)): "request=1 does not exist: the cache holds 1 requests",
    }.items():
        with pytest.raises(ValueError, match=message):
            plot.text(cache, *arguments[0], **dict(arguments[1]))


def test_words_take_the_colours_of_their_tokens() -> None:
    pieces = ["Hel", "lo", " wor", "", "ld", "\n", "\n", "x", " ", " y", "ab" * 12, "é", "no", "des"]
    words = ["Hello", " world", "\n\nx", "  y", "ab" * 12, "éno", "des"]
    tokens = [(0, 2), (2, 5), (5, 8), (8, 10), (10, 11), (11, 13), (13, 14)]
    # heads that have a token at the high level, out of three
    high = [3, 0, 1, 2, 3, 0, 0, 0, 3, 3, 1, 2, 2, 0]
    none = [0] * len(high)
    counts = {"high": high, "low": [3 - count for count in high], "window": none, "pruned": none}
    shown = plot.ColouredText(pieces, counts, "", 13).words()
    runs = list(shown.runs())
    assert shown.pieces == words and "".join(words) == "".join(pieces)
    shares = [sum(high[start:stop]) / 3 / (stop - start) for start, stop in tokens]
    # neighbours of one colour would be one run
    assert all(before != after for before, after in zip(shares, shares[1:]))
    assert [dict(run.shares)["high"] for run in runs] == pytest.approx(shares)
    assert [run.generated for run in runs] == [False] * 6 + [True]
    assert 'title="high 50%, low 50%; prompt, words 0 to 0">Hello<' in shown.html()


def test_padding_has_no_colour() -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(TINY_LM), AutoModelForCausalLM.from_pretrained(TINY_LM)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.decode([0])
    inputs = tokenizer(["abcdef", "xyz"], return_tensors="pt", padding=True, padding_side="left")
    cache = DiffKVCache(model)
    ids = model.generate(**inputs, **passing(cache), max_new_tokens=2, do_sample=False)
    shown = list(plot.text(cache, ids[1], tokenizer, request=1).runs())
    assert [(run.start, run.stop, run.colour) for run in shown] == [(0, 3, None), (3, 7, LEVELS["window"])]
    assert "opacity" in plot.text(cache, ids[1], tokenizer, request=1).html()


def test_pictures_need_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install .*\[plot\]'"):
        plot.ColouredText(["a"], {"high": [1]}, "").save("a.png")
