"""`hf-diffkv chat`: a conversation with a model, all turns on one cache."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from ..running.saved_talk import write_talk
from .console import Command, Failure, entry, one_line, paragraph, progress, to_terminal
from .generate import sampling_of, sampling_options, saved_talk
from .inspect import level_table, taken
from .models import load_tokenizer, position_limit, supported_config, usable_device
from .options import (
    PATH_TYPE,
    PROMPT_TYPE,
    AtLeast,
    choice_of,
    config_before,
    config_for,
    config_options,
    model_option,
    quiet_option,
    running_options,
)

if TYPE_CHECKING:
    from ..running.talk import Talk

HELP = {
    "/memory": "what the cache uses",
    "/levels": "what each layer keeps",
    "/reset": "forget everything",
    "/save FOLDER": "save the conversation; --load continues it",
    "/help": "this list",
    "/quit": "quit, like Ctrl-D",
}

CUT_OFF = "The last answer was cut off, so the conversation cannot continue; /reset starts over."


@click.command(
    "chat",
    cls=Command,
    help="Chat with a model over many turns on one cache. Each line is a message; /memory, /levels, /reset, /save "
    "FOLDER, /help and /quit are commands. Ctrl-C stops an answer but keeps what was said. If stdin is not a "
    "terminal, its lines are the messages, and the answers go to stdout.",
)
@model_option(default="smollm2", show_default=True)
@click.option("--system", type=PROMPT_TYPE, help="System message.")
@click.option("--plain", is_flag=True, help="Continue each line as it is, without a chat template.")
@click.option("--load", type=PATH_TYPE, help="Continue a conversation saved with /save.")
@click.option("--max-new-tokens", type=AtLeast(), default=512, help="Per answer.")
@sampling_options
@config_options
@running_options
@quiet_option
def command(**given: Any) -> None:
    options = SimpleNamespace(**given)
    sampling = sampling_of(options)
    if options.plain and options.system is not None:
        raise click.UsageError("--system has no effect with --plain.")
    saved = None if options.load is None else saved_talk(options.load)
    talk, limit = _start(options, saved)
    session = _ChatSession(talk, options, limit, {"do_sample": options.sample, **sampling})
    for line in _lines(options):
        if not session.take(line):
            break


def _start(options: SimpleNamespace, saved: dict[str, Any] | None) -> tuple[Talk, int | None]:
    choice = choice_of(options)
    progress(f"loading {options.model}", options.quiet)
    model_config = supported_config(options.model)
    config_before(choice, model_config)
    tokenizer = load_tokenizer(options.model)

    import torch

    from ..cache.diffkv_cache import DiffKVCache
    from ..running.models import load_model
    from ..running.talk import Talk, chat_turns

    if not options.plain:
        try:
            chat_turns(tokenizer, ["one", "two"], options.system)
        except Exception as error:
            # templates raise arbitrary errors, for example without a system message
            raise click.UsageError(
                f"{options.model} cannot chat: {one_line(error)} Use --plain to continue lines instead."
            ) from error
    device = usable_device(options.device)
    model = load_model(options.model, options.dtype, device, options.quiet, options.weights)
    torch.manual_seed(options.seed)
    try:
        if saved is None:
            cache, state = DiffKVCache(model, config_for(choice, model)), {}
        else:
            cache, state = DiffKVCache.from_pretrained(options.load, model), saved
    except (ValueError, OSError) as error:
        raise click.UsageError(one_line(error)) from error
    talk = Talk(model, tokenizer, cache, chat=not options.plain, system=options.system, **state)
    return talk, position_limit(model_config)


def _lines(options: SimpleNamespace) -> Iterator[str]:
    """Yields the user's input line by line."""
    if not sys.stdin.isatty():
        if isinstance(sys.stdin, io.TextIOWrapper):
            # as in files of prompts, whatever the locale
            sys.stdin.reconfigure(encoding="utf-8")
        try:
            for line in sys.stdin:
                # some locales let through bytes that are not text
                line.encode("utf-8")
                yield line.rstrip("\n")
        except UnicodeError as error:
            raise Failure("stdin is not UTF-8 text.") from error
        return
    try:
        import readline  # noqa: F401  lets input() edit lines and remember them
    except ImportError:
        pass
    progress(paragraph("/help lists the commands, /quit or Ctrl-D quits."), options.quiet)
    stopped = False
    while True:
        try:
            yield input("> ")
            stopped = False
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            if stopped:
                raise
            stopped = True
            print("\nCtrl-C again or /quit quits.", flush=True)


