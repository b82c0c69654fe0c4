"""Times `import hf_diffkv` after `import transformers`, and the registration that follows later.

`import transformers` alone loads next to nothing, not even PyTorch, and neither does `import hf_diffkv`: the package's
modules are loaded together with the classes that every model needs. Each run is a new process; the second figure is
taken under `-X importtime`, which itself slows down imports.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

IMPORT = """
import time
import transformers
start = time.perf_counter()
import hf_diffkv
print((time.perf_counter() - start) * 1e3)
"""
REGISTRATION = "from transformers import GenerationMixin, PreTrainedModel; import hf_diffkv"


def run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True)


def import_time() -> float:
    """Milliseconds for `import hf_diffkv` after `import transformers`."""
    return float(run("-c", IMPORT).stdout)


def registration_time() -> float:
    """Milliseconds to load and register all modules once PyTorch and Transformers' models are loaded."""
    log = run("-X", "importtime", "-c", REGISTRATION).stderr
    rows = [line.split("|") for line in log.splitlines() if line.startswith("import time:")]
    return next(int(cumulative) for _, cumulative, name in rows if name.strip() == "hf_diffkv") / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    registration_time()  # writes the bytecode
    for what, measure in (("import hf_diffkv", import_time), ("loading and registering", registration_time)):
        times = [measure() for _ in range(options.runs)]
        print(f"{what}: median {statistics.median(times):.0f} ms of {options.runs} runs, at most {max(times):.0f} ms")


if __name__ == "__main__":
    main()
