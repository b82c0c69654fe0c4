"""Calibration: what is tried, what is chosen, what is written, and what cannot be done."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.calibration.texts import MATH, read_pieces
from hf_diffkv.calibration.thresholds import (
    ALPHA_HIGH,
    ALPHA_LOW,
    Candidate,
    Grid,
    Thresholds,
    cheapest,
    closest,
    sweep,
    table,
)
from hf_diffkv.cli import main
from hf_diffkv.compat import passing
from hf_diffkv.evaluation import runner
from hf_diffkv.evaluation.errors import EvaluationError
from hf_diffkv.evaluation.methods import get_method
from hf_diffkv.evaluation.tasks import TASKS, Document
from hf_diffkv.evaluation.tasks.base import Source
from hf_diffkv.evaluation.tasks.facts import AskingTask
from hf_diffkv.evaluation.tasks.prompts import encode
from hf_diffkv.evaluation.tasks.text import stretches
from hf_diffkv.extras import install
from hf_diffkv.heads.hub import CONFIG_NAME

TINY_LM = Path(__file__).parents[2] / "examples" / "models" / "tiny-lm"
TEXT = Path(__file__)
LENGTH = 150
CONTINUED = 256
LAYERS = 6
SUBJECTS = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)


class Characters:
    """A tokenizer with a token for each character."""

    bos_token_id = 1

    def __init__(self, bos: bool = False) -> None:
        self.bos = bos

    def __call__(self, text: str, add_special_tokens: bool = True, **ignored: Any) -> Any:
        ids = [ord(character) for character in text]
        found = type("Encoding", (), {})()
        found.input_ids = [self.bos_token_id, *ids] if self.bos and add_special_tokens else ids
        return found


# texts


def test_documents_are_consecutive_stretches() -> None:
    pieces = ["abcdefgh", "ijklmnopqrstuvwxyz"]
    joined = [ord(character) for character in "abcdefgh\n\nijklmnopqrstuvwxyz\n\n"]
    first, second = stretches(pieces, Characters(), 2, 6, 4)
    assert [*first.context, *first.continuation, *second.context, *second.continuation] == joined[:20]
    assert len(first.context) == 6 and first.name != second.name and first.digest != second.digest


def test_every_prompt_starts_as_the_tokenizer_starts_one() -> None:
    first, second = stretches(["abcdefghijkl"], Characters(bos=True), 2, 4, 2)
    assert first.context == (1, *map(ord, "abc")) and first.continuation == tuple(map(ord, "de"))
    assert second.context == (1, *map(ord, "fgh"))


def test_no_more_is_read_than_needed() -> None:
    def pieces():
        yield "a" * 20
        raise AssertionError("read on")

    assert len(stretches(pieces(), Characters(), 2, 6, 4)) == 2


def test_a_text_that_is_too_short() -> None:
    with pytest.raises(EvaluationError, match="the text has 12 tokens and 2 documents need 20; lower --length"):
        stretches(["abcdefghij"], Characters(), 2, 6, 4)


def data_sets(monkeypatch: pytest.MonkeyPatch, rows: dict[str | None, list[dict]]) -> list[tuple]:
    """Makes `datasets` load these rows by configuration, and returns the list of its calls."""
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    asked = []

    def load(name: str, config: str | None, **options: Any) -> list[dict]:
        asked.append((name, config, options["split"]))
        return rows[config]

    monkeypatch.setattr(datasets, "load_dataset", load)
    return asked


def test_subjects_of_math_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {name: [{"problem": f"{name} {i}", "solution": "s", "level": "1"} for i in (1, 2)] for name in SUBJECTS}
    asked = data_sets(monkeypatch, rows)
    found = list(read_pieces(MATH))
    assert asked == [(MATH, subject, "train") for subject in SUBJECTS]
    assert found[0] == "Problem:\nalgebra 1\n\nSolution:\ns" and found[7] == "Problem:\nalgebra 2\n\nSolution:\ns"
    assert len(found) == 14 and all("geometry" in found[i] for i in (2, 9))


def test_other_data_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = data_sets(monkeypatch, {None: [{"text": "abc", "id": 1}], "c": [{"question": "q", "answer": "a"}]})
    assert list(read_pieces("org/name")) == ["abc"]
    assert list(read_pieces("org/name:c")) == ["q\n\na"]
    assert asked == [("org/name", None, "train"), ("org/name", "c", "train")]


def test_columns_that_hold_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    data_sets(monkeypatch, {None: [{"image": 1, "label": "x"}]})
    with pytest.raises(EvaluationError, match=r"has the columns \['image', 'label'\], none of which .* --text FILE"):
        list(read_pieces("org/name"))


def test_the_hub_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = data_sets(monkeypatch, {})
    with pytest.raises(EvaluationError, match=r"cannot read the data set EleutherAI/.* --text FILE.* --text offline"):
        list(read_pieces(MATH))
    assert len(asked) == 1


def test_datasets_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(EvaluationError, match=rf"{re.escape(install('eval'))}; or give .* --text FILE"):
        list(read_pieces("org/name"))


def test_files(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("äbc", encoding="utf-8")
    assert list(read_pieces(str(tmp_path / "text.txt"))) == ["äbc"]
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(EvaluationError, match="cannot read"):
        read_pieces(str(tmp_path / "bytes"))
    for missing in ("no-file", "folder/no-file.txt", str(tmp_path)):
        with pytest.raises(EvaluationError, match="there is no such file, and it is not a Hub data set"):
            read_pieces(missing)
    assert len(list(read_pieces("offline"))) > 10


# what is tried and what is chosen


class Costs:
    """Bytes and losses that add up over layers; notes what was asked for."""

    def __init__(self, layers: int = 1, factor: Sequence[float] = (1.0,)) -> None:
        self.layers, self.factor = layers, factor
        self.asked: list[Thresholds] = []

    def __call__(self, thresholds: Sequence[Thresholds]) -> list[Candidate]:
        self.asked += thresholds
        return [self.candidate(each) for each in thresholds]

    def candidate(self, pair: Thresholds) -> Candidate:
        highs, lows = (
            value if isinstance(value, tuple) else (value,) * self.layers for value in (pair.alpha_high, pair.alpha_low)
        )
        held = sum(1000 - 100 * high - 1000 * low for high, low in zip(highs, lows))
        loss = sum((high + 100 * low) * factor for high, low, factor in zip(highs, lows, self.factor))
        return Candidate(pair, round(held), held / (1000 * self.layers), loss)


def test_the_papers_sweep() -> None:
    costs = Costs()
    found = sweep(costs, limit=7.5, grid=Grid())
    assert [(pair.alpha_high, pair.alpha_low) for pair in costs.asked] == [
        *((float(high), 0.0) for high in (1, 2, 3, 4, 5)),
        *((5.0, low) for low in (0.02, 0.04, 0.06, 0.08, 0.1)),
    ]
    assert [each.thresholds for each in found] == costs.asked
    # 5 + 100 * 0.02 = 7 is within the limit, 5 + 100 * 0.04 is not
    assert cheapest(found, 7.5).thresholds == Thresholds(5.0, 0.02)


def test_alpha_low_is_tried_at_the_best_alpha_high() -> None:
    costs = Costs()
    found = sweep(costs, limit=3.0, grid=Grid())
    assert {pair.alpha_high for pair in costs.asked[len(ALPHA_HIGH) :]} == {3.0}
    assert len(costs.asked) == len(ALPHA_HIGH) + len(ALPHA_LOW)
    assert cheapest(found, 3.0).thresholds == Thresholds(3.0, 0.0)


def test_pruning_above_alpha_high_is_not_tried() -> None:
    costs = Costs()
    sweep(costs, limit=9.0, grid=Grid((0.05,), (0.02, 0.08)))
    assert costs.asked == [Thresholds(0.05, 0.0), Thresholds(0.05, 0.02)]


def test_nothing_good_enough_ends_the_sweep() -> None:
    costs = Costs()
    found = sweep(costs, limit=0.5, grid=Grid(), layers=3)
    assert len(costs.asked) == len(ALPHA_HIGH) and cheapest(found, 0.5) is None
    assert closest(found).thresholds == Thresholds(1.0, 0.0)


def test_layers_go_cheaper_by_what_they_save_for_what_they_lose() -> None:
    # a step of alpha_high saves 100 bytes everywhere and loses these
    factor = (0.5, 0.1, 0.3, 0.05)
    costs = Costs(4, factor)
    found = sweep(costs, limit=2.0 * sum(factor) + 0.16, grid=Grid((2.0, 3.0), (0.5,)), layers=4)
    best = cheapest(found, 2.0 * sum(factor) + 0.16)
    # 0.05 and 0.1 fit into what is left, 0.3 does not
    assert best.thresholds == Thresholds((2.0, 3.0, 2.0, 3.0), 0.0)
    assert best.bytes == 4 * 800 - 200
    singles = [pair for pair in costs.asked if isinstance(pair.alpha_high, tuple)]
    assert singles[:4:2] and all(sum(high == 3.0 for high in pair.alpha_high) >= 1 for pair in singles)


def test_all_layers_go_cheaper_where_all_can() -> None:
    # in all at once alpha_high = 3 was too much, but single layers say otherwise
    class Together(Costs):
        def candidate(self, pair: Thresholds) -> Candidate:
            found = super().candidate(pair)
            together = not isinstance(pair.alpha_high, tuple) and pair.alpha_high == 3.0 and not self.layered
            return Candidate(found.thresholds, found.bytes, found.ratio, 99.0 if together else 0.0)

        @property
        def layered(self) -> bool:
            return any(isinstance(each.alpha_high, tuple) for each in self.asked)

    costs = Together(3, (1.0,) * 3)
    best = cheapest(sweep(costs, limit=1.0, grid=Grid((2.0, 3.0), (9.0,)), layers=3), 1.0)
    assert best.thresholds == Thresholds(3.0, 0.0)


def test_layers_that_save_nothing_stay() -> None:
    class Pages(Costs):
        def candidate(self, pair: Thresholds) -> Candidate:
            found = super().candidate(pair)
            # only the first layer gives a page back
            first = pair.alpha_high[0] if isinstance(pair.alpha_high, tuple) else pair.alpha_high
            return Candidate(found.thresholds, round(1000 - first), 1 - first / 1000, found.loss)

    found = sweep(Pages(3, (0.1,) * 3), limit=0.85, grid=Grid((2.0, 3.0), (9.0,)), layers=3)
    assert cheapest(found, 0.85).thresholds == Thresholds((3.0, 2.0, 2.0), 0.0)


def test_failures_are_neither_chosen_nor_closest() -> None:
    failed = Candidate(Thresholds(1.0, 0.0), error="no")
    good = Candidate(Thresholds(2.0, 0.0), 10, 0.5, 0.2)
    assert cheapest([failed, good], 1.0) is good and closest([failed, good]) is good
    assert cheapest([failed], 1.0) is None and closest([failed]) is None
    same = Candidate(Thresholds(3.0, 0.0), 10, 0.5, 0.1)
    assert cheapest([good, same], 1.0) is same


def test_table() -> None:
    found = [
        Candidate(Thresholds(1.0, 0.0), 50, 0.5, 0.001),
        Candidate(Thresholds((1.0, 2.0, 2.0), (0.0, 0.0, 0.02)), 40, 0.4, 0.002),
        Candidate(Thresholds(2.0, 0.0), 30, 0.3, 0.5),
        Candidate(Thresholds(3.0, 0.0), error="out of memory"),
    ]
    assert table(found, 0.01, "KL").splitlines()[2:] == [
        "| 1 | 0 | 50.0% | 0.0010 |  |",
        "| 1, 2 in 2 of 3 layers | 0, 0.02 in layer 2 | 40.0% | 0.0020 | chosen |",
        "| 2 | 0 | 30.0% | 0.5000 | too much |",
        "| 3 | 0 | - | - | failed: out of memory |",
    ]


# the command


def command(output: Path, *more: str) -> int:
    arguments = ["--model", str(TINY_LM), "--output", str(output), "--dtype", "float32", "--quiet", *more]
    return main(["calibrate", *arguments])


ON_TEXT = ("--text", str(TEXT), "--documents", "2", "--length", str(LENGTH), "--alpha-high", "1,4", "--alpha-low", ".1")


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibrated")
    assert command(folder, *ON_TEXT, "--max-kl", "10") == 0
    return folder


@torch.no_grad()
def measured_by_hand(config: DiffKVConfig) -> tuple[int, float, float]:
    """Bytes of both documents' caches, to a dense cache's, and mean KL, straight from the model and the cache."""
    model = AutoModelForCausalLM.from_pretrained(TINY_LM, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(TINY_LM)(TEXT.read_text() + "\n\n", add_special_tokens=False).input_ids
    held, whole, divergences = 0, 0, []
    for index in range(2):
        part = torch.tensor([ids[index * (LENGTH + CONTINUED) :][: LENGTH + CONTINUED]])
        model.set_attn_implementation("sdpa")
        dense = model(part[:, :-1]).logits[0, LENGTH:].log_softmax(-1)
        model.set_attn_implementation("diffkv")
        cache = DiffKVCache(model.config, config)
        model(part[:, :LENGTH], **passing(cache))
        held += cache.memory().bytes
        whole += LENGTH * LAYERS * 2 * 2 * 64 * 4
        mine = model(part[:, LENGTH:-1], **passing(cache)).logits[0].log_softmax(-1)
        divergences.append((dense.exp() * (dense - mine)).sum(-1))
    return held, held / whole, float(torch.cat(divergences).mean())


def test_a_calibrated_configuration(calibrated: Path) -> None:
    config = DiffKVConfig.from_pretrained(calibrated)
    block = config.calibration
    assert block["model"] == str(TINY_LM) and block["dtype"] == "float32" and block["limit"] == {"kl": 10.0}
    assert (block["text"], block["documents"], block["length"], block["continued"]) == (str(TEXT), 2, LENGTH, CONTINUED)
    assert block["versions"]["transformers"] and len(block["digest"]) == 16
    tried = [(each["alpha_high"], each["alpha_low"]) for each in block["candidates"]]
    assert tried == [(1.0, 0.0), (4.0, 0.0), (4.0, 0.1)]
    assert (
        (config.alpha_high, config.alpha_low)
        == (4.0, 0.1)
        == tuple(block["chosen"][name] for name in ("alpha_high", "alpha_low"))
    )
    for figures in block["candidates"]:
        thresholds = {name: figures[name] for name in ("alpha_high", "alpha_low")}
        held, ratio, kl = measured_by_hand(DiffKVConfig(**thresholds))
        assert figures["bytes"] == held and figures["ratio"] == pytest.approx(ratio)
        assert figures["kl"] == pytest.approx(kl, rel=1e-3)
    assert config == DiffKVConfig(alpha_high=4.0, alpha_low=0.1)


def test_a_calibrated_configuration_is_a_method(calibrated: Path, tmp_path: Path) -> None:
    model_config = AutoConfig.from_pretrained(TINY_LM)
    method = get_method(f"diffkv:config={calibrated}+window=32")
    assert method.config_for(model_config) == DiffKVConfig(alpha_high=4.0, alpha_low=0.1, window=32)
    with pytest.raises(EvaluationError, match=f"{CONFIG_NAME} does not exist"):
        get_method(f"diffkv:config={tmp_path}")


def test_what_was_measured_is_not_measured_again(
    calibrated: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kls = sorted(each["kl"] for each in DiffKVConfig.from_pretrained(calibrated).calibration["candidates"])
    records = (calibrated / "records.jsonl").read_text()

    def measure(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(runner._Runner, "run", measure)
    # another limit needs no further measurement, as long as it takes another path through the same candidates
    assert command(calibrated, *ON_TEXT, "--max-kl", str(kls[-1])) == 0
    assert command(calibrated, *ON_TEXT, "--max-kl", str(kls[0] / 2)) == 1
    output = capsys.readouterr()
    assert "no setting is good enough: the best is alpha_high=1, alpha_low=0 with KL" in output.err
    assert "| 1 | 0 |" in output.out and "too much" in output.out
    assert not (calibrated / CONFIG_NAME).exists()
    assert (calibrated / "records.jsonl").read_text() == records
    assert command(calibrated, *ON_TEXT, "--max-kl", "10") == 0


def test_other_settings_need_another_folder(calibrated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(calibrated, *ON_TEXT, "--dtype", "bfloat16") == 2
    assert "holds a run with dtype='float32', not 'bfloat16'" in capsys.readouterr().err


def test_a_task_and_layers_by_themselves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--task", "text", "--documents", "1", "--length", "150", "--max-loss", "0.001", "--per-layer"]
    arguments += ["--alpha-high", "1,9", "--alpha-low", ".5", "--method", "diffkv:window=32"]
    assert command(tmp_path, *arguments) == 0
    config = DiffKVConfig.from_pretrained(tmp_path)
    block = config.calibration
    assert block["task"] == "text" and "text" not in block and config.window == 32
    assert block["limit"] == {"kl": 0.001} and block["chosen"]["kl"] <= 0.001
    by_layer = [each for each in block["candidates"] if isinstance(each["alpha_high"], list)]
    assert len(by_layer) >= LAYERS and all(len(each["alpha_high"]) == LAYERS for each in by_layer)
    good = [each for each in block["candidates"] if each["kl"] <= 0.001]
    assert block["chosen"]["bytes"] == min(each["bytes"] for each in good)
    assert "in layer 0" in capsys.readouterr().out


class Facts(AskingTask):
    """Numbers that tiny-lm is asked for; or, of another kind, that no prompt holds."""

    known = True
    count = 1

    def documents(self, source: Source) -> list[Document]:
        facts = {key: f"{1000 + 37 * index}" for index, key in enumerate(("red", "oak", "sky", "tin", "fox"))}
        stated = "".join(f"@{key}={value if self.known else '----'}\n    some filler\n" for key, value in facts.items())
        questions = tuple((encode(source.tokenizer, f"?{key}="), encode(source.tokenizer, facts[key])) for key in facts)
        return [Document("facts", tuple(source.tokenizer(stated).input_ids), questions)]


class NoFacts(Facts):
    known = False


def test_losses_of_a_task_are_below_the_dense_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    TASKS.names()
    monkeypatch.setitem(TASKS._entries, "facts", Facts)
    monkeypatch.setitem(TASKS._entries, "no-facts", NoFacts)
    grid = ["--method", "diffkv:K8V4/K1V1+window=8", "--alpha-high", "0,9", "--alpha-low", "8"]
    assert command(tmp_path / "a", "--task", "facts", "--max-loss", "0.01", *grid) == 0
    block = json.loads((tmp_path / "a" / CONFIG_NAME).read_text())["calibration"]
    assert block["limit"] == {"right_loss": 0.01} and block["chosen"]["alpha_high"] == 0.0
    records = [json.loads(line) for line in (tmp_path / "a" / "records.jsonl").read_text().splitlines()]
    right = {record["method"]: record["metrics"]["right"] for record in records}
    assert right["dense"][0] == right["dense"][1] >= 3
    coarse = next(right[method] for method in right if "alpha_high=9.0+" in method)
    assert [each["right_loss"] for each in block["candidates"]] == [0.0, 1 - coarse[0] / coarse[1]]
    assert coarse[0] < coarse[1]
    # another limit, the same records
    assert command(tmp_path / "a", "--task", "facts", "--max-loss", "1", *grid) == 0
    assert "loss of facts (right)" in capsys.readouterr().out

    assert command(tmp_path / "b", "--task", "no-facts", "--max-loss", "1", *grid) == 2
    assert "the dense cache gets nothing right in task 'no-facts', so nothing can be lost" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--max-loss", "1"], "--max-loss and --task must be given together"),
        (["--task", "text"], "--max-loss and --task must be given together"),
        (["--task", "text", "--max-loss", "1", "--text", "x"], "leave --text out"),
        (["--max-kl", "-1"], "a limit of -1.0 cannot be met"),
        (["--length", "0"], "'--length': 0 is too few; give at least 1."),
        (["--task", "text", "--max-loss", "1", "--max-kl", "1"], "with --task give --max-loss"),
        (["--method", "dense"], "--method dense: only diffkv"),
        (["--method", "leankv"], "--method leankv: only diffkv"),
        (["--method", "diffkv:wimdow=3"], "unknown option of a diffkv method 'wimdow': did you mean window"),
        ([*ON_TEXT[:4], "--length", "60"], "a prompt has 60 tokens, and 68 are held uncompressed anyway"),
        ([*ON_TEXT[:4], "--length", "4000"], "needs 4256 tokens but the model's max_position_embeddings is 4096"),
        ([*ON_TEXT[:2], "--documents", "1000"], "lower --length or --documents, or give a longer text"),
        (["--text", "no-such-file.txt"], "there is no such file"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(tmp_path / "new", *arguments) == 2
    output = capsys.readouterr().err.strip().splitlines()[-1]
    assert output.startswith("hf-diffkv: ") and message in output
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("values", ["", "a", "1,-2", "nan"])
def test_bad_grids(values: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(tmp_path, "--alpha-high", values) == 2
    assert "is not a list of numbers of at least 0" in capsys.readouterr().err
