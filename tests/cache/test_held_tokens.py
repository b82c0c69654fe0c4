"""A prompt that does not begin with the tokens a cache holds is refused; one that continues them is not."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from host_reads import HostReads
from runs import CONFIG, tokens
from test_bad_input import contents, raises
from tiny_models import VOCABULARY, tiny_model
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_diffkv import DiffKVCache
from hf_diffkv.cache.io import TENSORS_NAME
from hf_diffkv.compat import passing
from hf_diffkv.prefixes import PrefixStore

pytestmark = pytest.mark.oldest
LONGER = 6
# sizes: positions below PROMPT were given; the next NEW - 1 were generated and are held too
PROMPT, NEW = 30, 5


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama", "diffkv")


def generate(model: PreTrainedModel, ids: Tensor, cache: DiffKVCache, count: int = NEW, **options: object) -> Tensor:
    options = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids), **options}
    return model.generate(ids, **passing(cache), max_new_tokens=count, **options)


def begun(model: PreTrainedModel, batch: int = 1, **options: object) -> tuple[DiffKVCache, Tensor]:
    """A cache after a call of `generate()`, and the call's output."""
    cache = DiffKVCache(model.config, CONFIG)
    return cache, generate(model, tokens(batch, PROMPT), cache, **options)


def continued(ids: Tensor, row: int = 0, position: int | None = None) -> Tensor:
    """Returns `ids` followed by new tokens; with `position`, sequence `row` has a different token there."""
    ids = torch.cat([ids, tokens(ids.shape[0], LONGER, seed=2)], dim=1)
    if position is not None:
        ids[row, position] = (ids[row, position] + 1) % VOCABULARY
    return ids


def test_a_loaded_cache_does_not_depend_on_its_file(model: PreTrainedModel, tmp_path: Path) -> None:
    cache, ids = begun(model)
    cache.save_pretrained(tmp_path)
    loaded = DiffKVCache.from_pretrained(tmp_path, model)
    path = tmp_path / TENSORS_NAME
    # in place, as `cp` writes
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert torch.equal(generate(model, continued(ids), loaded), generate(model, continued(ids), cache))


def refused(model: PreTrainedModel, cache: DiffKVCache, ids: Tensor, position: int, row: int = 0) -> None:
    """Nothing has changed after the refusal."""
    before = contents(cache)
    with raises(
        ValueError, f"differ from position {position} of sequence {row} on,", "cache.reset()", "whole conversation"
    ):
        generate(model, ids, cache)
    assert contents(cache) == before


@pytest.mark.parametrize("row, position", [(0, 0), (1, PROMPT - 1), (0, PROMPT), (1, PROMPT + NEW - 2)])
@pytest.mark.sampled(100)
def test_other_tokens(model: PreTrainedModel, row: int, position: int) -> None:
    """For given or generated tokens; afterwards, the call with the right tokens is as if nothing had happened."""
    cache, written = begun(model, batch=2)
    untouched = copy.deepcopy(cache)
    for _ in range(2):
        refused(model, cache, continued(written, row, position), position, row)
    right = continued(written)
    assert torch.equal(generate(model, right, cache), generate(model, right, untouched))


def test_an_unrelated_prompt_without_a_mask(model: PreTrainedModel) -> None:
    """The prompt is refused, and accepted after `reset()`."""
    cache, _ = begun(model)
    other = tokens(1, 2 * PROMPT, seed=9)
    with raises(ValueError, "differ from position 0", "new DiffKVCache"):
        model.generate(other, **passing(cache), max_new_tokens=2, pad_token_id=0)
    cache.reset()
    fresh = DiffKVCache(model.config, CONFIG)
    assert torch.equal(generate(model, other, cache), generate(model, other, fresh))


def test_the_last_token_is_not_held(model: PreTrainedModel) -> None:
    """Its keys and values were never computed, so another may take its place."""
    cache, written = begun(model)
    generate(model, continued(written, position=PROMPT + NEW - 1), cache)


