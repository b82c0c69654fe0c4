"""Writes docs/gallery.html: every measured method, from the committed results, as a table and a plot.

    python benchmarks/quality/gallery.py

Studies are in `benchmarks/results/quality/MODEL/STUDY`; submitted results are in `submitted/*.json`, next to the models
(`peers.py --submit`). The page needs no server and fetches nothing. `document.py` also writes it.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import escape
from pathlib import Path

from submissions import Submission, SubmissionEntry, read_submission, submission_of

from hf_diffkv.evaluation.records import ENVIRONMENTS_NAME, RECORDS_NAME, RUN_NAME, read_records
from hf_diffkv.evaluation.statistics import Estimate
from hf_diffkv.plot.palette import style_of

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "quality"
TEMPLATE = Path(__file__).with_name("gallery.template.html")
PAGE = ROOT / "docs" / "gallery.html"
# for a method in several studies, the first of these counts, then the others by name
FIRST = ("heads", "qwen", "heads_alone", "asked", "peers", "presets", "offline")
# studies made since presets have measured bits for each head; before, all heads had the same bits
BY_HEAD = ("heads", "qwen", "heads_alone", "asked")
PRESET = re.compile(r"diffkv:(quality|balanced|small)(\+adaptive_rounding=false)?")
SUBMITTED = "submitted"
# by prefix of a method's name
FAMILIES = {
    "diffkv": "hf-diffkv",
    "dense": "Transformers",
    "quanto": "Transformers",
    "hqq": "Transformers",
    "fp8": "Transformers",
    "kvpress": "kvpress",
    "llama-cpp": "llama.cpp",
}
OTHER_FAMILY = "other policies"
COLOURS = {
    "hf-diffkv": style_of("diffkv").colour,
    "Transformers": style_of("quanto").colour,
    "kvpress": "#b07aa1",
    "llama.cpp": style_of("llama-cpp").colour,
    OTHER_FAMILY: "#6b7280",
}


def main() -> None:
    PAGE.write_text(page(RESULTS), encoding="utf-8")


def page(results: Path) -> str:
    """Returns the page for a folder of results. Raises `EvaluationError` that names the field of an invalid record."""
    rows = _rows(results)
    models = list(dict.fromkeys(model for model, _, _, _ in rows))
    tasks = sorted({task for _, task, _, _ in rows}, key=lambda task: (not task.startswith("dictionary"), task))
    filled = TEMPLATE.read_text(encoding="utf-8")
    for name, value in {
        "MODELS": _options(models),
        "TASKS": _options(tasks),
        "FAMILIES": "".join(
            f'<label><input type="checkbox" value="{name}" checked><i style="background:{colour}"></i>{name}</label>'
            for name, colour in COLOURS.items()
        ),
        "ROWS": "\n".join(_row(*row) for row in rows),
    }.items():
        filled = filled.replace("{{" + name + "}}", value)
    return filled


def _rows(results: Path) -> list[tuple[str, str, SubmissionEntry, str]]:
    """Model, task with its settings, entry and source; the studies' rows come first, each method once."""
    found: dict[tuple[str, str, str], tuple[str, str, SubmissionEntry, str]] = {}
    for source, submission in [*_studies(results), *_submitted(results)]:
        for entry in submission.entries:
            if not {"right", "kl", "score"} & entry.metrics.keys():
                continue
            task = entry.task + (f", {submission.max_new_tokens:,} tokens" if submission.max_new_tokens else "")
            method = f"{entry.method} ({source})" if source.startswith(SUBMITTED) else _today(entry.method, source)
            key = (submission.model, task, method)
            found.setdefault(key, (submission.model, task, replace(entry, method=method), source))
    return sorted(found.values(), key=_best_first)


def _best_first(row: tuple[str, str, SubmissionEntry, str]) -> tuple[object, ...]:
    """Sorts by model, task, and method: most correct answers or least KL first, and among equals the smallest."""
    model, task, entry, _ = row
    right, kl = _share_right(entry), entry.metrics.get("kl")
    lost = -right.mean if right else kl.mean if kl else 0.0
    return model != "smollm2", model, task, lost, entry.ratio, entry.method


def _share_right(entry: SubmissionEntry) -> Estimate | None:
    return entry.metrics.get("right") or entry.metrics.get("score")


def _studies(results: Path) -> list[tuple[str, Submission]]:
    folders = [path.parent for path in results.glob(f"*/*/{RUN_NAME}")]
    folders.sort(key=lambda path: (path.name not in FIRST, FIRST.index(path.name) if path.name in FIRST else 0, path))
    studies = []
    for folder in folders:
        others = sorted(folder.glob(f"{ENVIRONMENTS_NAME}/*/{RECORDS_NAME}"))
        records = read_records([folder / RECORDS_NAME, *others])
        studies.append((folder.name, submission_of(records, json.loads((folder / RUN_NAME).read_text()))))
    return studies


def _submitted(results: Path) -> list[tuple[str, Submission]]:
    paths = sorted((results / SUBMITTED).glob("*.json"))
    return [(f"{SUBMITTED}: {path.stem}", read_submission(path)) for path in paths]


def _today(method: str, study: str) -> str:
    """Returns the current name of an older study's method, whose presets had one precision for all heads."""
    return f"{method}+head_precisions=null" if study not in BY_HEAD and PRESET.fullmatch(method) else method


def _row(model: str, task: str, entry: SubmissionEntry, source: str) -> str:
    family = next((name for start, name in FAMILIES.items() if entry.method.startswith(start)), OTHER_FAMILY)
    right, kl = _share_right(entry), entry.metrics.get("kl")
    data = {
        "model": model,
        "task": task,
        "family": family,
        "method": entry.method,
        "bytes": f"{100 * entry.ratio:.2f}",
        "right": "" if right is None else f"{100 * right.mean:.2f}",
        "kl": "" if kl is None else f"{kl.mean:.6f}",
    }
    attributes = " ".join(f'data-{name}="{escape(value)}"' for name, value in data.items())
    share = f"{entry.ratio:.1%}" + (" (simulated)" if entry.simulated else "")
    payload = "" if entry.payload_bytes is None else f"payload {entry.payload_bytes / entry.dense_bytes:.1%}"
    place = ", ".join(
        f"{name} {entry.environment[name]}" for name in ("device", "torch", "transformers", "commit")
        if entry.environment.get(name)
    )  # fmt: skip
    cells = [
        f'<th scope="row"><i style="background:{COLOURS[family]}"></i><code>{escape(entry.method)}</code></th>',
        f"<td>{escape(task)}</td>",
        f"<td>{share}<small>{payload}</small></td>",
        f"<td>{_right(right)}</td>",
        f"<td>{_kl(kl)}</td>",
        f"<td>{entry.documents}</td>",
        f'<td title="{escape(place)}">{escape(source)}<small>{escape(place)}</small></td>',
    ]
    return f"<tr {attributes}>{''.join(cells)}</tr>"


def _right(figure: Estimate | None) -> str:
    if figure is None:
        return "-"
    return f"{figure.total:g} of {figure.weight:g}<small>{figure.low:.0%} to {figure.high:.0%}</small>"


def _kl(figure: Estimate | None) -> str:
    if figure is None:
        return "-"
    return f"{figure.mean:.4f}<small>{figure.low:.4f} to {figure.high:.4f}</small>"


def _options(names: list[str]) -> str:
    return "".join(f"<option>{escape(name)}</option>" for name in names)


if __name__ == "__main__":
    main()
