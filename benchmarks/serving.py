"""Requests in flight and tokens per second at equal bytes: Transformers' own paged cache against DiffKV, on a CPU.

Both are caches of Transformers' continuous batching engine (`ContinuousBatchingManager`; the paged cache attends with
sdpa). They get the same requests at the same times, with log-normal lengths and exponential gaps, more than fit at
once, and the same bytes: for Transformers those of its pages, for DiffKV also those of windows, tables and scratch. All
take turns in one process. The time to first token of a long prompt is measured with enough room for it. Before a model
is timed, a lossless cache must produce the same text as `generate()`.

    python benchmarks/serving.py [--cases smollm2 llama-2x128] [--turns 2] [--threads 2]
    python benchmarks/serving.py --report [--document]   # prints the tables of results
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import report_serving
import torch
from cpu_caches import about_machine, append_rows, load_model, random_llama
from serving_engines import NAMES, check_lossless, dense_bytes, first_token, manager, run, trace
from transformers import PreTrainedModel
from transformers.utils import logging

RESULTS = Path(__file__).parent / "results" / "serving.jsonl"
RANDOM = "llama-2x128"


@dataclass(frozen=True)
class Case:
    """A model and its requests.

    Attributes:
        model: name of the model.
        requests: number of requests.
        prompt, answer: shortest and median length in tokens; the longest is twice the median.
        gap: mean seconds between two arrivals.
        room: number of median-length requests whose dense bytes are the budget of every engine.
    """

    model: str
    requests: int
    prompt: tuple[int, int]
    answer: tuple[int, int]
    gap: float
    room: float

    @property
    def longest(self) -> int:
        """Maximum number of tokens in a request."""
        return 2 * (self.prompt[1] + self.answer[1])


CASES = {
    "tiny-lm": Case("tiny-lm", 24, (100, 200), (8, 16), 0.02, 4),
    "tiny-lm, short": Case("tiny-lm", 64, (280, 300), (16, 32), 0.01, 8),
    "smollm2": Case("smollm2", 14, (300, 500), (16, 48), 0.2, 6),
    "smollm2, short": Case("smollm2", 24, (280, 300), (16, 48), 0.1, 6),
    RANDOM: Case(RANDOM, 40, (2048, 2400), (16, 64), 0.05, 8),
}


def model_of(name: str, dtype: torch.dtype) -> PreTrainedModel:
    """Loads or builds a model of `CASES`.

    Raises:
        FileNotFoundError: the model has not been fetched.
    """
    if name != RANDOM:
        return load_model(name, dtype, 0)
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1 << 15}
    return random_llama(dtype, **sizes)


def serve(model: PreTrainedModel, name: str, args: argparse.Namespace) -> list[dict]:
    """One row for each engine, with the results of its turn that had the median tokens per second."""
    case = CASES[name]
    requests = trace(model.config.vocab_size, args.requests or case.requests, case.prompt, case.answer, case.gap)
    median = case.prompt[1] + case.answer[1]
    budget = int(case.room * median * dense_bytes(model))
    found: dict[str, list[dict]] = {engine: [] for engine in NAMES}
    for turn in range(args.turns):
        for engine in NAMES:
            print(f"  {name}, {engine}, turn {turn + 1} of {args.turns}", file=sys.stderr, flush=True)
            running = manager(model, engine, budget, case.longest, 2 * case.prompt[1])
            found[engine].append(run(running, requests))
    lengths = [len(request.ids) for request in requests]
    about = {
        "kind": "serving",
        "model": case.model,
        "case": name,
        "requests": len(requests),
        "prompt_tokens": [min(lengths), round(statistics.median(lengths)), max(lengths)],
        "new_tokens": sum(request.new_tokens for request in requests),
        "gap": case.gap,
        "max_bytes": budget,
    }
    rows = []
    for engine, turns in found.items():
        rates = sorted(turn["tokens_per_second"] for turn in turns)
        middle = next(turn for turn in turns if turn["tokens_per_second"] == statistics.median_low(rates))
        rows.append({**about, "engine": engine, **middle, "rates": rates})
    return rows


def prompts(model: PreTrainedModel, name: str, args: argparse.Namespace) -> list[dict]:
    """Seconds to the first token of one long prompt, in turns; one row for each engine."""
    length = args.first_token
    ids = trace(model.config.vocab_size, 1, (length, length), (1, 1), 1.0)[0].ids[:length]
    budget = 4 * length * dense_bytes(model)
    seconds: dict[str, list[float]] = {engine: [] for engine in NAMES[:2]}
    for turn in range(args.prompt_turns):
        for engine in seconds:
            print(f"  {name}, first token, {engine}, turn {turn + 1}", file=sys.stderr, flush=True)
            seconds[engine].append(first_token(manager(model, engine, budget, length + 1, 2 * length), ids))
    about = {"kind": "first token", "model": name, "prompt": length}
    return [{**about, "engine": engine, "seconds": sorted(taken)} for engine, taken in seconds.items()]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES)[1:])
    parser.add_argument("--requests", type=int, help="of a trace, in place of the model's own number")
    parser.add_argument("--turns", type=int, default=2, help="of every engine, with the trace")
    parser.add_argument("--first-token", type=int, default=4096, metavar="N", help="tokens of the long prompt; 0: none")
    parser.add_argument("--prompt-turns", type=int, default=2, help="of every engine, with the long prompt")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--output", type=Path, default=RESULTS, help="JSON lines are appended here")
    parser.add_argument("--report", action="store_true", help="measure nothing, report what the output holds")
    parser.add_argument("--document", action="store_true", help="with --report: into docs/notes/serving.md as well")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    if not args.report:
        # a refused request is an error here
        logging.set_verbosity_error()
        torch.set_num_threads(args.threads)
        about = {**about_machine(), "dtype": args.dtype, "threads": args.threads}
        print(" ".join(f"{key}={value}" for key, value in about.items()), flush=True)
        args.output.parent.mkdir(parents=True, exist_ok=True)
        for name in args.cases:
            try:
                model = model_of(CASES[name].model, getattr(torch, args.dtype))
            except FileNotFoundError as error:
                print(f"left out: {error}", flush=True)
                continue
            check_lossless(model)
            # prompts of any length are timed once per model
            for measure in (serve, prompts) if args.first_token and name == CASES[name].model else (serve,):
                append_rows(args.output, about, measure(model, name, args))
    report_serving.report(args.output)
    if args.report and args.document:
        report_serving.document(args.output)


if __name__ == "__main__":
    main()