def test_what_padding_says_is_nothing(model: PreTrainedModel) -> None:
    cache = DiffKVCache(model.config, CONFIG)
    ids = tokens(2, PROMPT)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    written = generate(model, ids, cache, attention_mask=mask)
    mask = torch.cat([mask, torch.ones(2, NEW + LONGER, dtype=torch.int64)], dim=1)
    with raises(ValueError, "differ from position 7 of sequence 1"):
        generate(model, continued(written, 1, 7), cache, attention_mask=mask)
    generate(model, continued(written, 1, 6), cache, attention_mask=mask)


def test_turns_of_new_tokens_alone(model: PreTrainedModel) -> None:
    """A mask over all tokens is passed, and all turns are then held."""
    cache, written = begun(model)
    for turn in range(3):
        new = torch.cat([written[:, -1:], tokens(1, LONGER, seed=turn)], dim=1)
        said = generate(model, new, cache, attention_mask=torch.ones(1, written.shape[1] + LONGER, dtype=torch.int64))
        written = torch.cat([written[:, :-1], said], dim=1)
    for position in (3, PROMPT + NEW + 2, written.shape[1] - 2):
        refused(model, cache, continued(written, position=position), position)
    generate(model, continued(written), cache)


def test_chunks_of_a_prompt(model: PreTrainedModel) -> None:
    cache, written = begun(model, prefill_chunk_size=7)
    refused(model, cache, continued(written, position=20), 20)
    generate(model, continued(written), cache)


def test_a_buffer_that_is_used_again(model: PreTrainedModel) -> None:
    cache, ids = DiffKVCache(model.config, CONFIG), tokens(1, PROMPT)
    given = ids.clone()
    generate(model, given, cache, count=1)
    given.zero_()
    refused(model, cache, continued(ids, position=4), 4)
    generate(model, continued(ids), cache)


def test_beams(model: PreTrainedModel) -> None:
    """The cache ends with the last step's beams, which may not include the one returned: only the prompt is common."""
    cache, _ = begun(model, num_beams=3)
    ids = continued(tokens(1, PROMPT), position=2).repeat(3, 1)
    refused(model, cache, ids, 2)
    held = cache.held_tokens.pieces(cache.get_seq_length())
    assert torch.equal(torch.cat([piece.ids for piece in held], 1)[:, :PROMPT], tokens(1, PROMPT).repeat(3, 1))
    generate(model, continued(held[0].ids), cache)


MOVES: dict[str, tuple[Callable[[DiffKVCache], object], list[int]]] = {
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([False, True, True])), [1, 2]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
}


@pytest.mark.parametrize("move", MOVES)
def test_sequences_that_move(model: PreTrainedModel, move: str) -> None:
    cache, written = begun(model, batch=3)
    change, rows = MOVES[move]
    change(cache)
    # every sequence has a different first token from its neighbours
    assert written[:, 0].unique().numel() == 3
    if move != "repeat":
        refused(model, cache, continued(written[: len(rows)]), 0)
    generate(model, continued(written[rows]), cache)


@pytest.mark.parametrize("assistant", ["lookup", "model"])
@pytest.mark.sampled(100)
def test_assisted_decoding(model: PreTrainedModel, assistant: str) -> None:
    """The tokens of rejected drafts are not held."""
    other = {"model": {"assistant_model": tiny_model("llama", seed=2)}, "lookup": {"prompt_lookup_num_tokens": 4}}
    cache, written = begun(model, count=12, **other[assistant])
    dense = DynamicCache(config=model.config)
    generate(tiny_model("llama"), tokens(1, PROMPT), dense, count=12)
    seen = cache.get_seq_length()
    assert PROMPT < seen <= dense.get_seq_length() + 1
    (held,) = cache.held_tokens.pieces(seen)
    assert held.start == 0 and torch.equal(held.ids, written[:, :seen])
    refused(model, cache, continued(written, position=seen - 1), seen - 1)
    generate(model, continued(written), cache)


