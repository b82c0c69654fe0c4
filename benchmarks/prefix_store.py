"""Time to the first token on a CPU for a request that begins with a known prefix.

The prefix is recomputed, taken from memory, or read from disk, with a `DynamicCache` (copied, torch.load, safetensors)
and with a `PrefixStore` of default configuration. All variants take turns in one process. Figures are medians with
quartiles, of elapsed time and of processor time, which other load hardly changes. Files are read both with and without
a warm system page cache. Before anything is timed, a restored cache must give exactly the logits of one that stayed in
memory.

    python benchmarks/prefix_store.py [--model tiny-lm] [--lengths 512 1024 2048] [--threads 1] [--repeats 7]
    python benchmarks/prefix_store.py --report      # prints the table of results
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from cpu_caches import FOLDERS, ROOT, about_machine, attention_of, held_bytes, load_model
from decode_cpu import quartiles
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from hf_diffkv import DiffKVCache, PrefixStore
from hf_diffkv.compat import passing

RESULTS = Path(__file__).parent / "results" / "prefix_store.json"
# tokens of the request after its prefix
QUESTION = 16


@torch.no_grad()
def first_token(model: PreTrainedModel, cache: Cache, ids: Tensor) -> Tensor:
    """Logits [vocabulary] after `ids` [1, tokens], the first of which `cache` may already hold."""
    model.set_attn_implementation(attention_of(cache))
    return model(ids[:, cache.get_seq_length() :], **passing(cache), logits_to_keep=1).logits[0, -1]


def draw(name: str, count: int) -> Tensor:
    """Token ids int64 [1, count] from this repository's own documents."""
    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    ids = AutoTokenizer.from_pretrained(FOLDERS[name])(text, return_tensors="pt").input_ids[:, :count]
    if ids.shape[1] < count:
        raise SystemExit(f"the documents have {ids.shape[1]} tokens, fewer than {count}.")
    return ids


def dense_of(model: PreTrainedModel, tensors: dict[str, Tensor]) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    for layer_idx in range(model.config.num_hidden_layers):
        cache.update(tensors[f"{layer_idx}.keys"], tensors[f"{layer_idx}.values"], layer_idx)
    return cache


