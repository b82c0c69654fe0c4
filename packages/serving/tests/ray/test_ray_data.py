"""Ray Data: what rows get, what a failure leaves alone, and that nothing is lost with a worker."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import runpy
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_diffkv.running.models import TINY_LM

pytest.importorskip(
    "ray.data", reason="Ray is not installed: pip install -e 'packages/serving[ray]'", exc_type=ImportError
)
pyarrow = pytest.importorskip("pyarrow")
pandas = pytest.importorskip("pandas")

from hf_diffkv_serving.ray import Generate, Summary, generate  # noqa: E402

NEW = 6
EXAMPLE = Path(__file__).parents[4] / "examples" / "ray_answers.py"
LOSSLESS = {"high": "K16V16", "low": "K16V16", "alpha_low": 0.0, "max_bytes": 8 << 20}
OPTIONS: dict[str, Any] = {
    "model": "tiny-lm",
    "dtype": "float32",
    "device": "cpu",
    "generation": {"do_sample": False},
    "max_length": 120,
    "max_new_tokens": NEW,
}
pytestmark = pytest.mark.slow


@functools.cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY_LM)


@functools.cache
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY_LM, dtype=torch.float32)


def expected(ids: list[int]) -> list[int]:
    """Returns the answer of `generate()` with Transformers' own cache."""
    return model().generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)[0, len(ids) :].tolist()


def text_of(index: int) -> str:
    return f"@oak={5000 + 7 * index} @elm=1177 ?oak="


def ids_of(index: int) -> list[int]:
    return tokenizer()(text_of(index)).input_ids


@pytest.fixture(scope="module")
def worker() -> Iterator[Generate]:
    worker = Generate(config=LOSSLESS, **OPTIONS)
    yield worker
    worker.close()


def test_rows_get_the_answers_of_generate_or_a_reason(worker: Generate) -> None:
    prompts = [text_of(0), "", "a" * 400, text_of(1)]
    batch = pyarrow.table({"id": [3, 1, 4, 1], "prompt": prompts})
    found = asyncio.run(worker(batch))
    assert found.column_names[:2] == batch.column_names and found["id"].to_pylist() == [3, 1, 4, 1]
    rows = found.to_pylist()
    for i, row in ((0, rows[0]), (1, rows[3])):
        ids = expected(ids_of(i))
        assert row["answer_ids"] == ids and row["error"] is None
        assert row["answer"] == tokenizer().decode(ids, skip_special_tokens=True)
        assert (row["prompt_tokens"], row["answer_tokens"]) == (len(ids_of(i)), NEW)
    assert "is not a text, a list" in rows[1]["error"] and "shorten the prompt" in rows[2]["error"]
    assert all(row["answer"] is None and row["answer_ids"] == [] for row in rows[1:3])


def test_prompts_are_texts_ids_or_messages_in_any_kind_of_batch(worker: Generate) -> None:
    tokens = np.empty(3, dtype=object)
    tokens[:] = [np.array(ids_of(2)), ids_of(3), [0.5]]
    found = asyncio.run(worker({"prompt": tokens, "id": np.arange(3)}))
    assert found["answer_ids"] == [expected(ids_of(2)), expected(ids_of(3)), []]
    assert found["error"][:2] == [None, None] and "is not a text, a list" in found["error"][2]
    worker._tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    # as a table that other rows gave another field
    frame = pandas.DataFrame({"prompt": [[{"role": "user", "content": text_of(4), "name": None}]]})
    assert asyncio.run(worker(frame))["answer_ids"].tolist() == [expected(ids_of(4))]
    with pytest.raises(ValueError, match=r"no column 'prompt' among \['text'\]; set prompts="):
        asyncio.run(worker({"text": [text_of(0)]}))


def test_a_row_that_ends_the_engine_takes_no_other_with_it(worker: Generate, monkeypatch: pytest.MonkeyPatch) -> None:
    model = worker._manager.model
    forward, poison = model.forward, tokenizer()("#").input_ids[-1]

    def fail(input_ids: torch.Tensor, **inputs: Any) -> Any:
        if (input_ids == poison).any():
            raise RuntimeError("out of memory")
        return forward(input_ids=input_ids, **inputs)

    monkeypatch.setattr(model, "forward", fail)
    prompts = [text_of(0), text_of(1) + "#", text_of(2)]
    first, failed, last = asyncio.run(worker.answers(prompts))
    assert first.answer_ids == expected(ids_of(0)) and last.answer_ids == expected(ids_of(2))
    assert failed.error == "the engine failed with this prompt alone: out of memory"
    # and it goes on
    assert asyncio.run(worker.answers(prompts[:1]))[0] == first


def parts_in(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if not path.name.startswith("writing-")]


def test_a_data_set_is_answered_once_though_a_worker_is_killed(cluster: Any, tmp_path: Path) -> None:
    count, killed = 32, []

    def kill_one() -> None:
        """Kills a worker when some rows are written, and before all are."""
        while not parts_in(tmp_path):
            time.sleep(0.01)
        workers = [p for p in psutil.process_iter(["cmdline"]) if "ray::MapWorker" in "".join(p.info["cmdline"] or ())]
        os.kill(workers[0].pid, signal.SIGKILL)
        killed.append((len(workers), len(parts_in(tmp_path))))

    rows = [{"id": f"row {i}", "index": i, "prompt": text_of(i) if i % 8 else "a" * 400} for i in range(count + 2)]
    killer = threading.Thread(target=kill_one)
    killer.start()
    options = {**OPTIONS, "config": LOSSLESS, "key": "id", "batch_size": 2, "progress": False}
    dataset = cluster.data.from_items(rows[:count])
    # the answers that were handed on before a worker died may be of either run, and are counted once
    summary = generate(dataset, str(tmp_path), concurrency=2, **options)
    killer.join()
    assert killed[0][0] == 2 and killed[0][1] < count // 2 == len(parts_in(tmp_path))
    assert summary == Summary(count - 4, 4, 0, sum(len(ids_of(i)) for i in range(count) if i % 8), (count - 4) * NEW)

    # what a killed process leaves half written
    (tmp_path / "writing-0.parquet").write_bytes(b"PAR1")
    # the example goes on with it, and with two rows more
    prompts = tmp_path.parent / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = f"--model {TINY_LM} --prompts {prompts} --output {tmp_path} --max-new-tokens {NEW} --max-length 120 --quiet"
    again = runpy.run_path(str(EXAMPLE))["main"](given.split())
    assert (again.answered, again.failed, again.skipped) == (1, 1, count)
    found = pandas.concat([pandas.read_parquet(path) for path in tmp_path.iterdir()]).sort_values("index")
    assert found["id"].tolist() == [row["id"] for row in rows]
    for index, row in enumerate(found.itertuples()):
        assert pandas.isna(row.error) == (index % 8 > 0)
        if index < count:
            assert list(row.answer_ids) == (expected(ids_of(index)) if index % 8 else [])
        else:
            assert len(row.answer_ids) == NEW * (index % 8 > 0)
