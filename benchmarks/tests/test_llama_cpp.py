"""llama.cpp's caches: methods by name, and the worker's results on documents, with PyTorch models standing in."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from llama_stand_in import DIM, HEADS, LAYERS, STAND_INS, StandIn
from transformers import AutoModelForCausalLM

from hf_diffkv.evaluation import comparison
from hf_diffkv.evaluation.errors import EvaluationError
from hf_diffkv.evaluation.methods import get_method
from hf_diffkv.evaluation.records import Record, RunFolder
from hf_diffkv.evaluation.session import Session
from hf_diffkv.evaluation.tasks import Document, get_task
from hf_diffkv.running import models
from hf_diffkv.running.models import CHECKOUT, TINY_LM

pytestmark = pytest.mark.usefixtures("peers")
PROMPT = (TINY_LM.parents[1] / "prompts" / "recall.txt").read_text()
TOKENS, CONTINUED = 900, 60
# bytes of 32 numbers of keys or values
BLOCKS = {"f16": 64, "q8_0": 34, "q5_0": 22, "q4_0": 18}


@pytest.fixture(scope="module")
def worker(peers: ModuleType) -> ModuleType:
    import llama_worker

    return llama_worker


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY_LM, dtype=torch.float32).eval()


def recall(tokenizer: Any) -> Document:
    """Returns a document with facts between lines of code that tiny-lm can recall."""
    context = tokenizer(PROMPT).input_ids[:TOKENS]
    facts = re.findall(r"@(\w+)=(\d+)\n", tokenizer.decode(context))
    questions = tuple(
        (tuple(tokenizer(f"\n?{key}=").input_ids), tuple(tokenizer(value).input_ids)) for key, value in facts
    )
    total = sum(len(question) + len(answer) for question, answer in questions)
    return Document("recall-0", tuple(context), questions, extra={"more_tokens": total})


def code(tokenizer: Any) -> Document:
    ids = tokenizer(PROMPT).input_ids
    return Document("code-0", tuple(ids[:TOKENS]), continuation=tuple(ids[TOKENS : TOKENS + CONTINUED]))


@pytest.fixture
def program(model: Any) -> StandIn:
    return StandIn(model, TOKENS)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("llama-cpp", "takes one type, or one for keys and one for values: llama-cpp:q8_0"),
        ("llama-cpp:q8_0+q4_0", "takes one type, or one for keys and one for values: llama-cpp:q8_0"),
        ("llama-cpp:q8", "unknown type of llama.cpp's cache 'q8': did you mean q8_0"),
        ("llama-cpp:q8_0/", "unknown type of llama.cpp's cache ''"),
        ("llama-cpp:q8_0/f16/f16", "a type for keys and one for values, not 'q8_0/f16/f16'"),
    ],
)
def test_types_that_are_none(text: str, said: str) -> None:
    with pytest.raises(EvaluationError, match=re.escape(said)):
        get_method(text)


def test_types_by_name(worker: ModuleType, model: Any) -> None:
    for text, keys, values in (("f16", "f16", "f16"), ("q5_0", "q5_0", "q5_0"), ("q8_0/q4_0", "q8_0", "q4_0")):
        method = get_method(f"llama-cpp:{text}")
        assert (method.types.keys, method.types.values) == (keys, values)
        assert method.environment.name == "llama-cpp"
        assert method.environment.worker == Path(worker.__file__)
    assert get_method("llama-cpp:f16").environment is method.environment
    with pytest.raises(NotImplementedError):
        method.new_cache(model)


def test_bytes_of_types(worker: ModuleType) -> None:
    """Computed by hand for Qwen2.5-Coder-0.5B: 24 layers of 2 heads with 64 channels."""
    import llama_context

    shape = llama_context.Shape(24, 128, 128)
    for text, whole, codes in (("f16", 12288, 12288), ("q8_0", 6528, 6144), ("q4_0", 3456, 3072), ("q5_0", 4224, 3840)):
        held = shape.held(llama_context.parse_types([text]), 10)
        assert (held.bytes, held.payload_bytes) == (10 * whole, 10 * codes)
    assert shape.held(llama_context.parse_types(["q8_0/q4_0"]), 10).bytes == 10 * 4992


@pytest.mark.parametrize("name", ["llama_worker", "llama_field"])
def test_workers_need_neither_pytorch_nor_transformers(name: str, worker: ModuleType) -> None:
    absent = "; ".join(f"sys.modules[{name!r}] = None" for name in ("torch", "transformers", "psutil", "llama_cpp"))
    program = f"import sys; {absent}; sys.path.insert(0, {str(Path(worker.__file__).parent)!r}); import {name}"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=CHECKOUT)


@pytest.mark.parametrize("positions", [1, 64, 150])
def test_logits_are_compared_as_by_pytorch(worker: ModuleType, positions: int) -> None:
    numbers = np.random.default_rng(positions)
    logits, reference = (numbers.normal(0, 5, (positions, 300)).astype(np.float32) for _ in range(2))
    # the same most likely token in a third of the positions
    reference[::3] = logits[::3] + numbers.normal(0, 0.01, logits[::3].shape)
    ids = numbers.integers(0, 300, positions).tolist()
    expected = comparison.compare_logits(torch.tensor(logits), torch.tensor(reference), ids)
    found = worker.compare_logits(logits, reference, ids)
    assert set(found) == set(expected)
    for name in found:
        # PyTorch sums in float32
        assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6)
    assert worker.compare_logits(logits, logits, ids)["kl"] == (0.0, positions)


@pytest.mark.parametrize("name", ["key-value", "turns", "text"])
def test_documents_are_measured_as_by_the_tasks(
    name: str, program: StandIn, worker: ModuleType, tokenizer: Any, model: Any
) -> None:
    document = code(tokenizer) if name == "text" else recall(tokenizer)
    task, types = get_task(name), {label: worker.parse_types([label]) for label in ("q4_0", "f16", "q8_0")}
    found = {r.method: r for r in worker.records_of(program, types, name, document, in_turn=name == "turns")}
    # the reference runs first, and only once
    assert program.made == ["f16", "q4_0", "q8_0"] and program.open == 0
    reference = None
    for label in ("f16", "q4_0", "q8_0"):
        session = Session(model, get_method(STAND_INS[label]))
        sums, observed, details = task.measure(session, document, reference)
        reference = observed if reference is None else reference
        record = found[label]
        assert record.error is None and record.digest == document.digest
        assert set(record.metrics) == set(sums)
        for metric, expected in sums.items():
            # the logits of up to 59 positions, each rounded to float32
            assert record.metrics[metric] == pytest.approx(expected, rel=1e-3, abs=59e-7), metric
        assert record.details.get("answers") == details.get("answers")
        assert record.bytes == TOKENS * LAYERS * HEADS * 2 * DIM // 32 * BLOCKS[label]
        assert record.dense_bytes == TOKENS * LAYERS * HEADS * DIM * 4
    assert found["f16"].metrics["kl"][0] == 0.0 < found["q8_0"].metrics["kl"][0] < found["q4_0"].metrics["kl"][0]


def test_a_type_that_fails(program: StandIn, worker: ModuleType, tokenizer: Any) -> None:
    types = {label: worker.parse_types([label]) for label in ("f16", "q8_0", "q4_0")}
    program.broken = {"q8_0"}
    found = {record.method: record.error for record in worker.records_of(program, types, "text", code(tokenizer))}
    assert found == {"f16": None, "q8_0": "no q8_0 here", "q4_0": None}
    program.broken = {"f16"}
    found = {record.method: record.error for record in worker.records_of(program, types, "text", code(tokenizer))}
    assert found == {"f16": "no f16 here", "q8_0": "f16: no f16 here", "q4_0": "f16: no f16 here"}
    assert program.open == 0


def test_a_task_that_generates_is_refused(program: StandIn, worker: ModuleType, tokenizer: Any) -> None:
    document = dataclasses.replace(code(tokenizer), continuation=(), extra={"steps": 5})
    (record,) = worker.records_of(program, {"x": worker.parse_types(["f16"])}, "trajectory", document)
    assert record.error == "llama.cpp is measured on tasks that ask and on the task text." and not program.made


@pytest.fixture
def job(worker: ModuleType, tokenizer: Any, tmp_path: Path) -> dict[str, Any]:
    """A job in the form that its process reads."""
    (tmp_path / "model.gguf").write_bytes(b"weights")
    documents = [json.loads(json.dumps(dataclasses.asdict(recall(tokenizer))))]
    return {
        "settings": {"model": "tiny-lm", "dtype": "bfloat16", "seed": 0},
        "device": None,
        "gguf": str(tmp_path / "model.gguf"),
        "folder": str(tmp_path / "run"),
        "methods": ["llama-cpp:f16", "llama-cpp:q4_0"],
        "tasks": [["turns", documents], ["key-value", documents]],
        "in_turn": ["turns"],
        "retry": False,
        "quiet": True,
    }


def records(job: dict[str, Any]) -> dict[tuple[str, str], Record]:
    found = RunFolder(Path(job["folder"]), job["settings"]).records()
    return {(record.task, record.method): record for record in found}


def test_a_job_goes_on_where_it_was(program: StandIn, worker: ModuleType, job: dict[str, Any]) -> None:
    program.broken = {"q4_0"}
    worker.run(program, job)
    assert len(records(job)) == 4
    program.broken, program.made = set(), []
    worker.run(program, job)
    assert program.made == []
    # the failed methods, and their reference
    worker.run(program, {**job, "retry": True})
    assert program.made == ["f16", "q4_0"] * 2
    found = records(job)
    assert {record.error for record in found.values()} == {None}
    kl = {task: found[task, "llama-cpp:q4_0"].metrics["kl"] for task in ("turns", "key-value")}
    assert kl["turns"] != kl["key-value"]
    for record in found.values():
        assert record.basis["dtype"] == "bfloat16" and record.environment["threads"] == 2
    # other weights are measured again
    Path(job["gguf"]).write_bytes(b"others")
    program.made = []
    worker.run(program, job)
    assert program.made == ["f16", "q4_0"] * 2


def test_other_devices_are_refused(worker: ModuleType, job: dict[str, Any]) -> None:
    with pytest.raises(EvaluationError, match="measured on CPUs, not on cuda"):
        worker.work({**job, "device": "cuda"})


def test_a_gguf_file_lies_beside_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "MODELS_FOLDER", tmp_path)
    environment = get_method("llama-cpp:f16").environment
    tasks = [(get_task(name), []) for name in ("text", "turns", "key-value")]
    with pytest.raises(EvaluationError, match=r"smollm2\.gguf: make models MODELS=smollm2 GGUF=1$"):
        environment.further("smollm2", tasks)
    (tmp_path / "qwen2.5-coder-0.5b.gguf").touch()
    expected = {"gguf": str(tmp_path / "qwen2.5-coder-0.5b.gguf"), "in_turn": ["turns"]}
    for name in ("qwen2.5-coder-0.5b", "Qwen/Qwen2.5-Coder-0.5B-Instruct"):
        assert environment.further(name, tasks) == expected
    (tmp_path / "mine-1.0").mkdir()
    with pytest.raises(EvaluationError, match=r"mine-1\.0\.gguf, a GGUF file of the same weights"):
        environment.further(str(tmp_path / "mine-1.0"), tasks)


def write_gguf(model: Any, path: Path) -> None:
    """Writes tiny-lm in float32, without its tokenizer."""
    config, state = model.config, model.state_dict()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(DIM)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in state.items():
        if name == "lm_head.weight":
            continue
        values = tensor.float()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            # two numbers that rotate together are adjacent in a GGUF file, but half a head apart here
            values = values.view(-1, 2, DIM // 2, values.shape[1]).transpose(1, 2).reshape(values.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), values.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.slow
def test_the_real_one(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    """Its exact cache matches ours, and fewer bits lose more, within the bytes of their types."""
    types = ("f16", "q8_0", "q5_0", "q4_0", "q8_0/q4_0")
    methods = [get_method(f"llama-cpp:{name}") for name in types]
    environment = methods[0].environment
    if environment.find_python() is None:
        pytest.skip("the environment of llama.cpp has not been made: make llama-cpp")
    (tmp_path / "tiny").mkdir()
    write_gguf(model, tmp_path / "tiny.gguf")
    folder = RunFolder(tmp_path / "run", {"model": str(tmp_path / "tiny"), "dtype": "float32", "seed": 0})
    tasks = [(get_task("turns"), [recall(tokenizer)]), (get_task("key-value"), [recall(tokenizer)])]
    tasks += [(get_task("text"), [code(tokenizer)])]
    assert environment.run(methods, tasks, folder, model=str(tmp_path / "tiny"), quiet=True) == []
    found = {(record.task, record.method): record for record in folder.all_records()}
    assert {record.error for record in found.values()} == {None} and len(found) == len(types) * len(tasks)
    for task, (document,) in tasks:
        sums, _, details = task.measure(Session(model, get_method("dense")), document, None)
        exact = found[task.name, "llama-cpp:f16"]
        assert exact.metrics["nll"] == pytest.approx(sums["nll"], rel=2e-3)
        assert exact.details.get("answers") == details.get("answers")
        assert exact.bytes == TOKENS * LAYERS * HEADS * DIM * 4
        losses = [found[task.name, f"llama-cpp:{name}"].metrics["kl"][0] for name in types[:4]]
        assert losses[0] == 0.0 < losses[1] < losses[2] < losses[3]
        for name in types[1:4]:
            record = found[task.name, f"llama-cpp:{name}"]
            assert record.bytes * 64 == exact.bytes * BLOCKS[name] and record.dense_bytes == exact.bytes
        assert found[task.name, "llama-cpp:q8_0/q4_0"].bytes * 64 == exact.bytes * (34 + 18) // 2
    assert found["key-value", "llama-cpp:f16"].metrics["right"][0] >= 3
