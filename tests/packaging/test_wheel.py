"""Released files: a wheel with native code that needs no checkout, and sources whose tests run."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import threading
import urllib.request
import zipfile
from pathlib import Path

import pytest
from hub_stand_in import Hub

from hf_diffkv.running.models import HUB_IDS

ROOT = Path(__file__).parents[2]
# seconds that a command may take; one that waits for somebody fails then
PATIENCE = 900


# in a process of its own: what other tests have imported may hide what setuptools brings along
ASK = """
import importlib.util, setuptools, sys
setuptools.setup = lambda **options: None
spec = importlib.util.spec_from_file_location("setup_of_this_project", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.manylinux(sys.argv[2], sys.argv[3].replace(" ", chr(0)).encode()))
"""


def tag(platform_name: str, strings: str) -> str:
    """The tag of a library with these strings in it."""
    pytest.importorskip("setuptools", minversion="77")
    command = [sys.executable, "-c", ASK, str(ROOT / "setup.py"), platform_name, f" {strings} "]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_tag_names_the_newest_glibc_that_is_asked_for() -> None:
    library = "GLIBC_2.9 GLIBC_2.27 GLIBC_2.3.4 GLIBCXX_3.4.30 CXXABI_1.3.7"
    assert tag("linux_x86_64", library) == "manylinux_2_27_x86_64"
    assert tag("linux_aarch64", library) == "manylinux_2_27_aarch64"
    # another C library, another system
    assert tag("linux_x86_64", "libc.musl") == "linux_x86_64"
    assert tag("macosx_14_0_arm64", library) == "macosx_14_0_arm64"


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ to build native code with")
needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="manylinux is for systems with glibc")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that a release is built from: the files of the checkout that git knows."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a checkout of git")
    folder = tmp_path_factory.mktemp("source") / "project"
    for name in tracked():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def tracked() -> list[str]:
    command = ["git", "-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return [name for name in listed if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def installed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but the installed wheels; what they depend on comes from the environment of the tests."""
    pytest.importorskip("setuptools", minversion="77")
    wheels, folder = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    # some optimisation, as what runs on it takes longer than the compiler
    environment = {**os.environ, "HF_DIFFKV_NATIVE_FLAGS": "-O1", "HF_DIFFKV_NATIVE_SETS": "avx2"}
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(wheels)]
    beside = [str(source / "packages" / name) for name in ("serving", "demo", "evaluation")]
    subprocess.run([*build, str(source), *beside], check=True, env=environment)
    found = {path.name.split("-")[0]: path for path in wheels.iterdir()}
    assert found.keys() == {"hf_diffkv", "hf_diffkv_serving", "hf_diffkv_demo", "hf_diffkv_evaluation"}
    wheel = found["hf_diffkv"]
    assert "-py3-none-manylinux_2_" in wheel.name and wheel.name.endswith(f"_{platform.machine()}.whl")
    with zipfile.ZipFile(wheel) as archive:
        # neither tests nor tools
        folders = {name.split("/")[0] for name in archive.namelist()}
    assert folders == {"hf_diffkv", f"{wheel.name.split('-py3')[0]}.dist-info"}
    subprocess.run(
        [*pip, "install", "--no-deps", "--no-index", "--target", str(folder), *map(str, found.values())], check=True
    )
    return folder


def run(installed: Path, folder: Path, *command: str, hub: Hub | None = None) -> str:
    """Returns the output of `command` in `folder`, which is not the checkout, with this Hub or none."""
    streams = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
    environment = environment_of(installed, folder, hub)
    done = subprocess.run(command, cwd=folder, env=environment, timeout=PATIENCE, **streams)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def open_page(installed: Path, folder: Path, *command: str, hub: Hub) -> str:
    """Starts `command`, returns the first response for its page to a browser, and ends it."""
    streams = {"stdout": subprocess.PIPE, "text": True, "stdin": subprocess.DEVNULL}
    process = subprocess.Popen(command, cwd=folder, env=environment_of(installed, folder, hub), **streams)
    late = threading.Timer(PATIENCE, process.kill)
    late.start()
    try:
        addresses = (re.match(r"Open (\S+) in a browser", line) for line in process.stdout)
        address = next((found[1] for found in addresses if found), None)
        assert address is not None, f"{command} ended without a page"
        with urllib.request.urlopen(address, timeout=60) as page:
            return page.read().decode()
    finally:
        late.cancel()
        process.terminate()
        process.communicate(timeout=60)


def environment_of(installed: Path, folder: Path, hub: Hub | None) -> dict[str, str]:
    home = folder / "home"
    online = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(home)} if hub is None else hub.environment(home)
    return {**online, "PYTHONPATH": str(installed)}


@needs_compiler
@needs_glibc
@pytest.mark.slow
def test_an_installed_wheel_loads_its_library(installed: Path, tmp_path: Path) -> None:
    code = "from hf_diffkv.native import library; print(library.PATH, library.instructions())"
    path, instructions = run(installed, tmp_path, sys.executable, "-c", code).split()
    assert Path(path).is_relative_to(installed) and instructions != "None"


