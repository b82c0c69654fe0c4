"""`hf-diffkv inspect`: shows the compressed layers, and how the tokens of a prompt are stored."""

from __future__ import annotations

import json
from itertools import groupby
from operator import itemgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from ..plot.palette import LEVELS, PAPER, TERMINAL, ink_on
from ..running.models import SMALLEST_MODEL, load_model, resolve_model
from .console import Command, Failure, colours, megabytes, one_line, paragraph, progress, table
from .models import load_tokenizer, position_limit, supported_config, usable_device
from .options import (
    choice_of,
    config_before,
    config_for,
    config_options,
    json_option,
    model_option,
    note_of_heads,
    prompt_options,
    quiet_option,
    read_prompt,
    running_options,
)

if TYPE_CHECKING:
    from ..cache.diffkv_cache import DiffKVCache

WORDS_SHOWN = 12
# indices among the terminal's 256 colours
WHITE, BLACK = 231, 16


@click.command(
    "inspect",
    cls=Command,
    help="Show which layers of a model are compressed and what a token uses there. With PROMPT, run the model on it "
    "and show what each layer keeps of it, and the text coloured by level.",
)
@prompt_options
@model_option(default=SMALLEST_MODEL, show_default=True)
@config_options
@running_options
@json_option
@quiet_option
def command(**given: Any) -> None:
    options = SimpleNamespace(**given)
    text = read_prompt(options)
    if text == "":
        raise click.UsageError("the prompt is empty; there is nothing to inspect.")
    choice = choice_of(options)
    progress(f"reading the configuration of {options.model}", options.quiet)
    model_config = supported_config(options.model)
    from ..planning import without_weights

    # with a prompt, the loaded model is used instead
    shape, model = without_weights(model_config) if text is None else None, None
    if text is None:
        config = config_for(choice, model_config if shape is None else shape)
        note = note_of_heads(choice, model_config, shape)
        if note:
            progress(paragraph(f"{note} With a PROMPT, they are read."), options.quiet)
    else:
        config_before(choice, model_config)
        ids, pieces = _tokens(options, text, position_limit(model_config))
        device = usable_device(options.device)
        progress(f"loading {options.model}", options.quiet)
        model = load_model(options.model, options.dtype, device, options.quiet, options.weights)
        config = config_for(choice, model)
    found = {"model": options.model, "config": config.to_dict(), **_layers(model_config, config, options)}
    said = _layer_text(found)
    if model is not None:
        cache = _run(options, model, config, ids)
        kept = _kept(cache, pieces)
        found |= kept
        said += f"\n\n{_kept_text(cache, kept)}"
    click.echo(json.dumps(found, indent=2) if options.as_json else said)


def _layers(model_config: Any, config: Any, options: SimpleNamespace) -> dict[str, Any]:
    """Returns the kinds of layers, and the bytes per token and KV head in the compressed ones."""
    from ..cache.diffkv_cache import DiffKVCache
    from ..planning import ModelShape

    try:
        cache = DiffKVCache(model_config, config)
        shape = ModelShape.of(model_config, resolve_model(options.model))
        compressed = cache.compressed_layers()
        kinds: dict[str, list[int]] = {}
        for index, layer in enumerate(cache.layers):
            kinds.setdefault(type(layer).__name__, []).append(index)
        pages = _pages(config, [shape.layers[i] for i in compressed], shape.dtype.itemsize, shape.limit)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    return {"layers": len(cache.layers), "compressed_layers": compressed, "kinds": kinds, "pages": pages}


def _pages(config: Any, layers: list[Any], element_bytes: int, limit: int | None) -> list[dict[str, Any]]:
    """Returns, for each kind of page and level, the bytes per token and KV head, and the number of heads."""
    from ..config.layers import layer_configs, possible_precisions
    from ..pages import PageLayout

    kinds: dict[tuple, dict[str, Any]] = {}
    for layer, of_layer in zip(layers, layer_configs(config, len(layers))):
        layout = PageLayout.of(of_layer, layer.key_dim, layer.value_dim, element_bytes, limit)
        dense = (layer.key_dim + layer.value_dim) * element_bytes
        kind = kinds.setdefault(
            (of_layer.high, of_layer.low, layout),
            {"dense_token_bytes": dense, "page_bytes": layout.page_bytes, "levels": {}},
        )
        for name, precision, tier in (("high", of_layer.high, layout.high), ("low", of_layer.low, layout.low)):
            count = sum(precision in found for found in possible_precisions(of_layer, layer.num_key_value_heads))
            # if both levels have the same precision, all tokens are high
            if not count or (name == "low" and of_layer.high == of_layer.low):
                continue
            sizes = {"token_bytes": tier.token_bytes, "tokens_per_page": tier.capacity}
            level = kind["levels"].setdefault(name, {"precision": precision.full_name, "heads": 0, **sizes})
            level["heads"] += count
    return list(kinds.values())


def _layer_text(found: dict[str, Any]) -> str:
    lines = [
        paragraph(f"{found['model']}: {len(found['compressed_layers'])} of {found['layers']} layers are compressed.")
    ]
    for kind, indices in found["kinds"].items():
        if indices != found["compressed_layers"]:
            lines.append(paragraph(f"Left uncompressed ({kind}): {', '.join(map(str, indices))}."))
    dense_bytes = itemgetter("dense_token_bytes")
    for dense, pages in groupby(sorted(found["pages"], key=dense_bytes), dense_bytes):
        rows: dict[str, tuple[int, int]] = {}
        for level in (level for page in pages for level in page["levels"].values()):
            heads = rows.get(level["precision"], (0, 0))[1] + level["heads"]
            rows[level["precision"]] = (level["token_bytes"], heads)
        order = sorted(rows.items(), key=lambda row: -row[1][0])
        named = [(name, f"{size}", f"{size / dense:.0%}", f"{heads}") for name, (size, heads) in order]
        header = ("precision", "bytes per token and head", "of dense", "KV heads")
        lines += ["", table(header, [("dense", f"{dense}", "", ""), *named])]
    return "\n".join(lines)


