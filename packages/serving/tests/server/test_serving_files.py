"""The container file and the systemd unit of examples/serving, as far as that can be checked without starting them."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_diffkv.commands import load

ROOT = Path(__file__).parents[4]
FOLDER = ROOT / "examples" / "serving"
INSTRUCTIONS = {"FROM", "RUN", "WORKDIR", "COPY", "ARG", "USER", "ENV", "VOLUME", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT"}
INSTRUCTIONS |= {"CMD"}


def logical_lines(name: str) -> list[str]:
    """Returns the lines of a file without comments, with continued lines joined."""
    text = re.sub(r"^#.*\n", "", (FOLDER / name).read_text(), flags=re.MULTILINE)
    return [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def container() -> dict[str, list[str]]:
    """Returns the arguments of each instruction by its name."""
    found: dict[str, list[str]] = {}
    for line in logical_lines("Containerfile"):
        name, rest = line.split(None, 1)
        found.setdefault(name, []).append(rest)
    return found


def served(arguments: list[str]) -> dict[str, Any]:
    """Parses arguments of the command. Raises `click.UsageError`."""
    command = load("serve")
    with command.make_context("hf-diffkv serve", arguments) as context:
        return context.params


def check(found: dict[str, Any]) -> None:
    assert found["model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert (found["host"], found["port"], found["log_format"]) == ("0.0.0.0", 8000, "json")
    assert found["max_bytes"] == 2_000_000_000 and found["grace"] == 30
    assert found["prefix_folder"] is not None


def test_the_container_runs_the_command() -> None:
    found = container()
    assert found.keys() <= INSTRUCTIONS
    arguments = [*json.loads(found["ENTRYPOINT"][0]), *json.loads(found["CMD"][0])]
    assert arguments[:2] == ["hf-diffkv", "serve"]
    check(served(arguments[2:]))
    port = found["EXPOSE"][0]
    health = json.loads(re.sub(r"^(--\S+\s+)*CMD ", "", found["HEALTHCHECK"][0]))
    assert health[:2] == ["python", "-c"] and f"localhost:{port}/health" in health[2]
    compile(health[2], "health", "exec")
    # volumes are what the command and the Hub write into
    assert json.loads(found["VOLUME"][0]) == [found["ENV"][0].removeprefix("HF_HOME="), "/prefixes"]


def test_the_container_copies_what_there_is() -> None:
    for line in container()["COPY"]:
        *sources, _ = shlex.split(line)
        if not sources[0].startswith("--from"):
            assert all((ROOT / source).exists() for source in sources)
    # all that the build of a wheel reads
    copied = {source for line in container()["COPY"] for source in shlex.split(line)[:-1]}
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in", "hf_diffkv"} <= copied


def unit() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in logical_lines("hf-diffkv.service"):
        name, sign, value = line.partition("=")
        if sign:
            found.setdefault(name, []).append(value)
    return found


def test_the_unit_runs_the_command() -> None:
    found = unit()
    arguments = shlex.split(found["ExecStart"][0].replace("${STATE_DIRECTORY}", "/var/lib/hf-diffkv"))
    assert arguments[0].endswith("/bin/hf-diffkv") and arguments[1] == "serve"
    params = served(arguments[2:])
    check(params)
    assert params["prefix_folder"].is_relative_to("/var/lib/" + found["StateDirectory"][0])
    assert found["Environment"] == [f"HF_HOME=/var/cache/{found['CacheDirectory'][0]}"]
    assert float(found["TimeoutStopSec"][0]) >= params["grace"] + 30


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    text = (FOLDER / "hf-diffkv.service").read_text()
    # it wants the program to be there
    (tmp_path / "hf-diffkv.service").write_text(text.replace("/opt/hf-diffkv/bin/hf-diffkv", sys.executable))
    command = ["systemd-analyze", "verify", "--recursive-errors=no", str(tmp_path / "hf-diffkv.service")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "hf-diffkv.service" not in done.stderr, done.stderr
