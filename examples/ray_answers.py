"""Answers a file of prompts on all machines of a Ray cluster, or on this one; a second run continues where one stopped.

    python examples/ray_answers.py --prompts prompts.jsonl --output answers --workers 8 --gpus 1

`docs/distributed.md` explains how to start a cluster.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_diffkv.ray import Summary, generate

TINY_LM = Path(__file__).parent / "models" / "tiny-lm"


def main(arguments: Sequence[str] | None = None) -> Summary:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default=str(TINY_LM), help="Hub id or folder (default: this repository's tiny-lm)")
    add("--prompts", required=True, help='JSON lines with "prompt" (text, messages or token ids) and a key')
    add("--output", required=True, help="folder or URI for Parquet files, which all machines see")
    add("--key", default="id", help="the field that tells rows apart (default: %(default)s)")
    add("--workers", type=int, default=1, help="each with a copy of the model (default: %(default)s)")
    add("--gpus", type=float, default=0, help="of a worker (default: %(default)s)")
    add("--batch-size", type=int, default=32, help="rows that are written together (default: %(default)s)")
    add("--max-new-tokens", type=int, default=64)
    add("--max-length", type=int, help="most tokens of prompt and answer (default: the model's)")
    add("--max-bytes", default="1GB", help="budget of each worker's cache (default: %(default)s)")
    add("--preset", help="quality, balanced or small")
    add("--quiet", action="store_true")
    options = parser.parse_args(arguments)
    # imported after the library, which says how to install Ray if it is missing
    import ray

    config: dict[str, Any] = {"max_bytes": options.max_bytes}
    if options.preset:
        config["preset"] = options.preset
    summary = generate(
        ray.data.read_json(options.prompts, lines=True),
        options.output,
        key=options.key,
        concurrency=options.workers,
        batch_size=options.batch_size,
        workers={"num_gpus": options.gpus},
        progress=not options.quiet,
        model=options.model,
        config=config,
        max_new_tokens=options.max_new_tokens,
        max_length=options.max_length,
    )
    print(
        f"{summary.answered:,} rows answered, {summary.failed:,} failed, {summary.skipped:,} were there; "
        f"{summary.answer_tokens:,} tokens. Read them with ray.data.read_parquet({options.output!r})."
    )
    return summary


if __name__ == "__main__":
    main()
