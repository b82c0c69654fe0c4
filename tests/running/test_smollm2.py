"""A pretrained model: the lossless cache changes nothing, and the demo's questions have right answers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from greedy_jobs import greedy_job
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.compat import passing
from hf_diffkv.running.side_by_side import DYNAMIC, execute

ROOT = Path(__file__).parents[2]
HANDBOOK = ROOT / "examples" / "prompts" / "museum.txt"


@pytest.mark.slow
def test_the_lossless_cache_writes_the_same_tokens(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    question = HANDBOOK.read_text()[:1500] + "\n\nWho built the lighthouse?"
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    cache = DiffKVCache(model.config, DiffKVConfig.lossless(window=16, alpha_high=1.0))
    expected, found = (
        model.generate(**inputs, **passing(past), max_new_tokens=20, min_new_tokens=20, do_sample=False)
        for past in (DynamicCache(config=model.config), cache)
    )
    assert found.tolist() == expected.tolist()
    assert found.shape[1] == inputs.input_ids.shape[1] + 20
    levels = cache.memory().tokens
    assert levels["high"] > levels["window"] > 0, "tokens must have left the window"


@pytest.mark.slow
def test_the_dense_cache_answers_the_questions_of_the_demo(smollm2: Path) -> None:
    recipe = re.search(r"^demo-smollm2:.*?^$", (ROOT / "Makefile").read_text(), re.MULTILINE | re.DOTALL)[0]
    answers = re.search(r'"Right answers: (.*?)"', recipe)[1].split(", ")
    questions = re.findall(r'--then "(.*?)"', recipe)
    turns = [HANDBOOK.read_text().removesuffix("\n"), *questions]
    max_new_tokens = int(re.search(r"--max-new-tokens (\d+)", recipe)[1])
    job = greedy_job(DYNAMIC, smollm2, turns, max_new_tokens, {}, chat=True)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    written = [tokenizer.decode(ids) for ids in execute(job).generated]
    assert len(written) == len(answers) == 5
    assert all(answer in text for answer, text in zip(answers, written)), written
