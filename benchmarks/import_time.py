"""What `import hf_diffkv` takes on top of the parts of Transformers that every model needs.

Each run is a new process under `-X importtime`, which itself slows imports down. `import transformers` alone loads next
to nothing, not even PyTorch; loading any model imports the two classes named in `PROGRAM`.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

PROGRAM = "from transformers import GenerationMixin, PreTrainedModel; import hf_diffkv"


def measure() -> tuple[float, float]:
    """Milliseconds of one import: this package's own modules, and those together with what only it brought along."""
    command = [sys.executable, "-X", "importtime", "-c", PROGRAM]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    rows = [
        line.removeprefix("import time:").split("|") for line in log.splitlines() if line.startswith("import time:")
    ]
    modules = [(own, cumulative, name.strip()) for own, cumulative, name in rows[1:]]
    own = sum(int(own) for own, _, name in modules if name.split(".")[0] == "hf_diffkv")
    total = next(int(cumulative) for _, cumulative, name in modules if name == "hf_diffkv")
    return own / 1e3, total / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    measure()  # writes the byte code
    own, total = zip(*(measure() for _ in range(options.runs)))
    print(
        f"hf_diffkv's modules: median {statistics.median(own):.0f} ms of {options.runs} runs, at most {max(own):.0f} ms"
    )
    print(f"with all it brings along: median {statistics.median(total):.0f} ms, at most {max(total):.0f} ms")


if __name__ == "__main__":
    main()
