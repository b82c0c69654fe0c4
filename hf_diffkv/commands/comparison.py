"""A DiffKV run in words, by itself or beside a dense one."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Any

import click

from .console import colours, megabytes, paragraph, table

if TYPE_CHECKING:
    from ..evaluation.side_by_side import FinishedRun


def run_summary(run: FinishedRun) -> str:
    """What one DiffKV run cost."""
    rows = [
        ("cache, real bytes", megabytes(run.cache_bytes), _share(run.cache_bytes, run.dense_bytes)),
        ("prompt", f"{run.prompt_seconds:.2f} s", ""),
        ("decoding", _rate(run.tokens_per_second), ""),
        ("cache, payload only", megabytes(run.payload_bytes), _share(run.payload_bytes, run.dense_bytes)),
        ("peak memory", megabytes(run.peak_bytes), ""),
    ]
    return "\n".join(["", table(("", run.cache, "of a dense cache"), rows), "", *_kept(run)])


def comparison(compressed: FinishedRun, dense: FinishedRun) -> str:
    """What a DiffKV run cost beside a dense one, and how far the texts differ."""
    rows = [
        _row("cache, real bytes", dense.cache_bytes, compressed.cache_bytes, share=True),
        ("prompt", f"{dense.prompt_seconds:.2f} s", f"{compressed.prompt_seconds:.2f} s", ""),
        ("decoding", _rate(dense.tokens_per_second), _rate(compressed.tokens_per_second), ""),
        _row("cache, payload only", dense.cache_bytes, compressed.payload_bytes, share=True),
        _row("peak memory", dense.peak_bytes, compressed.peak_bytes),
        _row("  above the model", dense.above_model_bytes, compressed.above_model_bytes),
    ]
    peak = f"Peak memory: {compressed.peak_source}, a process of its own for each cache."
    return "\n".join(
        [
            "",
            table(("", dense.cache, compressed.cache, f"{compressed.cache} / dense"), rows),
            "",
            *_kept(compressed),
            _difference(compressed, dense),
            paragraph(peak),
        ]
    )


def same_tokens(compressed: FinishedRun, dense: FinishedRun) -> int | None:
    """How many tokens both wrote before they differ; None where they never do."""
    from ..evaluation.comparison import Agreement

    found = Agreement.of(compressed.generated, dense.generated)
    return None if found.equal == found.tokens else found.until_difference


def word_difference(old: str, new: str) -> tuple[float, str]:
    """Share of words that two texts have in common, and `new` with what differs marked: [-old-]{+new+}."""
    before, after = _words(old), _words(new)
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    parts = []
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag == "equal":
            parts.append("".join(after[c:d]))
            continue
        if b > a:
            parts.append(_marked("[-{}-]", "".join(before[a:b]), "red"))
        if d > c:
            parts.append(_marked("{{+{}+}}", "".join(after[c:d]), "green"))
    return matcher.ratio(), "".join(parts)


def figures(job: Any, runs: list[FinishedRun], versions: dict[str, str]) -> dict[str, Any]:
    """Everything about a comparison, ready for JSON."""
    import dataclasses

    compressed, *dense = runs
    found = {
        "text": compressed.text,
        "answers": compressed.answers,
        "config": compressed.config,
        "model": job.model,
        "dtype": job.dtype,
        "device": job.device,
        "seed": job.seed if job.sample else None,
        "sampling": job.sampling if job.sample else None,
        "max_new_tokens": job.max_new_tokens,
        "runs": {run.cache: dataclasses.asdict(run) for run in runs},
        "versions": versions,
    }
    if dense:
        same = same_tokens(compressed, dense[0])
        words, _ = word_difference(dense[0].text, compressed.text)
        found["agreement"] = {"same_text": same is None, "tokens_until_difference": same, "words_in_common": words}
    return found


def _kept(run: FinishedRun) -> list[str]:
    total = max(1, sum(run.levels.values()))
    levels = ", ".join(f"{name} {count:,} ({count / total:.0%})" for name, count in run.levels.items())
    lines = [paragraph(f"Tokens per level, over all layers and KV heads: {levels}.")]
    compressed = len(run.layers or ())
    if run.num_layers is not None and compressed < run.num_layers:
        lines.append(
            paragraph(
                f"{compressed} of {run.num_layers} layers are compressed; the bytes count all of them. `hf-diffkv "
                "inspect` says which."
            )
        )
    if run.dense_bytes is not None and run.cache_bytes >= run.dense_bytes:
        if run.payload_bytes == run.dense_bytes and run.levels["high"] + run.levels["low"]:
            why = "Nothing is saved: every token is stored as it is."
        else:
            why = "So short a cache saves nothing: the window and partly filled pages outweigh it."
        lines.append(paragraph(why))
    return lines


def _difference(compressed: FinishedRun, dense: FinishedRun) -> str:
    same = same_tokens(compressed, dense)
    if same is None:
        return paragraph(f"Both caches wrote the same {sum(map(len, dense.generated))} tokens.")
    words, marked = word_difference(dense.text, compressed.text)
    head = paragraph(
        f"The texts differ from token {same + 1} on and share {words:.0%} of their words. What differs, "
        f"[-{dense.cache}-] and {{+{compressed.cache}+}}:"
    )
    return f"{head}\n{marked}"


def _words(text: str) -> list[str]:
    """Words and what is between them."""
    return re.findall(r"\s+|[^\s]+", text)


def _marked(pattern: str, text: str, colour: str) -> str:
    marked = pattern.format(text)
    return click.style(marked, fg=colour) if colours() else marked


def _row(name: str, dense: int | None, compressed: int | None, share: bool = False) -> tuple[str, str, str, str]:
    return name, megabytes(dense), megabytes(compressed), _share(compressed, dense) if share else ""


def _share(part: int | None, whole: int | None) -> str:
    return f"{part / whole:.1%}" if part is not None and whole else ""


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1f} tok/s"
