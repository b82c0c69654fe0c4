"""Runs Transformers' own model and generation tests with a lossless `DiffKVCache` in place of the default cache.

    python tools/run_transformers_tests.py CHECKOUT [--models llama mistral] [--output conformance.json]

CHECKOUT is a clone of huggingface/transformers, ideally at the tag of the installed version. Each model's test file
runs twice, first unchanged and then with `lossless_default.py`, to tell tests that fail anyway from those that the
cache breaks. This needs the dependencies of those tests (parameterized, httpx) but no network or GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

MODELS = ("llama", "qwen2", "mistral", "gemma2")
FOLDER = Path(__file__).resolve().parent


def run(checkout: Path, model: str, baseline: bool, timeout: int, select: str) -> dict[str, dict]:
    """Runs one model's test file. Results by test: outcome, reason, and attended (forwards through DiffKV layers).

    Raises:
        FileNotFoundError: the checkout has no tests of this model.
        RuntimeError: pytest could not run them.
    """
    path = Path("tests", "models", model, f"test_modeling_{model}.py")
    if not (checkout / path).is_file():
        raise FileNotFoundError(f"{checkout / path} does not exist; give the folder of a transformers checkout.")
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.jsonl"
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "HF_DIFFKV_RESULTS": str(results),
            "HF_DIFFKV_BASELINE": str(int(baseline)),
            "PYTHONPATH": os.pathsep.join(
                [str(FOLDER), str(FOLDER.parent), str(checkout), os.environ.get("PYTHONPATH", "")]
            ),
        }
        # the checkout's own conftest and options are meant for its continuous integration
        options = ["--noconftest", "-c", os.devnull, "--rootdir", str(checkout), "-p", "no:cacheprovider"]
        options += ["-p", "lossless_default", "-q", "--tb=line", "-W", "ignore"] + (["-k", select] if select else [])
        command = [sys.executable, "-m", "pytest", *options, str(path)]
        done = subprocess.run(
            command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )
        if done.returncode > 1 or not results.exists():
            raise RuntimeError(f"pytest could not run {path} (status {done.returncode}):\n{done.stdout[-3000:]}")
        rows = [json.loads(line) for line in results.read_text().splitlines()]
    found: dict[str, dict] = {}
    for row in rows:  # one per subtest as well
        name = row["test"].rpartition("::")[2]
        if name not in found or found[name]["outcome"] != "failed":
            found[name] = row
    return found


def compare(before: dict[str, dict], after: dict[str, dict]) -> dict[str, list[str]]:
    """Sorts tests by what the cache did to them; every test of either run ends up in exactly one list."""
    sorted_tests: dict[str, list[str]] = {
        name: [] for name in ("passed", "passed without a cache", "failed", "mended", "failed anyway", "skipped")
    }
    for test in sorted({*before, *after}):
        first, second = (runs.get(test, {"outcome": "failed", "attended": 0}) for runs in (before, after))
        outcomes = first["outcome"], second["outcome"]
        if outcomes == ("passed", "passed"):
            kind = "passed" if second["attended"] else "passed without a cache"
        elif outcomes[0] == "passed":
            kind = "failed"
        elif outcomes == ("failed", "passed"):
            kind = "mended"
        else:
            kind = "skipped" if outcomes[0] == "skipped" else "failed anyway"
        sorted_tests[kind].append(test)
    return sorted_tests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkout", type=Path, help="folder of a clone of huggingface/transformers")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--select", default="", help="pytest's -k")
    parser.add_argument("--timeout", type=int, default=3600, help="seconds one run of one model may take")
    parser.add_argument("--output", type=Path, help="writes everything as JSON")
    arguments = parser.parse_args()
    report = {}
    for model in arguments.models:
        runs = [
            run(arguments.checkout.resolve(), model, baseline, arguments.timeout, arguments.select)
            for baseline in (True, False)
        ]
        sorted_tests = compare(*runs)
        report[model] = {kind: {test: runs[1].get(test) for test in tests} for kind, tests in sorted_tests.items()}
        print(model, dict(Counter({kind: len(tests) for kind, tests in sorted_tests.items()})), flush=True)
        for test in sorted_tests["failed"]:
            print(f"  {test}: {runs[1].get(test, {}).get('reason', 'did not run')}", flush=True)
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