def test_cropped_tokens_are_forgotten(model: PreTrainedModel) -> None:
    cache, written = begun(model)
    cache.activate_past_recording()
    with torch.no_grad():
        model(tokens(1, 4, seed=5), **passing(cache))
    cache.crop(-4)
    generate(model, continued(written, position=PROMPT + NEW - 1), cache)


def test_embeddings_say_nothing_of_tokens(model: PreTrainedModel) -> None:
    embeds = model.get_input_embeddings()(tokens(1, PROMPT)).detach()
    cache = DiffKVCache(model.config, CONFIG)
    none = torch.zeros(1, 0, dtype=torch.int64)
    said = generate(model, none, cache, inputs_embeds=embeds, attention_mask=torch.ones(1, PROMPT))
    assert all(piece.start >= PROMPT for piece in cache.held_tokens.pieces(cache.get_seq_length()))
    # ids other than those that were embedded
    generate(model, continued(torch.cat([tokens(1, PROMPT, seed=8), said], dim=1)), cache)


def test_tokens_fed_by_hand_are_unknown(model: PreTrainedModel) -> None:
    cache, written = begun(model)
    with torch.no_grad():
        model(tokens(1, 9, seed=5), **passing(cache))
    ids = torch.cat([written[:, :-1], tokens(1, 9, seed=6)], dim=1)
    refused(model, cache, continued(ids, position=5), 5)
    generate(model, continued(ids), cache)
    # what generate() returned since then is known; what comes before it still is not
    again = torch.cat([ids, tokens(1, LONGER, seed=2)], dim=1)
    refused(model, cache, continued(again, position=ids.shape[1] + 1), ids.shape[1] + 1)
    first = DiffKVCache(model.config, CONFIG)
    with torch.no_grad():
        model(tokens(1, PROMPT), **passing(first))
    generate(model, continued(tokens(1, PROMPT, seed=7)), first)


def test_a_forward_that_fails_is_not_held(model: PreTrainedModel) -> None:
    cache, written = begun(model)
    with pytest.raises(ValueError, match="NaN"):
        spoiled = copy.deepcopy(model)
        spoiled.model.layers[0].self_attn.k_proj.weight.data.fill_(float("nan"))
        cache.usage.clear()
        generate(spoiled, continued(written), cache)
    cache.usage.clear()
    other = torch.cat([written, tokens(1, LONGER, seed=3)], dim=1)
    generate(model, other, cache)


def test_what_the_host_waits_for(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is read once to compare a prompt, and never in a step."""
    cache, written = begun(model)
    with HostReads(monkeypatch) as reads:
        generate(model, continued(written), cache)
    waited = [found for found in reads.found if "HeldTokens" in found]
    assert waited == ["aten._local_scalar_dense.default in HeldTokens.check"]


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "fork", "folder"])
@pytest.mark.sampled(100)
def test_copies_hold_the_same(model: PreTrainedModel, way: str, tmp_path: Path) -> None:
    cache, written = begun(model, batch=2)
    if way == "folder":
        cache.save_pretrained(tmp_path, model)
        twin = DiffKVCache.from_pretrained(tmp_path, model)
    elif way == "pickle":
        twin = pickle.loads(pickle.dumps(cache))
    else:
        twin = copy.deepcopy(cache) if way == "deepcopy" else cache.fork(1)[0]
    generate(model, torch.cat([written, tokens(2, 2, seed=3)], dim=1), cache)
    refused(model, twin, continued(written, 1, PROMPT + 1), PROMPT + 1, 1)
    generate(model, continued(written), twin)


def test_prefixes(model: PreTrainedModel) -> None:
    """A cache from a store knows the tokens by which it was found."""
    store, ids = PrefixStore(model, CONFIG), tokens(1, PROMPT)
    for _ in range(3):
        cache = store.lookup(ids)
        written = generate(model, ids, cache)
        store.insert(written, cache)
        ids = continued(written)
    assert sum(store.stats.hits.values()) == 2
    found = store.lookup(ids)
    refused(model, found, continued(ids, position=5), 5)
    generate(model, ids, found)
