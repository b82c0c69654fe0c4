"""Checks whether two versions of the library produce the same caches, byte for byte.

    PYTHONPATH=OLD python tools/compare_caches.py write FOLDER
    PYTHONPATH=NEW python tools/compare_caches.py compare FOLDER

`write` generates with tiny random models, and with SmolLM2 if it was fetched, under many configurations, backends and
uses of a cache. For each it keeps the saved cache, the ids and logits, and what the public API reports about every
stored token. `compare` repeats this and names what differs. Both need the same machine, PyTorch, Triton and
Transformers, since models compute in floating point. `--only` selects cases by part of their name.

`samples` writes a few small caches with the tokens they hold, for tests/data/saved_caches.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

# read when Triton is first imported
os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

import hf_diffkv
from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.compat import passing
from hf_diffkv.ops.backend import use_backend

VOCABULARY = 128
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
SLIDING = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 80, "num_key_value_heads": 4},
    "gemma3_text": {**SLIDING, "query_pre_attn_scalar": 16},
    "gpt_oss": {**SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2},
}
SMOLLM2 = Path(__file__).parents[1] / "build/models/smollm2"
# from the paper's experiments: two levels, and pruned tokens
PAPER = {"alpha_high": 1.0, "alpha_low": 0.5, "window": 16}


@functools.cache
def model_of(name: str, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    """A random model whose attention is far from uniform; `options` go to its configuration."""
    if name == "smollm2":
        return AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=dtype, attn_implementation="diffkv").eval()
    config = CONFIG_MAPPING[name](**{**COMMON, **MODELS[name], **options})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="diffkv", dtype=dtype).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for path, parameter in sorted(model.named_parameters()):
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.ndim >= 2:
                sharper = 2.0 if "q_proj" in path or "k_proj" in path else 1.0
                parameter.copy_(values * sharper / parameter.shape[-1] ** 0.5)
            elif "sinks" in path:
                parameter.copy_(values)
    return model


def ids_of(lengths: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Left-padded random ids and their mask, each int64 [len(lengths), max(lengths)]."""
    longest = max(lengths)
    ids = torch.randint(3, VOCABULARY, (len(lengths), longest), generator=torch.Generator().manual_seed(seed))
    mask = (torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]).long()
    return ids * mask, mask


class Talk:
    """A model, a cache, and the ids and mask given to the cache; `found` collects ids and logits."""

    def __init__(self, model: PreTrainedModel, kv_cache: DiffKVCache, lengths: tuple[int, ...]) -> None:
        self.model, self.cache = model, kv_cache
        self.ids, self.mask = ids_of(lengths)
        self.found: list[Tensor] = []

    def generate(self, new: int, **options: Any) -> None:
        torch.manual_seed(3)
        output = self.model.generate(
            self.ids,
            attention_mask=self.mask,
            **passing(self.cache),
            max_new_tokens=new,
            **{"do_sample": False, **options},
            return_dict_in_generate=True,
            output_logits=True,
        )
        self.found += [output.sequences, *(logits.float() for logits in output.logits or ())]
        grown = output.sequences.shape[1] - self.ids.shape[1]
        self.ids, self.mask = output.sequences, torch.nn.functional.pad(self.mask, (0, grown), value=1)

    def say(self, lengths: tuple[int, ...], seed: int) -> None:
        """Adds the next turn's tokens, left-padded to the longest."""
        ids, mask = ids_of(lengths, seed)
        self.ids, self.mask = torch.cat([self.ids, ids], 1), torch.cat([self.mask, mask], 1)

    def other(self, kv_cache: DiffKVCache) -> Talk:
        """Returns a copy of the conversation so far that continues with `kv_cache`."""
        twin = copy.copy(self)
        twin.cache = kv_cache
        return twin


def once(talk: Talk, new: int) -> None:
    talk.generate(new)


