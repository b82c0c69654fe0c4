"""The papers' findings as runs of `peers.py`: which methods run on which tasks, and where the results go.

    python benchmarks/quality/studies.py peers precisions --model smollm2

An interrupted study continues where it stopped. docs/quality.md is built from these folders.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import peers

RESULTS = Path(__file__).resolve().parents[1] / "results" / "quality"


@dataclass(frozen=True)
class Study:
    """One question.

    Attributes:
        methods, tasks: arguments of the command-line options with these names.
        documents: number of documents; None uses the task's default.
        length: tokens of a prompt; None uses the task's default.
        max_new_tokens: tokens to generate; None uses the task's default.
    """

    methods: tuple[str, ...]
    tasks: str = "dictionary,text"
    documents: int | None = None
    length: int | None = None
    max_new_tokens: int | None = None


# keys and values as in the model, and rotated with keys centred
PLAIN, TURNED = "rotate=false+center=false+sinks=0", "rotate=true+center=true+sinks=0"
# the paper's two levels, rotated and centred, with exact first tokens
LEVELS = "K8V4/K4V2+1/0"
# the presets without measured heads
ALIKE = "head_precisions=null"
PRESETS = ("diffkv:quality", "diffkv:balanced", "diffkv:small")
STUDIES = {
    # accuracy against memory, with existing alternatives (figure 11; LeanKV's figures)
    "peers": Study(
        (
            "dense",
            "diffkv:paper",
            "diffkv:paper+K8V8",
            "diffkv:paper+K8V4",
            "diffkv:paper+3/0",
            "diffkv:paper+K4V2g2/4",
            "diffkv:paper+K4V4",
            "diffkv:paper+K4V2",
            "diffkv:paper+observation_window=64",
            "quanto:4",
            "hqq:4",
            "fp8",
            "quanto:2",
            "hqq:2",
            "kvpress:snapkv+0.57",
            "kvpress:snapkv+0.71",
            "kvpress:adakv-snapkv+0.57",
            "kvpress:adakv-snapkv+0.71",
            "kvpress:expected-attention+0.71",
            "kvpress:streaming-llm+0.71",
            "kvpress:keydiff+0.71",
            "kvpress:tova+0.71",
        )
    ),
    # what `DiffKVConfig.preset` gives, alongside the paper, the default and the nearest peer
    "presets": Study(
        (
            "dense",
            "diffkv:quality",
            "diffkv:balanced+K6V4",
            "diffkv:paper",
            f"diffkv:{LEVELS}",
            "diffkv:balanced",
            "diffkv:balanced+adaptive_rounding=false",
            "diffkv:balanced+K4V4g2/1",
            "diffkv:balanced+K4V4",
            "diffkv:balanced+K5V3",
            "diffkv:small",
            "diffkv:small+adaptive_rounding=false",
            "diffkv:small+K4V3",
            "quanto:4",
        )
    ),
    # the whole offline suite for the methods that a user chooses between
    "offline": Study(
        (
            "dense",
            "diffkv:paper",
            "diffkv:paper+K8V4",
            "diffkv:paper+1/0.02",
            *PRESETS,
            "quanto:4",
            "hqq:4",
            "quanto:2",
        ),
        tasks="offline",
    ),
    # a precision for every head, compared with equal bits for all and existing alternatives
    "heads": Study(
        (
            "dense",
            "diffkv",
            "diffkv:small",
            f"diffkv:balanced+{ALIKE}",
            f"diffkv:small+{ALIKE}",
            "diffkv:quality",
            "quanto:4",
            "hqq:4",
            "fp8",
        ),
        tasks="offline",
    ),
    # the same on a larger model, with llama.cpp's caches, compared with their own f16, and the effect of the model's
    # dtype (run it with --model qwen2.5-coder-0.5b, after `make llama-cpp`, `make kvpress` and `make models GGUF=1`)
    "qwen": Study(
        (
            "dense",
            "dense:float32",
            "diffkv",
            "diffkv:small",
            "diffkv:target_ratio=0.18",
            "diffkv:target_ratio=0.15",
            f"diffkv:balanced+{ALIKE}",
            f"diffkv:small+{ALIKE}",
            "quanto:4",
            "hqq:4",
            "fp8",
            *(f"llama-cpp:{types}" for types in ("f16", "q8_0", "q5_0", "q4_0")),
            *(f"kvpress:{press}+0.74" for press in ("snapkv", "adakv-snapkv", "streaming-llm")),
        ),
    ),
    # the same model, asked in the way that methods that drop tokens expect
    "qwen-asked": Study(
        (
            "dense",
            "diffkv",
            "diffkv:small",
            *(f"kvpress:{press}+0.74+window_size=16" for press in ("snapkv", "adakv-snapkv")),
            "kvpress:streaming-llm+0.74",
        ),
        tasks="city-asked,dictionary-asked",
        documents=8,
        length=800,
    ),
    # whether text loses more after a longer context, alongside the effect of the model's dtype (run them with --model
    # qwen2.5-coder-0.5b); further on, Python's reference repeats itself, and nothing is lost
    **{
        f"text-{length // 1024}k": Study(
            ("dense", "dense:float32", "diffkv", "diffkv:small", f"diffkv:balanced+{ALIKE}", "quanto:4"),
            tasks="text",
            documents=1,
            length=length,
        )
        for length in (2048, 8192)
    },
    # the same on a model with few compressed layers (run it with --model gemma3-270m)
    "heads_alone": Study(
        ("dense", "diffkv", "diffkv:small", f"diffkv:balanced+{ALIKE}", f"diffkv:small+{ALIKE}"), documents=2
    ),
    # what methods that drop tokens are made for: prompts that end with the question, for answers of one word, a few and
    # forty; with 800 tokens, in which a small model finds more
    "asked": Study(
        (
            "dense",
            "diffkv",
            "diffkv:small",
            "quanto:4",
            "kvpress:snapkv+0.57",
            # the question and little else
            "kvpress:snapkv+0.57+window_size=16",
            "kvpress:snapkv+0.71+window_size=16",
            "kvpress:adakv-snapkv+0.71+window_size=16",
        ),
        tasks="city-asked,dictionary-asked,passage-asked",
        documents=24,
        length=800,
    ),
    # keys need more bits than values (figure 8)
    "precisions": Study(
        (
            "dense",
            *(
                f"diffkv:paper+{name}"
                for name in ("K8V8", "K8V4", "K4V8", "K8V2", "K2V8", "K4V4", "K4V2", "K2V4", "K4V1")
            ),
        )
    ),
    # a token count that varies by head and request against one budget for all (figure 9), in the model's dtype
    "pruning": Study(
        (
            "dense",
            *(f"diffkv:lossless+{alpha}/{alpha}" for alpha in (0.05, 0.1, 0.2, 0.4)),
        )
    ),
    # thresholds (figure 10)
    "thresholds": Study(
        (
            "dense",
            *(f"diffkv:paper+{alpha}/0" for alpha in (0, 0.5, 1, 2, 3, 5)),
            *(f"diffkv:paper+1/{alpha}" for alpha in (0.02, 0.05, 0.1)),
        )
    ),
    # a model with channels of large magnitude (run it with --model gemma3-270m)
    "outliers": Study(
        (
            "dense",
            "diffkv:paper",
            *(f"diffkv:{form}+{name}" for form in (PLAIN, TURNED) for name in ("K8V4", "K4V4", "K4V2")),
            f"diffkv:{TURNED}+1/0",
            f"diffkv:{TURNED}+K5V3",
            f"share:{TURNED}",
            "quanto:4",
            *PRESETS,
            "diffkv:balanced+K6V4",
            "diffkv:balanced+adaptive_rounding=false",
            "diffkv:balanced+K4V4",
            "diffkv:small+adaptive_rounding=false",
            "diffkv:small+K4V3",
            "diffkv:small+K4V2",
        ),
        tasks="text",
    ),
    # whether losses accumulate while a model generates
    "long": Study(("dense", "diffkv:paper", *PRESETS), tasks="trajectory", max_new_tokens=2000),
    # ways to choose high tokens, and levels, with the same two precisions
    "levels": Study(
        (
            "dense",
            "diffkv:paper",
            "leankv:high_cut=0.05",
            "leankv:high_cut=0.2",
            f"diffkv:{TURNED}+1/0",
            f"diffkv:{TURNED}+K4V2",
        )
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("studies", nargs="+", choices=sorted(STUDIES))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--output", type=Path, default=RESULTS, help="default: %(default)s")
    options = parser.parse_args()
    for name in options.studies:
        study = STUDIES[name]
        arguments = ["--model", options.model, "--methods", ",".join(study.methods), "--tasks", study.tasks]
        for option in ("documents", "length", "max_new_tokens"):
            value = getattr(study, option)
            arguments += [] if value is None else [f"--{option.replace('_', '-')}", str(value)]
        code = peers.main([*arguments, "--output", str(options.output / options.model / name)])
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
