"""`hf-diffkv generate`: generates with a DiffKV cache and compares it with a dense one."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from ..evaluation.errors import EvaluationError
from ..replacing import save_text
from ..running.models import SMALLEST_MODEL, hide_progress_bars, resolve_model
from ..running.saved_talk import read_talk
from .console import Command, Failure, colours, megabytes, paragraph, progress, table, to_terminal
from .env import versions
from .models import load_tokenizer, position_limit, supported_config, usable_device
from .options import (
    PATH_TYPE,
    PROMPT_TYPE,
    AtLeast,
    Between,
    chain,
    choice_of,
    config_before,
    config_options,
    fields_of,
    json_option,
    model_option,
    prompt_options,
    quiet_option,
    read_prompt,
    running_options,
)

if TYPE_CHECKING:
    from ..running.side_by_side import FinishedRun, Job

SAMPLING = ("temperature", "top_p", "top_k")

sampling_options = chain(
    click.option("--sample", is_flag=True, help="Sample tokens instead of taking the likeliest."),
    click.option("--seed", metavar="N", type=int, default=0, help="For --sample."),
    click.option("--temperature", metavar="X", type=Between(min=0, min_open=True), help="For --sample."),
    click.option("--top-p", metavar="X", type=Between(0, 1, min_open=True), help="For --sample."),
    click.option("--top-k", type=AtLeast(), help="For --sample."),
)


def sampling_of(options: SimpleNamespace) -> dict[str, Any]:
    """Returns sampling arguments of `generate()` except `do_sample`. Raises `click.UsageError` without --sample."""
    given = {name: getattr(options, name) for name in SAMPLING if getattr(options, name) is not None}
    if given and not options.sample:
        raise click.UsageError(f"--{next(iter(given)).replace('_', '-')} has no effect without --sample.")
    return given


@click.command(
    "generate",
    cls=Command,
    help="Stream a model's continuation of PROMPT with a DiffKV cache, then compare memory, speed and text with "
    "Transformers' DynamicCache. Each cache runs in its own process. If stdout is not a terminal, it gets only "
    "the generated text, and the comparison goes to stderr.",
    epilog="For example: hf-diffkv generate --example; hf-diffkv generate --model smollm2 --preset small --prompt-file "
    "report.txt. Short prompts save nothing, as the window is uncompressed.",
)
@prompt_options
@click.option("--example", is_flag=True, help="A long document with a question, instead of a PROMPT.")
@model_option(default=SMALLEST_MODEL, show_default=True)
@click.option("--then", type=PROMPT_TYPE, multiple=True, help="A further turn on the same cache; repeatable.")
@click.option(
    "--chat", is_flag=True, help="PROMPT and each --then are messages, formatted with the model's chat template."
)
@click.option("--system", type=PROMPT_TYPE, help="System message for --chat.")
@click.option("--max-new-tokens", type=AtLeast(), default=64, help="Limit per turn.")
@sampling_options
@click.option("--save-cache", type=PATH_TYPE, help="Save the cache and the text for --load-cache.")
@click.option("--load-cache", type=PATH_TYPE, help="Continue from there: PROMPT is the next turn, and only it is read.")
@click.option("--no-compare", is_flag=True, help="Skip the dense cache.")
@config_options
@running_options
@click.option("--output", type=PATH_TYPE, help="Write levels.png and figures.json there.")
@json_option
@quiet_option
def command(**given: Any) -> None:
    options = SimpleNamespace(**given)
    job = _job(options)
    if options.save_cache is not None:
        _make_folder(options.save_cache)
    if options.output is not None:
        _make_folder(options.output)
        picture = options.output / "levels.png"
        picture.unlink(missing_ok=True)
        job = dataclasses.replace(job, picture=str(picture))
    runs = _run(job, options)
    if options.save_cache is not None:
        progress(f"Wrote {options.save_cache}; --load-cache continues from there.", options.quiet)
    found = figures(job, runs, versions())
    if options.as_json:
        click.echo(json.dumps(found, indent=2))
    elif not options.quiet:
        click.echo(comparison(*runs), err=not to_terminal())
    if options.output is not None:
        path = options.output / "figures.json"
        save_text(json.dumps(found, indent=2) + "\n", path)
        if runs[0].note:
            progress(runs[0].note, options.quiet)
        written = [str(each) for each in (picture, path) if each.exists()]
        progress(f"\nWrote {' and '.join(written)}.", options.quiet)


def _job(options: SimpleNamespace) -> Job:
    """Makes the job of the DiffKV run, after all checks that need no weights."""
    text = read_prompt(options)
    if options.example:
        text = _example(options, text)
    if text is None:
        raise click.UsageError("no PROMPT was given; give one, - to read it from stdin, or --example.")
    turns = [text, *options.then]
    if not all(turns):
        raise click.UsageError("the prompt or a --then is empty; there is nothing to continue.")
    sampling = sampling_of(options)
    if options.system is not None and not options.chat:
        raise click.UsageError("--system has no effect without --chat.")
    if options.quiet and options.as_json:
        raise click.UsageError("--quiet and --json cannot be combined; leave one out.")
    choice, start = choice_of(options), {}
    if options.load_cache is not None:
        if choice:
            raise click.UsageError("--load-cache has its own configuration; leave cache options out.")
        start = saved_talk(options.load_cache)
    progress(f"reading the configuration of {options.model}", options.quiet)
    model_config = supported_config(options.model)
    config_before(choice, model_config)
    _check_length(options, turns, position_limit(model_config), len(start.get("ids", ())))
    device = usable_device(options.device)

    from ..running.side_by_side import DIFFKV, Job

    terminal = to_terminal() and not options.quiet
    return Job(
        cache=DIFFKV,
        model=resolve_model(options.model),
        turns=turns,
        max_new_tokens=options.max_new_tokens,
        config=fields_of(choice),
        dtype=options.dtype,
        device=device,
        seed=options.seed,
        sample=options.sample,
        chat=options.chat,
        system=options.system,
        sampling=sampling,
        stream=not options.as_json,
        echo=terminal,
        quiet=options.quiet,
        start=start,
        load_cache=options.load_cache and str(options.load_cache),
        save_cache=options.save_cache and str(options.save_cache),
        weights=options.weights,
    )


def _example(options: SimpleNamespace, text: str | None) -> str:
    """Returns the example prompt for the model, as a message if the model has a chat template."""
    if text is not None:
        raise click.UsageError("--example is a prompt; leave the other one out.")

    from .examples import prompt_for

    chats = bool(load_tokenizer(options.model).chat_template)
    options.chat |= chats
    return prompt_for(chats)


def _run(job: Job, options: SimpleNamespace) -> list[FinishedRun]:
    """Runs the DiffKV job, and the dense one unless --no-compare is given."""
    from ..running import side_by_side as compare

    try:
        progress(f"{'' if options.no_compare else '[1/2] '}{job.cache}: loading {options.model}", options.quiet)
        if options.no_compare:
            hide_progress_bars(options.quiet)
            return [compare.execute_here(job)]
        compressed = compare.run_in_fresh_process(job)
        progress(f"[2/2] {compare.DYNAMIC}, for comparison", options.quiet)
        dense = dataclasses.replace(job, cache=compare.DYNAMIC, picture=None, stream=False, save_cache=None)
        return [compressed, compare.run_in_fresh_process(dense)]
    except compare.RunError as error:
        raise Failure(str(error)) from error


def saved_talk(folder: Path) -> dict[str, Any]:
    """Reads a saved conversation (`read_talk`). Raises `click.UsageError` if the folder has none."""
    try:
        return read_talk(folder)
    except EvaluationError as error:
        raise click.UsageError(str(error)) from error


def _check_length(options: SimpleNamespace, turns: list[str], limit: int | None, before: int) -> None:
    """Raises `click.UsageError` if `before` tokens, the turns and the generated tokens exceed `limit`."""
    from ..running.talk import chat_turns

    tokenizer = load_tokenizer(options.model)
    try:
        texts = chat_turns(tokenizer, turns, options.system) if options.chat else turns
    except ValueError as error:
        raise click.UsageError(f"--chat cannot be used with {options.model}: {error}") from error
    except Exception as error:
        # templates raise arbitrary errors, for example without a system message
        raise click.UsageError(f"the chat template of {options.model} rejects the messages: {error}") from error
    plain = not options.chat
    counts = [len(tokenizer(text, add_special_tokens=plain and i == 0).input_ids) for i, text in enumerate(texts)]
    if not counts[0]:
        raise click.UsageError("the prompt has no tokens; there is nothing to continue.")
    new, length = len(turns) * options.max_new_tokens, before + sum(counts)
    if limit is not None and length + new > limit:
        raise click.UsageError(
            f"the text has {length} tokens and {new} are to be generated, but the model's max_position_embeddings "
            f"is {limit}; shorten the prompt or lower --max-new-tokens."
        )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # fails now rather than after generation
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise click.UsageError(f"cannot write to {folder}: {error.strerror}.") from error


def comparison(compressed: FinishedRun, dense: FinishedRun | None = None) -> str:
    """Formats the figures of a DiffKV run, compared with a dense run if there is one."""
    runs = [compressed] if dense is None else [dense, compressed]
    whole = compressed.dense_bytes if dense is None else dense.cache_bytes
    # a dense cache is all payload
    payloads = [run.cache_bytes if run is dense else run.payload_bytes for run in runs]
    rows = [
        ("cache, real bytes", *(megabytes(run.cache_bytes) for run in runs), _share(compressed.cache_bytes, whole)),
        ("prompt", *(f"{run.prompt_seconds:.2f} s" for run in runs), ""),
        ("decoding", *(_rate(run.tokens_per_second) for run in runs), ""),
        ("cache, payload only", *map(megabytes, payloads), _share(compressed.payload_bytes, whole)),
        ("peak memory", *(megabytes(run.peak_bytes) for run in runs), ""),
    ]
    if dense is None:
        return "\n".join(["", table(("", compressed.cache, "of a dense cache"), rows), "", *_kept(compressed)])
    rows.append(("  above the model", *(megabytes(run.above_model_bytes) for run in runs), ""))
    peak = f"Peak memory: {compressed.peak_source}, in a separate process for each cache."
    header = ("", dense.cache, compressed.cache, f"{compressed.cache} / dense")
    lines = ["", table(header, rows), "", *_kept(compressed), _difference(compressed, dense), paragraph(peak)]
    return "\n".join(lines)


def same_tokens(compressed: FinishedRun, dense: FinishedRun) -> int | None:
    """Returns the number of equal tokens before the first difference; None if there is no difference."""
    from ..evaluation.comparison import Agreement

    found = Agreement.of(compressed.generated, dense.generated)
    return None if found.equal == found.tokens else found.until_difference


def word_difference(old: str, new: str) -> tuple[float, str]:
    """Returns the share of common words, and `new` with the differences marked: [-old-]{+new+}."""
    # words and the spaces between them
    before, after = (re.findall(r"\s+|[^\s]+", text) for text in (old, new))
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    parts = []
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag == "equal":
            parts.append("".join(after[c:d]))
            continue
        if b > a:
            parts.append(_marked("[-{}-]", "".join(before[a:b]), "red"))
        if d > c:
            parts.append(_marked("{{+{}+}}", "".join(after[c:d]), "green"))
    return matcher.ratio(), "".join(parts)


def figures(job: Any, runs: list[FinishedRun], versions: dict[str, str]) -> dict[str, Any]:
    """Returns all figures of a comparison, ready for JSON."""
    compressed, *dense = runs
    found = {
        "text": compressed.text,
        "answers": compressed.answers,
        "config": compressed.config,
        "model": job.model,
        "dtype": job.dtype,
        "device": job.device,
        "seed": job.seed if job.sample else None,
        "sampling": job.sampling if job.sample else None,
        "max_new_tokens": job.max_new_tokens,
        "runs": {run.cache: dataclasses.asdict(run) for run in runs},
        "versions": versions,
    }
    if dense:
        same = same_tokens(compressed, dense[0])
        words, _ = word_difference(dense[0].text, compressed.text)
        found["agreement"] = {"same_text": same is None, "tokens_until_difference": same, "words_in_common": words}
    return found


def _kept(run: FinishedRun) -> list[str]:
    from ..cache.report import LayerReport
    from ..cache.wording import kept_in_words

    layers = [LayerReport(**layer) for layer in run.layers or ()]
    lines = [paragraph(f"{kept_in_words(layers)}.")] if layers else []
    compressed = len(layers)
    if run.num_layers is not None and compressed < run.num_layers:
        note = "the bytes include all of them. `hf-diffkv inspect` shows which."
        lines.append(paragraph(f"{compressed} of {run.num_layers} layers are compressed; {note}"))
    if run.layers != [] and run.dense_bytes is not None and run.cache_bytes >= run.dense_bytes:
        if run.payload_bytes == run.dense_bytes and run.levels["high"] + run.levels["low"]:
            why = "Nothing is saved: every token is stored as it is."
        else:
            why = "A cache this short saves nothing: the window and partly filled pages outweigh it."
        lines.append(paragraph(why))
    return lines


def _difference(compressed: FinishedRun, dense: FinishedRun) -> str:
    same = same_tokens(compressed, dense)
    if same is None:
        return paragraph(f"Both caches wrote the same {sum(map(len, dense.generated))} tokens.")
    words, marked = word_difference(dense.text, compressed.text)
    head = paragraph(
        f"The texts differ from token {same + 1} on and share {words:.0%} of their words. The differences, "
        f"[-{dense.cache}-] and {{+{compressed.cache}+}}:"
    )
    return f"{head}\n{marked}"


def _marked(pattern: str, text: str, colour: str) -> str:
    marked = pattern.format(text)
    return click.style(marked, fg=colour) if colours() else marked


def _share(part: int | None, whole: int | None) -> str:
    return f"{part / whole:.1%}" if part is not None and whole else ""


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1f} tok/s"
