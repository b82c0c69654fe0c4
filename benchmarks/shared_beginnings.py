"""Requests, half of which share one of 6 prefixes: what is reused and held, whether answers change, first token.

Continuous batching is run with and without a `PrefixStore`. The end of a text is marked, as the server marks the end of
a system message, or found by comparing requests. Answers are compared with those of a store that keeps nothing, so that
prompts are split into the same parts and all of them are computed.

    python benchmarks/shared_beginnings.py [--models tiny-lm smollm2] [--gap SECONDS] [--threads 2]
    python benchmarks/shared_beginnings.py --report [--document]   # prints the table of results
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from cpu_caches import about_machine, append_rows, load_model
from serving_engines import PATIENCE, dense_bytes
from tables import markdown
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.utils import logging

from hf_diffkv import DiffKVConfig, PrefixStore

RESULTS = Path(__file__).parent / "results" / "shared_beginnings.jsonl"
DOCUMENT = Path(__file__).parent.parent / "docs" / "notes" / "serving.md"
BLOCK = re.compile(r"(<!-- shared beginnings -->\n).*?(<!-- end -->)", re.DOTALL)
TEXTS, ANSWER = 6, 8
# tokens of a text and of a prompt that shares nothing, and of a question
LONG, QUESTION = (300, 700), (10, 40)
# compared: no store, a store without room, texts that are found, and marked texts
NOTHING, COMPUTED, FOUND, MARKED = "nothing kept", "same parts, computed", "found", "marked"
WAYS = (NOTHING, FOUND, MARKED)


@dataclass(frozen=True)
class Request:
    """A prompt whose first `shared` tokens are text number `text`; -1 and 0 if it shares nothing."""

    at: float
    ids: list[int]
    text: int
    shared: int


def traffic(vocabulary: int, requests: int, gap: float) -> list[Request]:
    """Draws the same requests on every call.

    Gaps are exponential with a mean of `gap` seconds. Every second request begins with one of the shared texts.
    """
    rng = random.Random(0)

    def tokens(bounds: tuple[int, int]) -> list[int]:
        return [rng.randrange(3, vocabulary) for _ in range(rng.randint(*bounds))]

    texts = [tokens(LONG) for _ in range(TEXTS)]
    made, at = [], 0.0
    for i in range(requests):
        number = rng.randrange(TEXTS) if i % 2 else -1
        beginning = texts[number] if i % 2 else tokens(LONG)
        made.append(Request(at, beginning + tokens(QUESTION), number, len(beginning) if i % 2 else 0))
        at += rng.expovariate(1 / gap) if gap else 0
    return made


def serve(model: PreTrainedModel, requests: list[Request], marked: bool, store: PrefixStore | None) -> dict:
    """Sends all. Returns each request's answer, reused tokens and seconds to the first token, and the peak of all held.

    Raises:
        RuntimeError: a request failed, or none finished for a long time.
    """
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, cache_implementation="diffkv")
    longest = max(len(request.ids) for request in requests) + ANSWER
    # a prompt that does not fit next to others in a forward would be cut there as well
    tokens = len(requests) * longest
    config.cache_config = {**DiffKVConfig.for_model(model).to_dict(), "max_bytes": tokens * dense_bytes(model)}
    manager = model.init_continuous_batching(config, ContinuousBatchingConfig(max_batch_tokens=tokens))
    if store is not None:
        manager.use_prefixes(store)
    records: dict = {}
    manager.records.ended = lambda record: records.__setitem__(record.request_id, record)
    manager.start()
    try:
        started, left, answers, held = time.perf_counter(), list(enumerate(requests)), {}, 0
        while len(answers) < len(requests):
            while left and left[0][1].at <= time.perf_counter() - started:
                number, request = left.pop(0)
                marks = [request.shared] if marked and request.shared else []
                manager.add_request(request.ids, str(number), max_new_tokens=ANSWER, boundaries=marks)
            answer = manager.get_result(timeout=0.02)
            held = max(held, manager.memory().held_bytes)
            if answer is not None:
                if answer.error is not None:
                    raise RuntimeError(answer.error)
                answers[int(answer.request_id)] = answer.generated_tokens
            if time.perf_counter() - started > PATIENCE or not manager.is_running():
                raise RuntimeError(f"{len(requests) - len(answers)} requests did not come to their end.")
    finally:
        manager.stop()
    return {
        "answers": [answers[i] for i in range(len(requests))],
        "cached": [records[str(i)].cached_tokens for i in range(len(requests))],
        "first": [records[str(i)].first_token - records[str(i)].created for i in range(len(requests))],
        "held": held,
        "seconds": time.perf_counter() - started,
    }


def measure(model: PreTrainedModel, name: str, args: argparse.Namespace) -> list[dict]:
    """One row for each variant."""
    requests = traffic(model.config.vocab_size, args.requests, args.gap)
    later, seen = [], set()
    for i, request in enumerate(requests):
        if request.text in seen:
            later.append(i)
        seen |= {request.text} - {-1}

    def run(way: str, marked: bool, room: int | None) -> dict:
        print(f"  {name}, {way}", file=sys.stderr, flush=True)
        config = DiffKVConfig.for_model(model)
        store = None if room is None else PrefixStore(model, config, device_bytes=room)
        return serve(model, requests, marked, store)

    rows = []
    for way in WAYS:
        found = run(way, way == MARKED, None if way == NOTHING else 1 << 30)
        row = {
            "model": name,
            "way": way,
            "gap": args.gap,
            "requests": len(requests),
            "later": len(later),
            "shared_tokens": sum(requests[i].shared for i in later),
            "reused_tokens": sum(min(found["cached"][i], requests[i].shared) for i in later),
            "first_token": statistics.median(found["first"][i] for i in later),
            "first_token_others": statistics.median(found["first"][i] for i, r in enumerate(requests) if r.text < 0),
            "held_bytes": found["held"],
            "seconds": found["seconds"],
        }
        if way == MARKED:
            computed = run(COMPUTED, True, 0)
            row["same_answers"] = sum(map(list.__eq__, found["answers"], computed["answers"]))
        rows.append(row)
    return rows


def table(rows: list[dict]) -> str:
    header = (
        "model",
        "mean gap in s",
        "where texts end",
        "of shared tokens reused",
        "median s to the first token, shared",
    )
    header += (
        "of nothing kept",
        "others",
        "of nothing kept",
        "most held, MB",
        "s in all",
        "answers as computed in the same parts",
    )
    lines, first = [], {}
    for row in rows:
        base = first.setdefault((row["device"], row["model"], row["gap"]), row)
        line = [row["model"], row["gap"], row["way"], f"{row['reused_tokens'] / row['shared_tokens']:.0%}"]
        for name in ("first_token", "first_token_others"):
            line += [row[name], row[name] / base[name]]
        same = row.get("same_answers")
        line += [row["held_bytes"] / 1e6, row["seconds"], "" if same is None else f"{same} of {row['requests']}"]
        lines.append(line)
    return markdown(header, lines)


def report(path: Path, into_document: bool) -> None:
    """Prints the table of each case's newest row, and on request inserts it into docs/notes/serving.md."""
    newest: dict[tuple, dict] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        newest[row["device"], row["model"], row["gap"], row["way"]] = row
    rows = list(newest.values())
    last = rows[-1]
    text = (
        f"Measured on {last['device']}, {last['threads']} thread(s), {last['dtype']}, torch {last['torch']}, "
        f"transformers {last['transformers']}, commit {last['commit']}.\n\n{table(rows)}"
    )
    print(f"\n{text}")
    if into_document:
        DOCUMENT.write_text(BLOCK.sub(lambda match: f"{match[1]}{text}\n{match[2]}", DOCUMENT.read_text()))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["tiny-lm", "smollm2"])
    parser.add_argument("--requests", type=int, default=72)
    parser.add_argument("--gap", type=float, default=0.05, help="seconds between two requests, on average")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--output", type=Path, default=RESULTS, help="JSON lines are appended here")
    parser.add_argument("--report", action="store_true", help="measure nothing, report what the output holds")
    parser.add_argument("--document", action="store_true", help="with --report: into docs/notes/serving.md as well")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    if not args.report:
        logging.set_verbosity_error()
        torch.set_num_threads(args.threads)
        about = {**about_machine(), "dtype": args.dtype, "threads": args.threads}
        args.output.parent.mkdir(parents=True, exist_ok=True)
        for name in args.models:
            model = load_model(name, getattr(torch, args.dtype), 0)
            append_rows(args.output, about, measure(model, name, args))
    report(args.output, args.document)


if __name__ == "__main__":
    main()