def _tokens(options: SimpleNamespace, text: str, limit: int | None) -> tuple[list[int], list[str]]:
    """Returns token ids and the text of each token."""
    from ..plot.pieces import pieces_of_text

    ids, pieces = pieces_of_text(load_tokenizer(options.model), text)
    if not ids:
        raise click.UsageError("the prompt has no tokens; there is nothing to inspect.")
    if limit is not None and len(ids) > limit:
        raise click.UsageError(
            f"the prompt has {len(ids)} tokens, but the model's max_position_embeddings is {limit}; shorten it."
        )
    return ids, pieces


def _run(options: SimpleNamespace, model: Any, config: Any, ids: list[int]) -> DiffKVCache:
    import torch

    from ..cache.diffkv_cache import DiffKVCache
    from ..compat import passing
    from ..running.side_by_side import EXPECTED_ERRORS

    model.set_attn_implementation("diffkv")
    cache = DiffKVCache(model, config)
    progress(f"reading {len(ids):,} tokens", options.quiet)
    prompt = torch.tensor([ids], device=model.device)
    try:
        with torch.no_grad():
            model(input_ids=prompt, **passing(cache), use_cache=True, logits_to_keep=1)
    except EXPECTED_ERRORS as error:
        raise Failure(one_line(error)) from error
    return cache


def _kept(cache: DiffKVCache, pieces: list[str]) -> dict[str, Any]:
    """Returns the memory held and, for each token, the number of heads at each level."""
    import dataclasses

    from ..cache.report import level_counts, levels_of_request

    memory = cache.memory()
    lists = level_counts(levels_of_request(cache)) if cache.compressed_layers() else {}
    return {
        "bytes": memory.bytes,
        "dense_bytes": memory.dense_bytes,
        "levels": memory.tokens,
        "heads": [dataclasses.asdict(layer) for layer in memory.layers],
        "tokens": [
            {"text": text, **{name: count[index] for name, count in lists.items()}} for index, text in enumerate(pieces)
        ],
    }


def _kept_text(cache: DiffKVCache, kept: dict[str, Any]) -> str:
    memory = cache.memory()
    others = ", including layers that are left as they are" if len(memory.layers) < memory.num_layers else ""
    lines = [paragraph(f"{taken(len(kept['tokens']), memory)}{others}.")]
    if memory.hint:
        lines.append(paragraph(f"{memory.hint.capitalize()}."))
    lines += ["", level_table(memory)]
    if sum(kept["levels"].values()):
        if colours():
            lines += ["", _coloured(kept["tokens"])]
        elif cache.config.selects:
            lines += ["", _extremes(kept["tokens"])]
    return "\n".join(lines)


def taken(tokens: int, memory: Any) -> str:
    """Describes the memory of `tokens` tokens, compared with a dense cache."""
    held, whole = memory.bytes, memory.dense_bytes
    return f"{tokens:,} tokens use {megabytes(held)}, {held / whole:.1%} of a dense cache's {megabytes(whole)}"


def level_table(memory: Any) -> str:
    """Formats, for each compressed layer, the share of its heads' tokens at each level, and their precisions.

    If no head chooses levels, tokens are either stored or in the window.
    """
    from ..cache.wording import chosen_heads

    levels = {name: (name,) for name in LEVELS}
    if not chosen_heads(memory.layers):
        levels = {"stored": ("high", "low"), "window": ("window",)}
    rows = []
    for layer in memory.layers:
        counts = [sum(sum(getattr(layer, name)) for name in names) for names in levels.values()]
        shares = (f"{count / max(1, sum(counts)):.0%}" for count in counts)
        names = layer.precisions if len({*layer.precisions}) > 1 else layer.precisions[:1]
        rows.append((f"layer {layer.layer_idx}", *shares, " ".join(names)))
    return table(("", *levels, "precision"), rows)


def _coloured(tokens: list[dict[str, Any]]) -> str:
    legend = "  ".join(_in_colour(f" {name} ", name) for name in LEVELS)
    runs = groupby(tokens, lambda token: max(LEVELS, key=lambda name: token[name]))
    text = "".join(_in_colour("".join(token["text"] for token in run), name) for name, run in runs)
    return f"Coloured by the level of most heads:\n{legend}\n\n{text}"


def _in_colour(text: str, level: str) -> str:
    """Colours each line separately, as terminals fill the rest of a line that ends in a colour."""
    look = {"bg": TERMINAL[level], "fg": WHITE if ink_on(LEVELS[level]) == PAPER else BLACK}
    return "\n".join(click.style(line, **look) if line else "" for line in text.split("\n"))


def _extremes(tokens: list[dict[str, Any]]) -> str:
    """Lists the tokens that the most and the fewest heads keep high."""
    judged = [token for token in tokens if not token["window"]]
    if not judged:
        return "All tokens are in the window."
    ranked = sorted(judged, key=lambda token: -token["high"])
    parts = {"Most often high": ranked[:WORDS_SHOWN], "Least often": ranked[: -WORDS_SHOWN - 1 : -1]}
    said = (f"{name}: {' '.join(repr(token['text']) for token in part)}" for name, part in parts.items())
    return "\n".join(map(paragraph, said))
