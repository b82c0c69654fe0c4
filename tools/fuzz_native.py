"""Fuzzes random caches: native code against the PyTorch reference, from the same state at every step.

    python tools/fuzz_native.py [--count 200] [--seed 0]

Shapes, precisions, dtypes, windows, lengths, padding and rotation are drawn from the seed. At every step a copy of the
store runs the reference: levels, keys and values must then agree, and the output must match a float64 softmax over them
(the reference itself rounds rotated queries). A difference is printed with the seed of its cache; `--count 1 --seed N`
reproduces it.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import time

import numpy as np
import torch
from torch import Tensor

from hf_diffkv.config import DiffKVConfig
from hf_diffkv.native import library
from hf_diffkv.ops.backend import NATIVE, REFERENCE, use_backend
from hf_diffkv.ops.softmax import Softmax
from hf_diffkv.precision import SUPPORTED_BITS, Precision
from hf_diffkv.store import KVHeads, PromptAttention, StepAttention, Store, begin_forward, check_integrity, read_tokens
from hf_diffkv.store.read import LayerTokens
from hf_diffkv.store.step import refresh

# relative to the norm of a head's output; half precision has its own rounding and 14 bits for queries and weights
OUTPUT = {torch.float32: 2e-5, torch.bfloat16: 2**-8, torch.float16: 2e-3}
# relative to the largest key or value: one rounding of the window to the neighbouring number
TOKENS = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@dataclasses.dataclass(frozen=True)
class Case:
    """Randomly drawn parameters of one cache."""

    seed: int
    config: DiffKVConfig
    dtype: torch.dtype
    batch: int
    heads: int
    group: int
    dims: tuple[int, int]
    prompt: int
    steps: int
    instructions: str

    @classmethod
    def draw(cls, seed: int, sets: list[str]) -> Case:
        random = np.random.default_rng(seed)

        def choose(*options: object) -> object:
            return options[random.integers(len(options))]

        def precision() -> Precision:
            return Precision(*(int(choose(*SUPPORTED_BITS)) for _ in range(2)), choose(1, 1, 2), choose(1, 1, 2, 4))

        alpha_low, alpha_high = sorted(random.uniform(0, 2, 2))
        # scores exist only with thresholds
        alpha_low, alpha_high = choose((0.0, alpha_high), (alpha_low, alpha_high), (0.0, 0.0))
        low, high = sorted((precision(), precision()), key=lambda p: p.k_bits + p.v_bits)
        config = DiffKVConfig(
            high,
            low,
            alpha_high=float(alpha_high),
            alpha_low=float(alpha_low),
            metadata_bits=int(choose(16, 32)),
            window=int(random.integers(1, 40)),
            rotate=bool(choose(True, False)),
            center=bool(choose(True, False)),
        )
        dim = int(choose(8, 16, 24, 40, 64, 80, 96, 128))
        return cls(
            seed,
            config,
            choose(*OUTPUT),
            batch=int(random.integers(1, 4)),
            heads=int(random.integers(1, 4)),
            group=int(random.integers(1, 6)),
            dims=(dim, choose(dim, dim, 16, 64)),
            prompt=int(random.integers(2, 160)),
            steps=int(random.integers(3, 12)),
            instructions=choose(*sets),
        )


def dense(held: LayerTokens, query: Tensor, scaling: float) -> Tensor:
    """Attention over what a layer holds, in float64 and in the model's channels."""
    group = query.shape[1] // held.keys.shape[1]
    keys, values = (part.double().repeat_interleave(group, 1) for part in (held.keys, held.values))
    hidden = ~held.mask.repeat_interleave(group, 1)[:, :, None]
    return (query.double() @ keys.mT * scaling).masked_fill(hidden, -torch.inf).softmax(-1) @ values


def check(case: Case) -> str | None:
    """Returns a description of the first difference, or None if there is none."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(heads: int, tokens: int, dim: int) -> Tensor:
        return torch.randn(case.batch, heads, tokens, dim, generator=generator)

    def tokens(count: int) -> tuple[Tensor, Tensor, Tensor]:
        query = 2 * normal(case.heads * case.group, count, case.dims[0])
        key = normal(case.heads, count, case.dims[0]) + torch.sin(torch.arange(case.dims[0]))
        return tuple(part.to(case.dtype) for part in (query, key, normal(case.heads, count, case.dims[1])))

    scaling = case.dims[0] ** -0.5
    heads = KVHeads(case.heads, *case.dims, case.dtype, torch.device("cpu"))
    store = Store(case.config, 1, case.batch, heads)
    store.set_thresholds(0, case.config.alpha_high, case.config.alpha_low)
    # padding on the left: every request has at least one real token
    real = torch.randint(1, case.prompt + 1, (case.batch, 1), generator=generator)
    valid = torch.arange(case.prompt) >= case.prompt - real
    with use_backend(REFERENCE):
        begin_forward(store, case.prompt)
        store.padding.append(case.prompt, valid)
        query, *new = tokens(case.prompt)
        PromptAttention(store, 0, *new, valid).attend(query, Softmax(scaling))
    for step in range(case.steps):
        other, (query, *new), outputs = copy.deepcopy(store), tokens(1), {}
        for backend, each in ((NATIVE, store), (REFERENCE, other)):
            with use_backend(backend):
                refresh(each)
                begin_forward(each, 1)
                each.padding.append(1, None)
                outputs[backend] = StepAttention(each, 0, *new).attend(query, Softmax(scaling)).double()
        for each in (store, other):
            # before the compaction that both still have to run
            each.compaction_due = False
        with use_backend(REFERENCE):
            mine, theirs = read_tokens(store, 0), read_tokens(other, 0)
        if not torch.equal(mine.levels, theirs.levels):
            return f"step {step}: {int((mine.levels != theirs.levels).sum())} levels differ"
        for name in ("keys", "values"):
            found, wanted = getattr(mine, name), getattr(theirs, name)
            apart = (found - wanted).abs().max() / wanted.abs().max()
            if not apart <= TOKENS[case.dtype]:
                return f"step {step}: {name} differ by {apart:.2e} of the largest"
        expected = dense(theirs, query, scaling)
        error = ((outputs[NATIVE] - expected).norm(dim=-1) / expected.norm(dim=-1)).max()
        if not error <= OUTPUT[case.dtype]:
            return f"step {step}: outputs differ by {error:.2e} of their norm"
        check_integrity(store)
        store.compaction_due = True
    return None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="caches to draw")
    parser.add_argument("--seed", type=int, default=0, help="of the first; each further one takes the next")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no further one after so long")
    args = parser.parse_args(arguments)
    if library.library() is None:
        raise SystemExit("the native library is not built: make native")
    sets = [name for name in library.INSTRUCTIONS if library.library().diffkv_select(name.encode())]
    library.library().diffkv_select(sets[0].encode())
    failed = passed = 0
    end = time.monotonic() + args.seconds
    for seed in range(args.seed, args.seed + args.count):
        if time.monotonic() > end:
            break
        case = Case.draw(seed, sets)
        with library.use_instructions(case.instructions):
            found = check(case)
        failed, passed = failed + (found is not None), passed + (found is None)
        if found is not None:
            print(f"seed {seed}: {found}\n  {case}", flush=True)
    print(f"{passed} caches agree, {failed} differ", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
