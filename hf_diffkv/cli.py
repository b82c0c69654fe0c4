"""The `hf-diffkv` command: generate with a DiffKV cache beside a dense one, and show what the compression did."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import platform
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from .agreement import Agreement
from .calibration import command as calibration
from .chat import chat_turns
from .compare import DIFFKV, DYNAMIC, Job, Run, RunError, run_in_fresh_process
from .config import DiffKVConfig, Precision
from .evaluation import command as evaluation
from .evaluation.errors import EvaluationError
from .evaluation.models import resolve_model

DTYPES = ("auto", "float32", "bfloat16", "float16")
VERSIONED = ("hf-diffkv", "torch", "transformers", "accelerate", "triton", "safetensors", "numpy")
USAGE_ERROR = 2
INTERRUPTED = 130


class CliError(Exception):
    """Something the user can put right; the message is all they need to see."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except (CliError, RunError, EvaluationError) as error:
        print(f"hf-diffkv: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print("\nhf-diffkv: interrupted.", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-diffkv", description="DiffKV caches for Transformers models.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    generate = commands.add_parser(
        "generate",
        help="generate with DiffKV and with a dense cache, and compare",
        description="Streams what the model writes with a DiffKV cache, then compares memory, speed and text with "
        "Transformers' DynamicCache. Each cache runs in a process of its own.",
    )
    generate.set_defaults(run=_generate)
    add = generate.add_argument
    add("--model", default="tiny-lm", help="Hub id, folder, or short name (default: the checkout's %(default)s)")
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT")
    prompt.add_argument("--prompt-file", metavar="FILE", type=Path, help="UTF-8; one newline at its end is dropped")
    add("--then", metavar="TEXT", action="append", default=[], help="a further turn on the same cache; repeatable")
    add("--chat", action="store_true", help="the prompt and each --then are messages, set by the model's chat template")
    add("--max-new-tokens", metavar="N", type=int, default=64, help="per turn (default: %(default)s)")
    add("--alpha-high", metavar="X", type=float, help="tokens with X times the average significance stay at --high")
    add("--alpha-low", metavar="X", type=float, help="tokens below X times the average are pruned; 0 prunes nothing")
    add("--window", metavar="N", type=int, help="newest tokens kept uncompressed (default: 64)")
    add("--high", metavar="KxVy", help="bits of keys and values of important tokens (1 to 6, 8, 16), for example K8V4")
    add("--low", metavar="KxVy", help="bits of keys and values of the others, for example K4V2")
    add("--dtype", choices=DTYPES, default="auto", help="of the model (default: as it was saved)")
    add("--device", help="for example cpu or cuda:0 (default: cuda where there is one)")
    add("--sample", action="store_true", help="draw tokens at random instead of taking the likeliest")
    add("--seed", metavar="N", type=int, default=0, help="of --sample (default: %(default)s)")
    add("--output", metavar="FOLDER", type=Path, default=Path("demo_output"), help="default: %(default)s")
    evaluation.add_command(commands)
    calibration.add_command(commands)
    _add_lm_eval(commands)
    env = commands.add_parser("env", help="print versions, for a bug report")
    env.set_defaults(run=_env)
    return parser


def _add_lm_eval(commands: Any) -> None:
    # a prefix that no argument begins with: all of them, options too, are the harness's
    parser = commands.add_parser(
        "lm-eval",
        help="lm-evaluation-harness with the model hf-diffkv: --model hf-diffkv --model_args pretrained=M,cache=C ...",
        add_help=False,
        prefix_chars="\0",
    )
    parser.add_argument("arguments", nargs="*")
    parser.set_defaults(run=_lm_eval)


def _lm_eval(options: argparse.Namespace) -> int:
    from .evaluation import lm_eval

    return lm_eval.run(options)


