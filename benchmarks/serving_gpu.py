"""Continuous batching with a random-weight model in Llama-3-8B's shape: Transformers' pages and DiffKV, equal bytes.

Both caches run in Transformers' own engine (`ContinuousBatchingManager`) and get the same requests at the same times,
more than fit at once. Compilation happens in a short run of each beforehand. Needs Transformers 5.23.

    python benchmarks/serving_gpu.py [--requests 48] [--cache-bytes 4e9]
"""

from __future__ import annotations

import statistics

from measure import Session, free_memory, parser
from models_gpu import build_model
from serving_engines import NAMES, manager, run, trace
from transformers import PreTrainedModel
from transformers.utils import logging

PROMPT, ANSWER, GAP = (1024, 2048), (32, 64), 0.005
CHUNK = 4096


def measure(session: Session, model: PreTrainedModel, name: str, requests: int, max_bytes: int) -> None:
    """Adds a row for one of `NAMES`."""
    tiny = model.config.hidden_size < 1024
    prompt, answer = ((16, 32), (4, 8)) if tiny else (PROMPT, ANSWER)
    made = trace(model.config.vocab_size, requests, prompt, answer, GAP)
    longest = 2 * (prompt[1] + answer[1])
    found = [run(manager(model, name, max_bytes, longest, CHUNK), part) for part in (made[:6], made)][-1]
    lengths = [len(request.ids) for request in made]
    about = {
        "kind": "serving",
        "cache": name,
        "requests": requests,
        "prompt_tokens": [min(lengths), round(statistics.median(lengths)), max(lengths)],
        "new_tokens": sum(request.new_tokens for request in made),
        "cache_bytes_allowed": max_bytes,
    }
    session.add({**about, **{key: round(value, 2) for key, value in found.items()}})
    print(f"{name}: {found['tokens_per_second']:.1f} tokens per second, {found['mean']:.1f} requests", flush=True)


def main(arguments: list[str] | None = None) -> Session:
    options = parser(__doc__, "serving_gpu")
    options.add_argument("--requests", type=int, default=48)
    options.add_argument("--cache-bytes", type=float, default=4e9)
    options.add_argument("--engines", nargs="+", default=list(NAMES[:2]), choices=NAMES)
    args = options.parse_args(arguments)
    # a refused request is an error here
    logging.set_verbosity_error()
    session = Session(args)
    model = build_model(session, args.tiny)
    for name in args.engines:
        if session.has_time(name):
            free_memory()
            try:
                measure(session, model, name, args.requests, int(args.cache_bytes))
            except Exception as failure:  # a failing engine does not stop the others
                session.failed({"kind": "serving", "cache": name}, failure)
    return session


if __name__ == "__main__":
    main()
