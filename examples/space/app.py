"""The demo as a Space: `hf-diffkv demo` with the model named by the Space variable MODEL, if set."""

import os
import sys

from hf_diffkv.cli import main

if __name__ == "__main__":
    model = os.environ.get("MODEL")
    sys.exit(main(["demo", *(["--model", model] if model else []), *sys.argv[1:]]))
