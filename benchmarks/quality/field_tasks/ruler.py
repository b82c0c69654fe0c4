"""RULER: 13 tasks of any requested length, made by the generators of NVIDIA's own wheel with its seed, 42.

The generators run in a separate process (`ruler_generators.py`) with the model's tokenizer and RULER's template
"meta-chat", which encloses the user's part in [INST] and [/INST] and puts the beginning of the answer after it. These
marks are then replaced by the model's chat template: the text between them becomes user turns, the text after the last
one begins the assistant's answer, and the solved example of `cwe` becomes an earlier turn. The template's tokens are
passed to the generators as further tokens to generate, so that a prompt with its template and answer stays within the
length. Only `fwe` does not count the answer, as in RULER itself.

The score is the share of references that the answer contains, ignoring case, or in `qa`, whether it contains any.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_diffkv.evaluation.errors import EvaluationError

from . import wheels
from .cases import Case, Source, chat_text, encode, ends_of

TASKS = (
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
    "niah_multiquery",
    "vt",
    "cwe",
    "fwe",
    "qa_1",
    "qa_2",
)
# groups of tasks by purpose, for tables without room for 13 columns
GROUPS = {"needles, 8 tasks": TASKS[:8], "`vt`, `cwe`, `fwe`": TASKS[8:11], "`qa_1`, `qa_2`": TASKS[11:]}
# tasks for which one of the references suffices
ANY_REFERENCE = ("qa_1", "qa_2")
LENGTH, SAMPLES = 4096, 5
GENERATORS = Path(__file__).with_name("ruler_generators.py")
MARKS = re.compile(r"\[INST\] | \[/INST\]")
CONTROL = re.compile(r"[\x00-\x1f]")


def cases(source: Source) -> list[Case]:
    """Makes the cases of the tasks, sample by sample.

    Raises:
        EvaluationError: the data is missing, or a generator fails.
    """
    length, samples = source.length or LENGTH, source.samples or SAMPLES
    ends = ends_of(source.tokenizer)
    found = {}
    for task, (limit, lines) in generate(source, length, samples).items():
        found[task] = [
            Case(
                task,
                f"{length}/{index}",
                encode(source.tokenizer, prompt_text(source.tokenizer, line["input"])),
                limit,
                ends,
                {"outputs": line["outputs"]},
            )
            for index, line in enumerate(lines)
        ]
    return [found[task][index] for index in range(samples) for task in source.tasks]


def turns_of(text: str) -> tuple[list[dict[str, str]], str]:
    """Splits a generator's prompt into turns and the beginning of the answer.

    Raises:
        ValueError: the marks are not in the template's order.
    """
    parts = MARKS.split(text)
    if len(parts) < 3 or len(parts) % 2 == 0 or parts[0]:
        raise ValueError(f"a prompt of RULER has {len(parts) - 1} marks, and must begin with one.")
    roles = ["user", "assistant"] * (len(parts) // 2)
    *turns, question, (_, beginning) = zip(roles, parts[1:])
    solved = [(role, part.strip()) for role, part in turns]
    return [{"role": role, "content": part} for role, part in [*solved, question]], beginning


def prompt_text(tokenizer: Any, text: str) -> str:
    """Writes a generator's prompt with the model's chat template."""
    return chat_text(tokenizer, *turns_of(text))


def score(case: Case, text: str) -> float:
    """Returns the share of references in the answer; if one suffices, whether there is any."""
    # unprintable characters become newlines, as in RULER
    text = CONTROL.sub("\n", text.strip()).strip().lower()
    found = [reference.lower() in text for reference in case.reference["outputs"]]
    return float(any(found)) if case.task in ANY_REFERENCE else sum(found) / len(found)


def generate(source: Source, length: int, samples: int) -> dict[str, tuple[int, list[dict[str, Any]]]]:
    """Runs the generators, or reads what they wrote earlier.

    Returns:
        The limit of generated tokens and the generators' lines, by task.
    """
    template = len(encode(source.tokenizer, chat_text(source.tokenizer, [{"role": "user", "content": ""}])))
    job = {
        "site": str(wheels.site()),
        "tokenizer": source.path,
        "length": length,
        "samples": samples,
        "template_tokens": template,
    }
    return {task: _generate_task(source.tokenizer, task, job) for task in source.tasks}


def _generate_task(tokenizer: Any, task: str, job: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
    # everything the prompts depend on, including the code that makes them
    content = [wheels.WHEELS, job["length"], job["samples"], job["template_tokens"], GENERATORS.read_text()]
    content.append(_tokenizer_digest(tokenizer))
    key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
    path = wheels.DATA / "ruler" / key / f"{task}.json"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        run_generator({**job, "task": task, "output": str(path)})
    made = json.loads(path.read_text())
    return made["limit"], made["lines"]


def run_generator(job: dict[str, Any]) -> None:
    """Runs a generator in a separate process. Raises `EvaluationError` with its last line if it fails."""
    print(f"making {job['samples']} prompts of {job['task']}", file=sys.stderr, flush=True)
    command = [sys.executable, str(GENERATORS)]
    done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["no message"]
        raise EvaluationError(f"the generator of {job['task']} failed: {said[-1]}")


def _tokenizer_digest(tokenizer: Any) -> str:
    probe: Sequence[Any] = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps([probe, tokenizer.chat_template]).encode()).hexdigest()[:16]
