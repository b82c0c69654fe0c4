"""Runs a program from standard input, as described in `limited.py`. Needs Linux or macOS.

Standard output gets the token and a newline if the program ran to its end, otherwise a newline and the reason.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
FILE_BYTES = 1 << 20
FILES = 64
# refused audit events (https://docs.python.org/3/library/audit_events.html), by prefix
REFUSED = (
    "ctypes.",
    "ftplib.",
    "http.",
    "os.chflags",
    "os.chmod",
    "os.chown",
    "os.exec",
    "os.fork",
    "os.kill",
    "os.link",
    "os.mkfifo",
    "os.posix_spawn",
    "os.putenv",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.spawn",
    "os.symlink",
    "os.system",
    "os.truncate",
    "os.utime",
    "pty.spawn",
    "shutil.",
    "signal.pthread_kill",
    "smtplib.",
    "socket.",
    "subprocess.",
    "urllib.",
)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def main() -> None:
    token, seconds, memory = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    program = sys.stdin.buffer.read().decode("utf-8", "surrogatepass")
    said = os.fdopen(os.dup(1), "w", encoding="utf-8")
    for stream in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDWR), stream)
    sys.argv = ["program"]
    leave_network()
    limit(seconds, memory)
    guard(Path.cwd().resolve())
    try:
        exec(compile(program, "program", "exec"), {"__name__": "__main__"})
    except BaseException as error:
        said.write(f"\n{type(error).__name__}: {error}"[:1000])
    else:
        said.write(f"{token}\n")
    said.flush()
    # skips any exit handlers that the program may have registered
    os._exit(0)


def leave_network() -> None:
    """Moves this process into a namespace without a network, if the kernel allows it."""
    unshare = getattr(ctypes.CDLL(None), "unshare", None)
    if unshare is not None and unshare(CLONE_NEWNET) != 0:
        unshare(CLONE_NEWUSER | CLONE_NEWNET)


def limit(seconds: float, memory: int) -> None:
    """Limits the time, memory and files of this process."""
    whole = max(1, round(seconds))
    limits = {"RLIMIT_CPU": whole, "RLIMIT_AS": memory, "RLIMIT_FSIZE": FILE_BYTES, "RLIMIT_NOFILE": FILES}
    for name, value in {**limits, "RLIMIT_CORE": 0}.items():
        resource.setrlimit(getattr(resource, name), (value, value))
    # terminates even a program that sleeps
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def guard(folder: Path) -> None:
    """Refuses sockets, processes and changes outside of `folder` from now on."""

    def check(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(REFUSED):
            raise PermissionError(f"{event} is refused")
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & WRITING and not _within(path, folder):
                raise PermissionError(f"writing {path!r} is refused")
        if event == "os.mkdir" and not _within(arguments[0], folder):
            raise PermissionError(f"making {arguments[0]!r} is refused")

    sys.addaudithook(check)


def _within(path: Any, folder: Path) -> bool:
    if not isinstance(path, (str, bytes)):
        # an already open file
        return isinstance(path, int)
    return Path(os.path.realpath(os.fsdecode(path))).is_relative_to(folder)


if __name__ == "__main__":
    main()
