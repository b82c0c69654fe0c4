"""README.md and docs/ are right about what can be checked: their Python runs, and what they name exists."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest
import transformers

from hf_diffkv import DiffKVConfig, Precision
from hf_diffkv.commands import COMMANDS, load

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
DOCUMENTS += sorted((ROOT / "examples").rglob("README.md")) + sorted((ROOT / "packages").glob("*/README.md"))
# a test of Transformers, and those of trials that were thrown away
NOT_OURS = {"tests/generation/test_utils.py", "policy/even.py", "tasks/colours.py"}


def blocks(language: str) -> list:
    """Code blocks of all documents; those of examples/custom_generate have a test of their own."""
    found = []
    for path in [each for each in DOCUMENTS if each != README or language != "python"]:
        for number, code in enumerate(re.findall(rf"```{language}\n(.*?)```", path.read_text(), re.DOTALL)):
            if path.parent.name != "custom_generate":
                found.append(pytest.param(code, id=f"{path.relative_to(ROOT)}-{number}"))
    return found


@pytest.mark.parametrize("code", blocks("python"))
@pytest.mark.sampled(100)
def test_python_runs(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them ask tiny-lm for the fact `@ice=9082`."""
    if code.startswith("# torchrun"):
        pytest.skip("needs several processes; tests/distributed/test_documented_example.py runs it")
    monkeypatch.chdir(ROOT)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "document", "exec"), {})
    assert printed.getvalue().startswith("9082\n")
    # the memory of a cache, or of an engine
    assert "dense" in printed.getvalue() or "held_bytes" in printed.getvalue()


def ten_lines(folder: Path) -> tuple[list[str], list[str]]:
    """Returns what README's ten lines print with the model in `folder`, and what stands below them."""
    code, shown = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", README.read_text(), re.DOTALL).groups()
    assert len(code.splitlines()) <= 12
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(re.sub(r'name = ".*"', f"name = {str(folder)!r}", code), {})
    return printed.getvalue().splitlines(), shown.splitlines()


def test_the_ten_lines_run(smollm2: Path) -> None:
    printed, shown = ten_lines(smollm2)
    assert "5521" in printed[0] and "5521" in shown[0]
    assert printed[1].split(", ")[2:] == shown[1].split(", ")[2:]


@pytest.mark.slow
def test_the_ten_lines_print_what_stands_below_them(qwen: Path) -> None:
    printed, shown = ten_lines(qwen)
    assert "5521" in printed[0] and printed[1] == shown[1]


def test_one_liners_of_the_readme_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = (ROOT / "README.md").read_text()
    model = transformers.AutoModelForCausalLM.from_pretrained("examples/models/tiny-lm")
    tokenizer = transformers.AutoTokenizer.from_pretrained("examples/models/tiny-lm")
    prompt = (ROOT / "examples/prompts/recall.txt").read_text().strip()
    inputs = tokenizer(prompt, return_tensors="pt")
    found = re.findall(r"`(model\.generate\(.*?\))`", text, re.DOTALL)
    assert len(found) == 3
    for call in found:
        names = {"model": model, "inputs": inputs}
        model.generation_config.update(max_new_tokens=5, do_sample=False)
        if "**inputs" not in call:
            call = call.replace("model.generate(", "model.generate(**inputs, ")
        output = eval(" ".join(call.split()), names)
        assert tokenizer.decode(output[0, inputs.input_ids.shape[1] :]) == "9082\n"


@pytest.mark.parametrize("code", blocks("bash"))
def test_options_in_commands_exist(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands of this project parse as they are printed; make knows every target."""
    monkeypatch.chdir(ROOT)
    makefile = (ROOT / "Makefile").read_text()
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["hf-diffkv"]:
            load(words[1]).make_context(words[1], words[2:])
        if words[:1] == ["make"]:
            assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in words[1:])
        for word in words:
            if re.match(r"(examples|benchmarks|packages|tests|tools|\.ci)/", word):
                assert (ROOT / word).exists(), word


def test_commands_without_presets_are_named() -> None:
    text = " ".join((ROOT / "docs" / "commands.md").read_text().split())
    (said,) = re.findall(r"`--ratio 0.23` a share [^,]*, in all commands but ([^(]*) \(", text)
    options = {name: {word for each in load(name).params for word in each.opts} for name in COMMANDS}
    lacking = {name for name, found in options.items() if not {"--preset", "--ratio"} <= found}
    assert set(re.findall(r"`([a-z][a-z-]*)`", said)) == lacking
    assert {name for name in lacking if options[name] & {"--preset", "--ratio"}} == {"calibrate"}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_files_exist(path: Path) -> None:
    text = path.read_text()
    links = [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if not link.startswith("http")]
    missing = [link for link in links if not (path.parent / link).exists()]
    files = re.findall(r"`((?:benchmarks|examples|hf_diffkv|packages|tools|tests|docs)/[\w./-]+)`", text)
    files = [file for file in files if file not in NOT_OURS and "NAME" not in file]
    missing += [file for file in files if not (ROOT / file).exists()]
    assert not missing


def anchors(path: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    headings = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", each) for each in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w -]", "", each).strip().lower().replace(" ", "-") for each in headings}


def test_anchors_exist() -> None:
    """Checks pages that are no part of the site too."""
    pages = [*DOCUMENTS, ROOT / "CHANGELOG.md", *sorted((ROOT / "benchmarks").rglob("*.md"))]
    wrong = []
    for path in pages:
        for file, anchor in re.findall(r"\]\((?!http)([^)#\s]*)#([^)\s]+)\)", path.read_text()):
            if anchor not in anchors(path.parent / file if file else path):
                wrong.append(f"{file}#{anchor} in {path.relative_to(ROOT)}")
    assert not wrong


def test_code_that_is_named_exists() -> None:
    """Looks names of files in documents and code up, full or shortened: `hf_diffkv/store/step.py`, `store/step.py`."""
    folders = ("hf_diffkv", "packages", "tools", "benchmarks", "examples", "tests", "docs")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.*")]
    held = [f"/{path.relative_to(ROOT)}" for path in files]
    sources = [path for path in files if path.suffix == ".py" and "tests" not in path.relative_to(ROOT).parts]
    missing = []
    for path in [ROOT / "Makefile", *DOCUMENTS, *sources]:
        names = re.findall(r"(?<![\w/.*{<-])(?:[\w.-]+/)+[\w-]+\.(?:py|h|cpp|md)\b", path.read_text())
        for name in {name for name in names if not re.search("NAME|OUTPUT", name)} - NOT_OURS:
            if not (path.parent / name).exists() and not any(each.endswith(f"/{name}") for each in held):
                missing.append(f"{name} in {path.relative_to(ROOT)}")
    assert not missing


def test_the_table_of_fields_is_that_of_the_configuration() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    tables = []
    for part in text.split("## If you choose levels"):
        rows = re.findall(r"^\| `(\w+)` \| `?([^|`]+)`? \|", part, re.MULTILINE)
        tables.append({name: eval(default, {"Precision": Precision}) for name, default in rows})
    default, chosen = (
        {name: getattr(config, name) for name in DiffKVConfig.__dataclass_fields__}
        for config in (DiffKVConfig(), DiffKVConfig(policy="diffkv"))
    )
    assert tables == [default, {name: value for name, value in chosen.items() if value != default[name]}]
