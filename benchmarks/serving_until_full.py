"""Requests in flight at one budget, precise until full, compared with waiting: speed, loss and preemptions.

One engine stores all tokens at the final precision, another at the precise one; in both, requests wait if the budget is
full. The third stays precise until the budget is full and then lowers heads. All get the same prompts, parts of this
project's documents, at the same time, and take turns in one process. KL compares each engine's next-token distribution
with the dense one on the text that it generated, over all generated tokens.

    python benchmarks/serving_until_full.py [--model smollm2] [--in-flight 1 4 8 12] [--precise-requests 4.5]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from cpu_caches import about_machine, append_rows
from hf_diffkv_serving.batching.engine_cache import ContinuousCache
from torch import Tensor
from transformers import AutoTokenizer, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.utils import WorkloadHints
from transformers.utils import logging

from hf_diffkv import DiffKVConfig
from hf_diffkv.cache.diffkv_cache import DiffKVCache
from hf_diffkv.compat import passing
from hf_diffkv.running.models import load_model, resolve_model

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "serving_until_full.jsonl"
PATIENCE = 900
# name of a request, and number of tokens before a position in it
Place = tuple[str, int]


def engines(preset: str, window: int) -> dict[str, DiffKVConfig]:
    """Returns the configurations to compare, without the budget."""
    final = DiffKVConfig.preset(preset, window=window)
    precise = DiffKVConfig.preset(preset, window=window, high="K8V8", low="K8V8")
    return {final.high.full_name: final, "K8V8": precise, "until full": final}


def prompts(model_name: str, count: int, tokens: int) -> list[list[int]]:
    """Returns parts of this project's documents."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(model_name))
    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    ids = tokenizer(text).input_ids
    apart = (len(ids) - tokens) // count
    return [ids[at : at + tokens] for at in range(0, apart * count, apart)]


@contextmanager
def recorded(model: PreTrainedModel, running: Any) -> Iterator[dict[Place, Tensor]]:
    """Records the scores from which a manager chooses tokens, by request and number of tokens before the chosen one."""
    found: dict[Place, Tensor] = {}
    past: dict[str, int] = {}
    extend = ContinuousCache.extend_read_and_write_indices

    def noted(cache: ContinuousCache, request_id: str, before: int, tokens: int, *indices: Any) -> None:
        past[request_id] = before + tokens
        extend(cache, request_id, before, tokens, *indices)

    def scored(module: Any, inputs: Any, output: Tensor) -> None:
        batch = running.batch_processor.inputs_and_outputs.requests_in_batch
        # the first rows belong to these, the others to no request
        names = [future.state.request_id for future in batch if future.has_new_token]
        if output.shape[1] != len(batch):
            raise RuntimeError(f"{output.shape[1]} rows of scores for {len(batch)} requests.")
        for name, row in zip(names, output[0]):
            found[name, past[name]] = row.float().log_softmax(-1)

    hook = model.get_output_embeddings().register_forward_hook(scored)
    ContinuousCache.extend_read_and_write_indices = noted
    try:
        yield found
    finally:
        hook.remove()
        ContinuousCache.extend_read_and_write_indices = extend


def serve(
    model: PreTrainedModel, name: str, config: DiffKVConfig, max_bytes: int, given: list[list[int]], new: int
) -> dict:
    """Sends all prompts at once; returns results of the run, and the texts with their recorded scores."""
    fields = {**config.to_dict(), "max_bytes": max_bytes}
    fields |= {"until_full": "K8V8"} if name == "until full" else {}
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    generation.cache_implementation, generation.cache_config = "diffkv", fields
    longest = max(map(len, given)) + new
    options = ContinuousBatchingConfig(max_batch_tokens=2 * longest, max_requests_per_batch=64, safety_margin=0.0)
    running = model.init_continuous_batching(generation, options, WorkloadHints(longest - 1, 1))
    for index, ids in enumerate(given):
        running.add_request(ids, request_id=str(index), max_new_tokens=new)
    most, step = 0, running._generation_step

    def counted() -> None:
        nonlocal most
        step()
        most = max(most, len(running.batch_processor.scheduler.active_requests))

    running._generation_step = counted
    with recorded(model, running) as scores:
        began, texts = time.perf_counter(), {}
        running.start()
        try:
            while len(texts) < len(given) and time.perf_counter() - began < PATIENCE:
                answer = running.get_result(timeout=1)
                if answer is not None:
                    if answer.error is not None:
                        raise RuntimeError(answer.error)
                    texts[answer.request_id] = given[int(answer.request_id)] + answer.generated_tokens
            seconds = time.perf_counter() - began
            found = running.statistics()
        finally:
            running.stop(block=True)
    return {
        "most": most,
        "tokens_per_second": new * len(given) / seconds,
        "preemptions": found.preemptions,
        "lowered": found.memory.lowered,
        "peak_bytes": found.memory.peak_bytes,
        "texts": texts,
        "scores": scores,
    }


@torch.no_grad()
def loss(model: PreTrainedModel, run: dict, new: int) -> float:
    """Returns the mean KL of the generated tokens' distributions to those of a dense forward over the same text."""
    found = []
    for name, text in run["texts"].items():
        dense = model(torch.tensor([text]), use_cache=False).logits[0].float().log_softmax(-1)
        for length in range(len(text) - new, len(text)):
            mine = run["scores"][name, length]
            found.append(float((dense[length - 1].exp() * (dense[length - 1] - mine)).sum()))
    return statistics.mean(found)


@torch.no_grad()
def bytes_of_one(model: PreTrainedModel, config: DiffKVConfig, tokens: int) -> int:
    """Returns the bytes of a cache of one request."""
    cache = DiffKVCache(model.config, config)
    attention = model.config._attn_implementation
    model.set_attn_implementation("diffkv")
    model(torch.full((1, tokens), 3), **passing(cache), use_cache=True)
    model.set_attn_implementation(attention)
    return cache.memory().bytes


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--preset", default="small")
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 4, 8, 12], help="requests that come at once")
    parser.add_argument("--prompt", type=int, default=250, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=24, help="tokens of each answer")
    parser.add_argument("--precise-requests", type=float, default=4.5, help="that the budget holds precisely")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS, help="JSON lines are appended here")
    args = parser.parse_args(arguments)
    logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    model = load_model(resolve_model(args.model), "float32").eval()
    configs = engines(args.preset, args.window)
    max_bytes = int(args.precise_requests * bytes_of_one(model, configs["K8V8"], args.prompt + args.new))
    about = {**about_machine(), "threads": args.threads, "model": args.model, "prompt": args.prompt, "new": args.new}
    about["max_bytes"] = max_bytes
    print(" ".join(f"{key}={value}" for key, value in about.items()), flush=True)
    print("| requests | tokens are | in flight at most | tokens/s | KL | preemptions | tokens lowered |")
    print(f"|{'---|' * 7}", flush=True)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    for count in args.in_flight:
        given = prompts(args.model, count, args.prompt)
        for name, config in configs.items():
            run = serve(model, name, config, max_bytes, given, args.new)
            row = {"requests": count, "engine": name, "kl": loss(model, run, args.new)}
            row |= {key: value for key, value in run.items() if key not in ("texts", "scores")}
            append_rows(args.output, about, [row])
            print(
                f"| {count} | {name} | {row['most']} | {row['tokens_per_second']:.1f} | {row['kl']:.4f} | "
                f"{row['preemptions']} | {row['lowered']:,} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