class _ChatSession:
    """A conversation on the terminal.

    Args:
        limit: maximum number of tokens of the model; None if unknown.
    """

    def __init__(self, talk: Talk, options: SimpleNamespace, limit: int | None, sampling: dict[str, Any]) -> None:
        self.talk, self.options, self.limit, self.sampling = talk, options, limit, sampling

    def take(self, line: str) -> bool:
        """Handles a message or command, and returns whether the conversation continues."""
        if not line.strip():
            return True
        if not line.startswith("/"):
            self.answer(line)
            return True
        name, _, rest = line.strip().partition(" ")
        if name == "/quit":
            return False
        actions = {"/memory": self.memory, "/levels": self.levels, "/reset": self.reset, "/help": self.help}
        actions["/save"] = lambda: self.save(rest.strip())
        unknown = f"there is no command {name}; /help lists them."
        actions.get(name, lambda: self.complain(unknown))()
        return True

    def answer(self, message: str) -> None:
        import torch
        from transformers import StoppingCriteriaList, TextStreamer

        from ..running.side_by_side import EXPECTED_ERRORS

        if self.talk.is_ahead:
            return self.complain(CUT_OFF)
        try:
            held, new = self.talk.ids.shape[1] + len(self.talk.encode(message)), self.options.max_new_tokens
            room = new if self.limit is None else min(new, self.limit - held)
            if room < 1:
                return self.complain(
                    f"the conversation has {held} tokens but the model's limit is {self.limit}; /reset starts over."
                )
            streamer = TextStreamer(self.talk.tokenizer, skip_prompt=True, skip_special_tokens=True)
            with _until_interrupted() as stop:

                def stopped(ids: Any, scores: Any, **kwargs: Any) -> Any:
                    return ids.new_full(ids.shape[:1], stop.is_set(), dtype=torch.bool)

                criteria = StoppingCriteriaList([stopped])
                options = {"streamer": streamer, "stopping_criteria": criteria, **self.sampling}
                self.talk.answer(message, max_new_tokens=room, **options)
            if stop.is_set():
                progress("(stopped)", self.options.quiet)
        except BrokenPipeError:
            raise
        except EXPECTED_ERRORS as error:
            self.complain(one_line(error) + (f" {CUT_OFF}" if self.talk.is_ahead else ""))

    def memory(self) -> None:
        memory, tokens = self.talk.cache.memory(), self.talk.cache.get_seq_length()
        if not tokens:
            return print("The cache is empty.", flush=True)
        layers = f"{len(memory.layers)} of {len(self.talk.cache.layers)} layers compressed"
        hint = f"; {memory.hint}" if memory.hint else ""
        print(paragraph(f"{taken(tokens, memory)}; {layers}{hint}."), flush=True)

    def levels(self) -> None:
        if not self.talk.cache.get_seq_length():
            return print("The cache is empty.", flush=True)
        print(level_table(self.talk.cache.memory()), flush=True)

    def reset(self) -> None:
        self.talk.reset()
        print("Everything is forgotten.", flush=True)

    def help(self) -> None:
        print("\n".join(entry(name, what, 14) for name, what in HELP.items()), flush=True)

    def save(self, name: str) -> None:
        if not name:
            return self.complain("/save needs a folder.")
        if self.talk.is_ahead:
            return self.complain(CUT_OFF)
        folder = Path(name)
        try:
            self.talk.cache.save_pretrained(folder)
            write_talk(folder, self.options.model, self.talk.ids[0].tolist(), self.talk.first)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or one_line(error)
            return self.complain(f"cannot save to {folder}: {reason.removesuffix('.')}.")
        print(f"Wrote {folder}.", flush=True)

    def complain(self, message: str) -> None:
        """Prints an error, or raises `Failure` if stdin is not a terminal."""
        if not sys.stdin.isatty():
            raise Failure(message)
        print(paragraph(message), file=sys.stderr, flush=True)


@contextmanager
def _until_interrupted() -> Iterator[Event]:
    """Makes Ctrl-C in a terminal only set the event within the block, so that every token is completed."""
    stop = Event()
    if not (sys.stdin.isatty() and to_terminal()):
        yield stop
        return

    before = signal.signal(signal.SIGINT, lambda *_: stop.set())
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
