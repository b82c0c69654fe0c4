"""Commands in a real terminal of 40 columns, in a pipe that closes, and what Ctrl-C leaves of them."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from hf_diffkv.running.models import TINY_LM

ROOT = Path(__file__).parents[2]
CTRL_C = "\x03"
COLOUR = re.compile(r"\x1b\[\d[\d;]*m")
# control sequences of line editing, which say nothing of colours
EDITING = re.compile(r"\x1b\[[?\d;]*[a-zA-Z]|\r")
PROMPT = (TINY_LM.parents[1] / "prompts" / "recall.txt").read_text()[:600]

pytestmark = pytest.mark.slow


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "xterm-256color", **more}


def default_signals() -> None:
    """A shell has what it runs in the background ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """`hf-diffkv` in the foreground of a pseudo-terminal of 40 columns."""

    def __init__(self, folder: Path, *arguments: str, **more: str) -> None:
        self.end, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
        command = [sys.executable, "-m", "hf_diffkv", *arguments]
        streams = {"stdin": inner, "stdout": inner, "stderr": inner}

        def foreground() -> None:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            default_signals()

        self.process = subprocess.Popen(command, **streams, cwd=folder, env=environment(**more), preexec_fn=foreground)
        os.close(inner)
        self.text, self.seen = "", 0

    def read(self) -> bool:
        """Takes what comes; False at the end."""
        try:
            data = os.read(self.end, 4096)
        except OSError:
            return False
        self.text += data.decode(errors="replace")
        return bool(data)

    def wait_for(self, pattern: str) -> None:
        """Reads on until `pattern` comes behind what was waited for before."""
        while (found := re.compile(pattern).search(self.text, self.seen)) is None:
            assert self.read(), f"ended without {pattern!r}: {self.text[-500:]}"
        self.seen = found.end()

    def type(self, text: str) -> None:
        os.write(self.end, text.encode())

    def finish(self) -> int:
        while self.read():
            pass
        os.close(self.end)
        return self.process.wait()

    @property
    def lines(self) -> list[str]:
        """Lines of its output without control sequences."""
        return EDITING.sub("", self.text).split("\n")


def interrupted(folder: Path, *options: str, **environment: str) -> Terminal:
    """`generate`, ended by Ctrl-C while it writes, which it says in one line."""
    terminal = Terminal(folder, "generate", PROMPT, "--max-new-tokens", "3000", *options, **environment)
    terminal.wait_for(re.escape(PROMPT[-10:].splitlines()[-1]))
    terminal.type(CTRL_C)
    assert terminal.finish() == 130
    assert terminal.lines[-2:] == ["hf-diffkv: interrupted.", ""] and "Traceback" not in terminal.text
    return terminal


def test_generate_is_interrupted_in_one_line(tmp_path: Path) -> None:
    terminal = interrupted(tmp_path, "--output", "out", NO_COLOR="1")
    assert not COLOUR.search(terminal.text)
    assert not (tmp_path / "out" / "figures.json").exists()


def test_a_run_in_this_process_is_interrupted_in_one_line(tmp_path: Path) -> None:
    interrupted(tmp_path, "--no-compare")


def test_a_talk_outlives_ctrl_c(tmp_path: Path) -> None:
    """An answer that is stopped leaves a cache that goes on."""
    terminal = Terminal(tmp_path, "chat", "--model", "tiny-lm", "--plain", "--max-new-tokens", "3000", NO_COLOR="1")
    terminal.wait_for("> ")
    # random text has no end
    terminal.type("class A:\n")
    terminal.wait_for("class A:[^>]*\n[^>]{10,}")
    terminal.type(CTRL_C)
    terminal.wait_for(r"\(stopped\)[^>]*> ")
    terminal.type("/memory\n")
    terminal.wait_for("layers\\s+compressed")
    terminal.wait_for("> ")
    terminal.type("/help\n")
    terminal.wait_for("quit, like Ctrl-D")
    terminal.wait_for("> ")
    terminal.type("/nonsense\n")
    terminal.wait_for(r"there is no command /nonsense; /help\s+lists them")
    terminal.wait_for("> ")
    terminal.type("/reset\n")
    terminal.wait_for("Everything is forgotten")
    terminal.wait_for("> ")
    # a signal between the prompt and the wait for keys does not wake Python, but the next key does
    terminal.type(CTRL_C + "\n")
    terminal.wait_for("Ctrl-C again or /quit quits")
    terminal.wait_for("> ")
    terminal.type("\n/quit\n")
    assert terminal.finish() == 0
    assert "Traceback" not in terminal.text and not COLOUR.search(terminal.text)
    said = [line for line in terminal.lines if "Loading" not in line]
    # a word, such as the folder of the checkout, is not broken
    assert said and not [line for line in said if len(line) > 40 and " " in line]


def test_inspect_colours_the_text(tmp_path: Path) -> None:
    text = PROMPT[:300]
    terminal = Terminal(tmp_path, "inspect", text)
    assert terminal.finish() == 0
    shown = COLOUR.sub("", terminal.text).replace("\r", "")
    assert COLOUR.search(terminal.text) and shown.endswith(f"\n\n{text}\n")
    # a path that is longer than a line cannot be wrapped
    lines = [line for line in shown.removesuffix(f"{text}\n").splitlines() if "Loading" not in line]
    assert all(len(line) <= 40 or " " not in line for line in lines)


def test_a_reader_that_has_had_enough(tmp_path: Path) -> None:
    """Closes the pipe after a byte, like `hf-diffkv generate ... | head -c 1`."""
    command = [sys.executable, "-m", "hf_diffkv", "generate", PROMPT, "--max-new-tokens", "3000"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path, env=environment(), bufsize=0
    )
    assert process.stdout.read(1)
    process.stdout.close()
    errors = process.stderr.read().decode()
    assert process.wait() == 1
    assert "Traceback" not in errors and "Exception" not in errors
    lines = [line for line in errors.splitlines() if "have not been measured" not in line]
    assert lines[-1].startswith("[1/2]")


def test_what_waits_takes_its_process_along(tmp_path: Path) -> None:
    """SIGTERM to the command alone, like `kill`: the process of the run would write on into the pipe."""
    command = [sys.executable, "-m", "hf_diffkv", "generate", PROMPT, "--max-new-tokens", "3000", "--quiet"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, cwd=tmp_path, env=environment(TMPDIR=str(tmp_path)), bufsize=0
    )
    assert process.stdout.read(1)
    process.terminate()
    # until the last process that has the pipe ends
    written = process.stdout.read()
    assert process.wait() == 128 + signal.SIGTERM
    assert len(written) < 2000 and not list(tmp_path.iterdir())