def _generate(options: argparse.Namespace) -> int:
    diffkv, dynamic = _jobs(options)
    output = _make_folder(options.output)
    picture, figures = output / "levels.png", output / "figures.json"
    picture.unlink(missing_ok=True)
    _progress(f"[1/2] {DIFFKV}: loading {diffkv.model}")
    print(f"... {diffkv.turns[0][-60:]}", end="\n" if diffkv.chat else "", flush=True)
    compressed = run_in_fresh_process(dataclasses.replace(diffkv, picture=str(picture)))
    if not compressed.text.endswith("\n"):
        print(flush=True)
    _progress(f"[2/2] {DYNAMIC}, for comparison")
    dense = run_in_fresh_process(dynamic)
    agreement = Agreement.of(compressed.generated, dense.generated)
    print(comparison_table(compressed, dense, agreement))
    figures.write_text(json.dumps(_figures(diffkv, compressed, dense, agreement), indent=2) + "\n")
    if compressed.note:
        _progress(compressed.note)
    written = [str(path) for path in (picture, figures) if path.exists()]
    print(f"\nWrote {' and '.join(written)}.")
    return 0


def _jobs(options: argparse.Namespace) -> tuple[Job, Job]:
    """Checks everything that can be checked without loading the model; the DiffKV job and the dense one."""
    if options.max_new_tokens < 1:
        raise CliError(f"--max-new-tokens {options.max_new_tokens}: there is nothing to generate; give at least 1.")
    model = _model_name(options.model)
    turns = [_prompt(options), *options.then]
    if not all(turns):
        raise CliError("the prompt or a --then is empty; there is nothing to continue.")
    config = _diffkv_config(options, model)
    device = _device(options.device)
    _check_length(model, turns, options.chat, options.max_new_tokens)
    job = Job(
        cache=DIFFKV,
        model=model,
        turns=turns,
        max_new_tokens=options.max_new_tokens,
        config=config.to_dict(),
        dtype=options.dtype,
        device=device,
        seed=options.seed,
        sample=options.sample,
        chat=options.chat,
        stream=True,
    )
    return job, dataclasses.replace(job, cache=DYNAMIC, stream=False)


def _model_name(given: str) -> str:
    try:
        return resolve_model(given)
    except ValueError as error:
        raise CliError(f"--model {given}: {error}") from error


def _prompt(options: argparse.Namespace) -> str:
    if options.prompt is not None:
        return options.prompt
    try:
        return options.prompt_file.read_text(encoding="utf-8").removesuffix("\n")
    except OSError as error:
        raise CliError(f"cannot read {options.prompt_file}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise CliError(f"{options.prompt_file} is not UTF-8 text.") from error


def _diffkv_config(options: argparse.Namespace, model: str) -> DiffKVConfig:
    fields = {name: getattr(options, name) for name in ("alpha_high", "alpha_low", "window")}
    fields |= {name: _precision(name, getattr(options, name)) for name in ("high", "low")}
    try:
        return DiffKVConfig.for_model(model, **{name: value for name, value in fields.items() if value is not None})
    except ValueError as error:
        raise CliError(str(error)) from error


def _precision(name: str, text: str | None) -> Precision | None:
    if text is None:
        return None
    match = re.fullmatch(r"K(\d+)V(\d+)", text, re.IGNORECASE)
    if match is None:
        raise CliError(f"--{name} {text} is not a precision; write K, its bits, V, its bits, for example K8V4.")
    try:
        return Precision(int(match[1]), int(match[2]))
    except ValueError as error:
        raise CliError(f"--{name} {text}: {error}") from error


def _device(given: str | None) -> str:
    if given is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=given).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise CliError(f"--device {given} cannot be used: {str(error).splitlines()[0]}") from error
    return given


def _check_length(model: str, turns: list[str], chat: bool, max_new_tokens: int) -> None:
    try:
        tokenizer, config = AutoTokenizer.from_pretrained(model), AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise CliError(f"cannot load the model {model}: {' '.join(str(error).split())}") from error
    try:
        turns = chat_turns(tokenizer, turns) if chat else turns
    except ValueError as error:
        raise CliError(f"--chat cannot be used with {model}: {error}") from error
    counts = [len(tokenizer(turn, add_special_tokens=not chat and i == 0).input_ids) for i, turn in enumerate(turns)]
    if not counts[0]:
        raise CliError("the prompt has no tokens; there is nothing to continue.")
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    needed = sum(counts) + len(turns) * max_new_tokens
    if limit is not None and needed > limit:
        raise CliError(
            f"the text has {sum(counts)} tokens and {len(turns) * max_new_tokens} are to be generated, but the model's "
            f"max_position_embeddings is {limit}; shorten the prompt or lower --max-new-tokens."
        )