def drop_from_page_cache(folder: Path) -> None:
    """Drops every file in `folder` from the page cache, so that the next read goes to the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Way(NamedTuple):
    """One way for a request to get the cache that it continues.

    Attributes:
        get: function that returns the cache.
        sizes: bytes of the prefix, by storage location.
        files: folder whose files must not be in the page cache when `get` runs.
    """

    get: Callable[[], Cache]
    sizes: dict[str, int]
    files: Path | None = None


def ways(model: PreTrainedModel, ids: Tensor, folder: Path) -> dict[str, Way]:
    """All of them by name; the files they read are written into `folder`."""
    prefix = ids[:, :-QUESTION]
    dense = DynamicCache(config=model.config)
    first_token(model, dense, prefix)
    tensors = {}
    for layer_idx, layer in enumerate(dense.layers):
        tensors.update({f"{layer_idx}.keys": layer.keys, f"{layer_idx}.values": layer.values})
    torch_folder, safetensors_folder, store_folder = folder / "torch", folder / "safetensors", folder / "store"
    torch_folder.mkdir()
    safetensors_folder.mkdir()
    torch.save(tensors, torch_folder / "cache")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, safetensors_folder / "cache")
    memory = PrefixStore(model)
    disk = PrefixStore(model, device_bytes=0, folder=store_folder)
    compressed = DiffKVCache(model.config, memory.config)
    first_token(model, compressed, prefix)
    if not (memory.insert(prefix, compressed) and disk.insert(prefix, compressed)):
        raise SystemExit("the prefix was not stored; nothing is timed.")
    check(model, ids, compressed, memory, disk)
    made = {
        "DynamicCache, computed": Way(lambda: DynamicCache(config=model.config), {}),
        "DynamicCache, memory": Way(lambda: copy.deepcopy(dense), {"memory_bytes": held_bytes(dense)}),
        "DiffKV, computed": Way(lambda: DiffKVCache(model.config, memory.config), {}),
        "PrefixStore, memory": Way(lambda: memory.lookup(ids), {"memory_bytes": next(iter(memory)).bytes}),
    }
    for name, files, get in (
        ("DynamicCache, torch.load", torch_folder, lambda: torch.load(torch_folder / "cache", weights_only=True)),
        ("DynamicCache, safetensors", safetensors_folder, lambda: load_file(safetensors_folder / "cache")),
    ):
        made |= with_files(name, files, lambda get=get: dense_of(model, get()))
    return made | with_files("PrefixStore, disk", store_folder, lambda: disk.lookup(ids))


def with_files(name: str, files: Path, get: Callable[[], Cache]) -> dict[str, Way]:
    sizes = {"file_bytes": sum(path.stat().st_size for path in files.rglob("*") if path.is_file())}
    return {name: Way(get, sizes), f"{name}, not in the page cache": Way(get, sizes, files)}


def check(model: PreTrainedModel, ids: Tensor, stayed: DiffKVCache, *stores: PrefixStore) -> None:
    """Exits unless caches from the stores give the same logits as one that stayed."""
    expected = first_token(model, stayed, ids)
    for store in stores:
        if not torch.equal(first_token(model, store.lookup(ids), ids), expected):
            raise SystemExit("a cache from the store gives other logits than the one that was stored; not timed.")


def measure(model: PreTrainedModel, args: argparse.Namespace, length: int) -> list[dict]:
    """One row for each way."""
    ids = draw(args.model, length + QUESTION)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        made = ways(model, ids, Path(folder))
        total: dict[str, list[float]] = {name: [] for name in made}
        loading: dict[str, list[float]] = {name: [] for name in made}
        computing: dict[str, list[float]] = {name: [] for name in made}
        for turn in range(args.repeats + 1):
            for name, way in made.items():
                if way.files is not None:
                    drop_from_page_cache(way.files)
                started, busy = time.perf_counter(), time.process_time()
                cache = way.get()
                loaded = time.perf_counter()
                first_token(model, cache, ids)
                if turn:  # the first one warms up
                    total[name].append(time.perf_counter() - started)
                    computing[name].append(time.process_time() - busy)
                    loading[name].append(loaded - started)
            print(f"  {length} tokens, turn {turn} of {args.repeats}", file=sys.stderr, flush=True)
    case = {"model": args.model, "prefix": length, "question": QUESTION, "threads": args.threads, "turns": args.repeats}
    rows = []
    for name, way in made.items():
        taken = {"ms": total[name], "cpu_ms": computing[name], "loading_ms": loading[name]}
        times = {field: quartiles(seconds) for field, seconds in taken.items()}
        rows.append({**case, "way": name, **times, **way.sizes})
    return rows


def report(path: Path) -> None:
    found = json.loads(path.read_text())
    print(" ".join(f"{key}={value}" for key, value in found["about"].items()))
    print("| prefix | way | ms to the first token (quartiles) | processor | of which loading | MB held | MB of files |")
    print("|---|---|---|---|---|---|---|")
    for row in found["rows"]:
        low, median, high = row["ms"]
        sizes = (f"{row[name] / 1e6:.1f}" if name in row else "" for name in ("memory_bytes", "file_bytes"))
        times = f"{median:.0f} ({low:.0f}-{high:.0f}) | {row['cpu_ms'][1]:.0f} | {row['loading_ms'][1]:.1f}"
        print(f"| {row['prefix']} | {row['way']} | {times} | {' | '.join(sizes)} |")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(FOLDERS), default="smollm2")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7, help="timed turns")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--folder", type=Path, help="where files are written and read; the system's, unless given")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--report", action="store_true", help="measure nothing, report what the output holds")
    args = parser.parse_args(arguments)
    if args.repeats < 2:
        parser.error("--repeats must be at least 2, for quartiles")
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    if not args.report:
        torch.set_num_threads(args.threads)
        model = load_model(args.model, getattr(torch, args.dtype), 0)
        found = {"about": {**about_machine(), "dtype": args.dtype}, "rows": []}
        args.output.parent.mkdir(parents=True, exist_ok=True)
        for length in args.lengths:
            found["rows"] += measure(model, args, length)
            # written at once, so that an interrupted run keeps what it has
            rows = ",\n".join(json.dumps(row) for row in found["rows"])
            args.output.write_text(f'{{"about": {json.dumps(found["about"])}, "rows": [\n{rows}\n]}}\n')
    report(args.output)


if __name__ == "__main__":
    main()
