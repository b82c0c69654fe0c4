"""Entry point of `python -m hf_diffkv`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