def turns(talk: Talk, new: int) -> None:
    batch = talk.ids.shape[0]
    for seed, lengths in enumerate([(9, 5, 1), (1, 1, 1), (30, 2, 17)], start=5):
        talk.generate(new // 3)
        talk.say(lengths[:batch], seed)
    talk.generate(new // 3)


def chunks(talk: Talk, new: int) -> None:
    talk.generate(new, prefill_chunk_size=32)


def beams(talk: Talk, new: int) -> None:
    talk.generate(new, num_beams=3)


def assisted(talk: Talk, new: int) -> None:
    talk.generate(new, prompt_lookup_num_tokens=3)


def cropped(talk: Talk, new: int) -> None:
    talk.generate(2)
    talk.cache.activate_past_recording()
    for seed in range(4):
        held = talk.cache.get_seq_length()
        more = talk.ids[:, held:]
        more = torch.cat([more, ids_of((6,), seed)[0]], 1)
        with torch.no_grad():
            talk.found.append(talk.model(more, **passing(talk.cache)).logits.float())
        talk.cache.crop(-3)
        talk.ids = torch.cat([talk.ids[:, :held], more[:, :-3]], 1)
    talk.mask = torch.ones_like(talk.ids)


def forked(talk: Talk, new: int) -> None:
    talk.generate(new // 2)
    for seed, kv_cache in enumerate(talk.cache.fork(2), start=7):
        twin = talk.other(kv_cache)
        twin.say((4,) * twin.ids.shape[0], seed)
        twin.generate(new // 2)
    talk.cache = kv_cache


def reordered(talk: Talk, new: int) -> None:
    talk.generate(new // 2)
    index = torch.tensor([2, 0, 2])
    talk.cache.reorder_cache(index)
    talk.ids, talk.mask = talk.ids[index], talk.mask[index]
    talk.generate(new // 2)
    talk.cache.batch_select_indices(torch.tensor([1, 2]))
    talk.ids, talk.mask = talk.ids[1:], talk.mask[1:]
    talk.generate(new // 2)


def loaded(talk: Talk, new: int) -> None:
    talk.generate(new // 2)
    with tempfile.TemporaryDirectory() as folder:
        talk.cache.save_pretrained(folder, talk.model)
        talk.cache = DiffKVCache.from_pretrained(folder, talk.model)
    talk.generate(new // 2)


def served(talk: Talk, new: int) -> None:
    """Continuous batching, during which this conversation's own cache stays empty."""
    prompts = [ids_of((length,), length)[0][0].tolist() for length in (5, 90, 40, 1, 64)]
    fields = {**talk.cache.config.to_dict(), "max_bytes": 64 << 20}
    options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    config = GenerationConfig(cache_implementation="diffkv", cache_config=fields, **options)
    batching = transformers.ContinuousBatchingConfig(max_batch_tokens=64)
    outputs = talk.model.generate_batch(prompts, config, batching, progress_bar=False)
    talk.found += [torch.tensor(output.generated_tokens) for output in outputs.values()]


RAGGED = (70, 40, 9)
# bytes that fill a cache, in float32 and bfloat16
BUDGETS = {
    once: (40_000, 30_000),
    turns: (100_000, 60_000),
    chunks: (100_000, 60_000),
    beams: (300_000, 190_000),
    assisted: (225_000, 120_000),
    forked: (45_000, 32_000),
    reordered: (100_000, 60_000),
}


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    config: Callable[[], DiffKVConfig]
    model: str = "llama"
    dtype: torch.dtype = torch.float32
    use: Callable[[Talk, int], None] = once
    lengths: tuple[int, ...] = (90,)
    new: int = 24
    backend: str | None = None

    def run(self, folder: Path) -> dict[str, Any]:
        """Builds the cache, saves it into `folder`, and returns digests of everything observed."""
        torch.manual_seed(0)
        model = model_of(self.model, self.dtype)
        talk = Talk(model, DiffKVCache(model.config, self.config()), self.lengths)
        with use_backend(self.backend) if self.backend else nullcontext():
            self.use(talk, self.new)
            seen = {f"output {index}": _digest(tensor) for index, tensor in enumerate(talk.found)}
            if talk.cache.get_seq_length():
                talk.cache.check_integrity()
                talk.cache.crop(0)
                seen |= _contents(talk.cache)
                talk.cache.save_pretrained(folder, model)
        for path in sorted(folder.glob("*")):
            seen[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
            if path.suffix == ".safetensors":
                seen |= {f"{path.name} {name}": _digest(tensor) for name, tensor in load_file(path).items()}
        return seen


def _contents(kv_cache: DiffKVCache) -> dict[str, str]:
    """Digests of what the public API reports about every stored token."""
    seen = {"tokens": str(kv_cache.memory().tokens)}
    for layer_idx in kv_cache.compressed_layers():
        keys, values, stored = kv_cache.dequantize(layer_idx)
        found = {"keys": keys, "values": values, "stored": stored, "levels": kv_cache.levels(layer_idx)}
        if kv_cache.config.selects:
            found["significance"] = kv_cache.significance(layer_idx)
        seen |= {f"layer {layer_idx} {name}": _digest(tensor) for name, tensor in found.items()}
    return seen


def _digest(tensor: Tensor) -> str:
    raw = tensor.detach().contiguous()
    head = f"{raw.dtype} {list(raw.shape)}".encode()
    return hashlib.sha256(head + raw.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def configurations() -> dict[str, Callable[[], DiffKVConfig]]:
    """Returns a factory for each configuration by name, so that it is built only when its case runs."""
    paper, preset = DiffKVConfig.paper, DiffKVConfig.preset
    made: dict[str, Callable[[], DiffKVConfig]] = {
        "default": lambda: DiffKVConfig(alpha_high=1.0),
        "paper": lambda: paper(**PAPER),
        "paper in groups": lambda: paper(high="K8V4g1/2", low="K4V2g2/4", **PAPER),
        "lossless": lambda: DiffKVConfig.lossless(window=8),
        "without sinks": lambda: DiffKVConfig(sinks=0, **PAPER),
        "many sinks": lambda: DiffKVConfig(sinks=20, **PAPER),
        "neither rotated nor centred": lambda: DiffKVConfig(rotate=False, center=False, **PAPER),
        "narrow": lambda: DiffKVConfig(metadata_bits=16, **PAPER),
        "narrow, rounded": lambda: DiffKVConfig("K6V4", "K3V2", metadata_bits=16, adaptive_rounding=True, **PAPER),
        "small pages": lambda: DiffKVConfig(page_bytes=1024, **PAPER),
        "observed": lambda: DiffKVConfig(observation_window=16, **PAPER),
        "thresholds per layer and head": lambda: paper(
            alpha_high=[[1.0, 1.5], [0.8, 1.2]], alpha_low=[0.4, 0.6], window=8
        ),
    }
    for name in ("quality", "balanced", "small"):
        made[name] = lambda name=name: preset(name)
    for name in ("K8V8", "K5V3", "K4V3g2/1", "K4V2", "K2V1", "K1V2", "K16V8", "K3V16"):
        made[name] = lambda name=name: paper(high=name, low=name, alpha_high=0.0, window=8)
    for high, low in (("K8V8", "K4V4"), ("K16V16", "K8V4"), ("K6V5", "K3V1"), ("K4V2", "K2V2")):
        made[f"{high} and {low}"] = lambda high=high, low=low: DiffKVConfig(high, low, **PAPER)
    cuts = {"high_cut": 0.3, "low_cut": 0.1}
    made["leankv"] = lambda: DiffKVConfig(policy="leankv", policy_options=cuts, window=16)
    made["leankv, narrow"] = lambda: DiffKVConfig(policy="leankv", policy_options=cuts, metadata_bits=16, window=16)
    return made


def within(max_bytes: int) -> Callable[[], DiffKVConfig]:
    return lambda: DiffKVConfig(max_bytes=max_bytes, page_bytes=1024, **PAPER)


def cases() -> Iterator[Case]:
    made = configurations()
    for use, rooms in BUDGETS.items():
        name, lengths = f"max_bytes, {use.__name__}", RAGGED if use in (turns, chunks, beams, reordered) else (90,)
        for dtype, room in zip((torch.float32, torch.bfloat16), rooms):
            yield Case(f"{name}, {dtype}", within(room), dtype=dtype, lengths=lengths, use=use)
    for name, config in made.items():
        yield Case(name, config)
        yield Case(f"{name}, batch in bfloat16", config, dtype=torch.bfloat16, lengths=RAGGED, use=turns)
    for name in ("paper", "default", "narrow", "balanced", "K4V3g2/1", "lossless"):
        for model in list(MODELS)[1:]:
            yield Case(f"{name}, {model}", made[name], model, lengths=RAGGED, use=turns)
            yield Case(f"{name}, {model} in bfloat16", made[name], model, dtype=torch.bfloat16)
        for backend in ("reference", "native"):
            yield Case(f"{name}, {backend}", made[name], lengths=RAGGED, use=turns, backend=backend)
        yield Case(f"{name}, float64", made[name], dtype=torch.float64, lengths=RAGGED)
    for name in ("paper", "narrow, rounded", "balanced", "leankv"):
        for use in (chunks, beams, assisted, cropped, forked, reordered, loaded):
            lengths = (40,) if use in (assisted, cropped) else RAGGED
            yield Case(f"{name}, {use.__name__}", made[name], lengths=lengths, use=use)
    for name in ("default", "lossless", "balanced"):
        yield Case(f"{name}, served", made[name], use=served)
    for name in (
        "paper",
        "paper in groups",
        "narrow, rounded",
        "balanced",
        "K8V8",
        "K5V3",
        "leankv",
        "lossless",
    ):
        yield Case(f"{name}, kernels", made[name], lengths=(30, 9), new=3, use=turns, backend="kernels")
        yield Case(f"{name}, kernels in bfloat16", made[name], "qwen3", torch.bfloat16, once, (40,), 3, "kernels")
    yield Case("paper, kernels, gemma3_text", made["paper"], "gemma3_text", lengths=(40, 9), new=4, backend="kernels")
    yield Case("paper, kernels, gpt_oss", made["paper"], "gpt_oss", lengths=(40, 9), new=4, backend="kernels")
    if SMOLLM2.is_dir():
        for name in ("quality", "balanced", "small", "paper", "lossless", "leankv"):
            yield Case(f"{name}, SmolLM2", made[name], "smollm2", torch.bfloat16, lengths=(300,), new=8)


def write_samples(folder: Path) -> None:
    """Saves a few small caches, each with its model's configuration and the tokens it holds."""
    few = {"window": 4, "sinks": 2, "page_bytes": 256}
    levels = {"alpha_high": 1.0, "alpha_low": 0.5}
    paper = functools.partial(DiffKVConfig.paper, window=4, page_bytes=256)
    policy = {"policy": "leankv", "policy_options": {"high_cut": 0.3, "low_cut": 0.1}}
    samples: dict[str, tuple[str, torch.dtype, DiffKVConfig]] = {
        "paper": ("llama", torch.float32, paper(**levels)),
        "groups": ("llama", torch.bfloat16, paper(high="K8V4g1/2", low="K4V2g2/4", **levels)),
        "narrow_rounded": (
            "llama",
            torch.bfloat16,
            DiffKVConfig("K6V4", "K3V2", metadata_bits=16, adaptive_rounding=True, **few, **levels),
        ),
        "balanced": ("qwen3", torch.bfloat16, DiffKVConfig.preset("balanced", **few)),
        "lossless_beside_sliding": ("gemma3_text", torch.bfloat16, DiffKVConfig.lossless(window=4, page_bytes=256)),
        "leankv_with_model_sinks": ("gpt_oss", torch.float32, DiffKVConfig("K5V3", "K2V1", **policy, **few)),
    }
    for name, (model_name, dtype, config) in samples.items():
        model = model_of(model_name, dtype, head_dim=16, num_attention_heads=2, num_key_value_heads=1)
        talk = Talk(model, DiffKVCache(model.config, config), (30, 11))
        turns(talk, 6)
        talk.cache.save_pretrained(folder / name, model)
        model.config.save_pretrained(folder / name)
        save_file(_stored_tokens(talk.cache), folder / name / "tokens.safetensors")
        print(f"{name}: {talk.cache.memory().tokens}")


def _stored_tokens(kv_cache: DiffKVCache) -> dict[str, Tensor]:
    """Returns, by layer, the levels of all tokens and the keys, values and significance of the stored ones."""
    found: dict[str, Tensor] = {}
    for layer_idx in kv_cache.compressed_layers():
        keys, values, stored = kv_cache.dequantize(layer_idx)
        found[f"{layer_idx}.levels"] = kv_cache.levels(layer_idx).contiguous()
        found |= {f"{layer_idx}.keys": keys[stored], f"{layer_idx}.values": values[stored]}
        if kv_cache.config.selects:
            found[f"{layer_idx}.significance"] = kv_cache.significance(layer_idx)[stored]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["write", "compare", "samples"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="a part of the names of the cases")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    print(f"hf_diffkv of {Path(hf_diffkv.__file__).parent}", flush=True)
    if options.command == "samples":
        return write_samples(options.folder)
    chosen = [case for case in cases() if options.only in case.name]
    bad = sum(_done(case, options.command, options.folder) for case in chosen)
    print(f"{len(chosen)} cases, {bad} {'differ' if options.command == 'compare' else 'failed'}")
    sys.exit(bool(bad))


def _done(case: Case, command: str, folder: Path) -> bool:
    """Returns whether the case failed or differs from what was written."""
    start = time.perf_counter()
    known = folder / case.name.replace("/", "-")
    with tempfile.TemporaryDirectory() as temporary:
        place = known if command == "write" else Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        for stale in place.glob("*"):
            stale.unlink()
        try:
            seen = case.run(place)
        except Exception as error:
            seen = {"error": f"{type(error).__name__}: {error}"}
    if command == "write":
        (known / "seen.json").write_text(json.dumps(seen, indent=1) + "\n")
        print(f"{case.name}: {len(seen)} ({time.perf_counter() - start:.1f} s) {seen.get('error', '')}", flush=True)
        return "error" in seen
    before = json.loads((known / "seen.json").read_text())
    differing = [name for name in sorted({*before, *seen}) if before.get(name) != seen.get(name)]
    if differing:
        print(f"{case.name}: {', '.join(differing)} {seen.get('error', '')}", flush=True)
    return bool(differing)


if __name__ == "__main__":
    main()