# as the README does it, with a folder in the place of a Hub id
TEN_LINES = """
import hf_diffkv
from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = AutoModelForCausalLM.from_pretrained("model"), AutoTokenizer.from_pretrained("model")
inputs = tokenizer(open("prompt.txt").read().strip(), return_tensors="pt")
options = {"max_new_tokens": 4, "do_sample": False}
cache = hf_diffkv.DiffKVCache(model)
output = model.generate(**inputs, cache=cache, **options)
by_folder = model.generate(**inputs, custom_generate="custom", trust_remote_code=True, **options)
assert by_folder.tolist() == output.tolist()
print(tokenizer.decode(output[0, inputs.input_ids.shape[1] :]), cache.memory(), hf_diffkv.__file__, sep="\\n")
"""


@needs_compiler
@needs_glibc
@pytest.mark.slow
def test_an_installed_wheel_does_without_a_checkout(installed: Path, tmp_path: Path) -> None:
    """The library, the command, the folder for `custom_generate` and the Space, elsewhere."""
    shutil.copytree(ROOT / "examples" / "models" / "tiny-lm", tmp_path / "model")
    shutil.copytree(ROOT / "examples" / "custom_generate", tmp_path / "custom")
    shutil.copy(ROOT / "examples" / "prompts" / "recall.txt", tmp_path / "prompt.txt")
    # what the last line of the prompt asks for
    answer = "9082"
    said, memory, place = run(installed, tmp_path, sys.executable, "-c", TEN_LINES).splitlines()
    assert said == answer and " dense (" in memory and Path(place).is_relative_to(installed)
    generate = "hf-diffkv generate --model model --prompt-file prompt.txt --max-new-tokens 4 --quiet"
    assert run(installed, tmp_path, *command(installed, generate)).strip() == answer
    assert run(installed, tmp_path, *command(installed, "hf-diffkv --version")).startswith("hf-diffkv ")
    assert (installed / "hf_diffkv" / "py.typed").is_file()
    shutil.copytree(ROOT / "examples" / "space", tmp_path / "space")
    space = [sys.executable, str(tmp_path / "space" / "app.py"), "--help"]
    assert "Serve a page on this machine" in run(installed, tmp_path, *space)
    if importlib.util.find_spec("gradio") is not None:
        page = (
            "import hf_diffkv_demo.page as page, hf_diffkv_demo.generation as generation; "
            "page.build(generation.Generator('model')); print(page.__file__)"
        )
        assert Path(run(installed, tmp_path, sys.executable, "-c", page).strip()).is_relative_to(installed)


@needs_compiler
@needs_glibc
@pytest.mark.slow
def test_the_first_lines_of_the_readme_need_the_wheel_and_the_hub_alone(
    installed: Path, tmp_path: Path, hub: Hub
) -> None:
    """Runs the lines unchanged. Ids of their models serve the files of tiny-lm and a chat template."""
    readme = (ROOT / "README.md").read_text()
    lines = re.search(r"```python\n(.*?)```", readme, re.DOTALL)[1]
    (name,) = re.findall(r'^name = "(.*)"$', lines, re.MULTILINE)
    files = {path.name: path.read_bytes() for path in (ROOT / "examples" / "models" / "tiny-lm").iterdir()}
    files["chat_template.jinja"] = b"{% for message in messages %}{{ message.content }}\n{% endfor %}"
    served = {name, HUB_IDS["smollm2"]}
    hub.repositories |= dict.fromkeys(served, files)

    (commands,) = re.findall(r"```bash\n(hf-diffkv .*?)```", readme, re.DOTALL)
    plan = next(line for line in commands.splitlines() if line.startswith("hf-diffkv plan "))
    printed = run(installed, tmp_path, *command(installed, plan), hub=hub)
    assert "DiffKV" in printed and {file for _, file in hub.fetched} == {"config.json"}

    *said, memory = run(installed, tmp_path, sys.executable, "-c", lines, hub=hub).splitlines()
    assert len("\n".join(said)) > 0 and "model.safetensors" in {file for _, file in hub.fetched}
    held, dense, share = re.match(r"([\d.]+) MB of ([\d.]+) MB dense \(([\d.]+)%; ", memory).groups()
    assert 0 < float(held) < 0.5 * float(dense) and float(share) < 50
    *lines, demo = commands.splitlines()
    for line in lines:
        run(installed, tmp_path, *command(installed, line), hub=hub)
    if importlib.util.find_spec("gradio") is not None:
        assert "DiffKV" in open_page(installed, tmp_path, *command(installed, demo), hub=hub)
    run(installed, tmp_path, *command(installed, "hf-diffkv inspect"), hub=hub)
    # nothing from elsewhere
    assert {repository for repository, _ in hub.fetched} == served


def command(installed: Path, line: str) -> list[str]:
    """A line of a document that begins with `hf-diffkv`, with the command of the wheel."""
    # tiny-lm does not take as long a document
    line = line.replace("examples/prompts/museum.txt", f"{ROOT}/examples/prompts/recall.txt")
    name, *arguments = shlex.split(line, comments=True)
    assert name == "hf-diffkv"
    return [sys.executable, str(installed / "bin" / name), *arguments]


@pytest.mark.slow
def test_the_tests_of_a_source_distribution_run(source: Path, tmp_path: Path) -> None:
    """It has every file of the checkout but those that only git and CI need."""
    pytest.importorskip("setuptools", minversion="77")
    code = f"import setuptools.build_meta as build; print(build.build_sdist({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(archive, tmp_path, filter="data")
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    missing = {name for name in tracked() if not (folder / name).is_file()}
    assert missing <= {".gitignore"}
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    tests = ["tests/config/test_config.py", "tests/pages/test_free_list.py", "tools/tests/test_lowest_versions.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-2000:]
