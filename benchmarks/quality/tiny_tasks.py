"""Runs `hf-diffkv evaluate` on tasks for models with one token per character: facts of tiny-lm, and library source.

    python examples/train_tiny_lm.py --architecture latent --output build/tiny-latent --steps 60 --tokens 512
    python benchmarks/quality/tiny_tasks.py --model build/tiny-latent --tasks tiny-recall,tiny-source \\
        --methods dense,diffkv:K8V8,diffkv:K8V4 --output build/eval

It takes the options of `hf-diffkv evaluate`. Facts and text are held out from training in `train_tiny_lm.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from hf_diffkv import cli
from hf_diffkv.evaluation.tasks import task
from hf_diffkv.evaluation.tasks.base import Document, Source
from hf_diffkv.evaluation.tasks.facts import AskingTask
from hf_diffkv.evaluation.tasks.prompts import encode, rng_for
from hf_diffkv.evaluation.tasks.text import TextTask

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import tiny_lm_data as data

CONTINUED = 128


@task("tiny-recall")
class Recall(AskingTask):
    """Lines `@key=dddd` among filler; every key is asked for as `?key=`, each on a separate branch."""

    suites = ()
    count, length = 16, 320

    def documents(self, source: Source) -> list[Document]:
        return [self._document(source, index) for index in range(source.count)]

    def _document(self, source: Source, index: int) -> Document:
        rng = rng_for(source, self.name, index)
        pairs, pieces = data.facts(rng, source.length, held_out=True)
        stated = "".join(text for text, _ in pieces)
        context = stated + data.filler(rng, source.length - len(stated) - 1, held_out=True) + "\n"
        asked = tuple((encode(source.tokenizer, f"?{key}="), encode(source.tokenizer, pairs[key])) for key in pairs)
        return Document(f"{self.name}-{index}", encode(source.tokenizer, context), asked)


@task("tiny-source")
class LibrarySource(TextTask):
    """Source code of the Python library, and the characters that follow."""

    suites = ()
    count, length = 16, 320

    def documents(self, source: Source) -> list[Document]:
        rng = rng_for(source, self.name, 0)
        texts = [data.excerpt(rng, source.length + CONTINUED, held_out=True) for _ in range(source.count)]
        ids = [encode(source.tokenizer, text) for text in texts]
        return [
            Document(f"{self.name}-{index}", each[: source.length], continuation=each[source.length :])
            for index, each in enumerate(ids)
        ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    from hf_diffkv_evaluation.commands.evaluate import command

    return cli.main(arguments, command, "tiny_tasks.py")


if __name__ == "__main__":
    sys.exit(main())