def _make_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # found out now and not when all has been generated
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise CliError(f"cannot write to {folder}: {error.strerror}.") from error
    return folder


def _progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def comparison_table(compressed: Run, dense: Run, agreement: Agreement) -> str:
    """What the user reads at the end."""
    ratio = f"{compressed.cache_bytes / dense.cache_bytes:.1%}"
    payload = f"{compressed.payload_bytes / dense.cache_bytes:.1%}"
    rows = [
        ("", DYNAMIC, DIFFKV, f"{DIFFKV} / dense"),
        ("cache, real bytes", _megabytes(dense.cache_bytes), _megabytes(compressed.cache_bytes), ratio),
        ("cache, payload only", _megabytes(dense.cache_bytes), _megabytes(compressed.payload_bytes), payload),
        ("peak memory", _megabytes(dense.peak_bytes), _megabytes(compressed.peak_bytes), ""),
        ("  above the model", _megabytes(dense.above_model_bytes), _megabytes(compressed.above_model_bytes), ""),
        ("prompt", f"{dense.prompt_seconds:.2f} s", f"{compressed.prompt_seconds:.2f} s", ""),
        ("decoding", _rate(dense.tokens_per_second), _rate(compressed.tokens_per_second), ""),
    ]
    lines = [f"{name:<21}{a:>14}{b:>14}{c:>16}".rstrip() for name, a, b, c in rows]
    total = max(1, sum(compressed.levels.values()))
    levels = ", ".join(f"{name} {count:,} ({count / total:.0%})" for name, count in compressed.levels.items())
    return "\n".join(
        [
            "",
            *lines,
            "",
            f"Tokens per level, over all layers and KV heads: {levels}.",
            _agreement_text(agreement, dense),
            f"Peak memory: {compressed.peak_source}, a process of its own for each cache.",
        ]
    )


def _agreement_text(agreement: Agreement, dense: Run) -> str:
    if agreement.equal == agreement.tokens:
        return f"Both caches wrote the same {agreement.tokens} tokens."
    return (
        f"{agreement.equal} of {agreement.tokens} tokens are equal ({agreement.equal / agreement.tokens:.0%}), the "
        f"first {agreement.until_difference} without a difference. {DYNAMIC} wrote:\n{dense.text}"
    )


def _megabytes(count: int | None) -> str:
    return "unknown" if count is None else f"{count / 1e6:,.2f} MB"


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1f} tok/s"


def _figures(job: Job, compressed: Run, dense: Run, agreement: Agreement) -> dict[str, Any]:
    return {
        "config": job.config,
        "model": job.model,
        "dtype": job.dtype,
        "device": job.device,
        "seed": job.seed if job.sample else None,
        "max_new_tokens": job.max_new_tokens,
        "runs": {run.cache: dataclasses.asdict(run) for run in (dense, compressed)},
        "agreement": dataclasses.asdict(agreement),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Versions of everything that can matter in a bug report."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in VERSIONED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    # the wheel's metadata may leave out the build, such as +cu130
    found["torch"] = str(torch.__version__)
    if found["hf-diffkv"] == "not installed":
        from . import __version__

        found["hf-diffkv"] = f"{__version__} (not installed)"
    return found


def _env(options: argparse.Namespace) -> int:
    lines = versions()
    for index in range(torch.cuda.device_count()):
        lines[f"cuda:{index}"] = torch.cuda.get_device_name(index)
    from .native.library import instructions

    lines["native code"] = instructions() or (
        "not built: decoding on CPUs runs in PyTorch; reinstall with a C++ compiler, or from a wheel"
    )
    lines["threads"] = str(torch.get_num_threads())
    for name, value in lines.items():
        print(f"{name}: {value}")
    return 0
