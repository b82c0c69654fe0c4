"""Messages about missing packages."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hf_diffkv import extras

PACKAGE = Path(extras.__file__).parent


def test_a_checkout_is_installed_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert extras.install("plot") == "pip install -e '.[plot]'"
    assert extras.install("serve") == "pip install -e 'packages/serving'"
    monkeypatch.setattr(extras, "ROOT", tmp_path)
    monkeypatch.setattr(extras, "_installed_from", lambda: None)
    assert extras.install("plot") == "pip install 'hf-diffkv[plot]'"
    assert extras.install("serve") == "pip install 'hf-diffkv[serve]'"


def test_what_was_installed_from_a_checkout_is_completed_from_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`pip install .` leaves a record of the folder; an index need not have what is beside the library."""
    record, checkout = tmp_path / "hf_diffkv-0.1.0.dist-info", tmp_path / "my checkout"
    record.mkdir()
    checkout.joinpath("packages").mkdir(parents=True)
    record.joinpath("METADATA").write_text("Name: hf-diffkv\nVersion: 0.1.0\n")
    address = record / "direct_url.json"
    monkeypatch.setattr(extras, "ROOT", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    address.write_text(json.dumps({"url": checkout.as_uri(), "dir_info": {}}))
    assert extras.install("eval") == f"pip install '{checkout}/packages/evaluation[harness]'"
    assert extras.install("plot") == f"pip install '{checkout}/.[plot]'"
    # of an archive, of a folder that is gone
    for url in ("https://example.org/hf_diffkv-0.1.0.tar.gz", (tmp_path / "gone").as_uri()):
        address.write_text(json.dumps({"url": url}))
        assert extras.install("serve") == "pip install 'hf-diffkv[serve]'"


MISSING = """
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in ("hf_diffkv_serving", "hf_diffkv_demo", "hf_diffkv_evaluation"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Finder())
"""
BATCH = """
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
import hf_diffkv
sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
model = LlamaForCausalLM(LlamaConfig(**sizes))
model.generate_batch([[1, 2, 3]], generation_config=GenerationConfig(cache_implementation="diffkv", max_new_tokens=2))
"""
USES = {
    "import hf_diffkv; hf_diffkv.ray": "packages/serving[ray]",
    "from hf_diffkv.ray import generate": "packages/serving[ray]",
    "import hf_diffkv.lmcache": "packages/serving",
    "from hf_diffkv.cli import main; raise SystemExit(main(['serve', 'tiny-lm']))": "packages/serving",
    "from hf_diffkv.cli import main; raise SystemExit(main(['demo']))": "packages/demo",
    "from hf_diffkv.cli import main; raise SystemExit(main(['evaluate', '--list']))": "packages/evaluation",
    "from hf_diffkv.cli import main; raise SystemExit(main(['bench', '--model', 'tiny-lm']))": "packages/evaluation",
    "from hf_diffkv.cli import main; raise SystemExit(main(['lm-eval', 'run']))": "packages/evaluation[harness]",
    "import hf_diffkv; hf_diffkv.plot.quality": "packages/evaluation",
    "import hf_diffkv; hf_diffkv.plot.speed": "packages/evaluation",
    "import hf_diffkv; hf_diffkv.plot.text": "packages/demo",
    BATCH: "packages/serving",
}


@pytest.mark.parametrize("code, folder", USES.items(), ids=range(len(USES)))
def test_what_needs_another_distribution_says_which(code: str, folder: str) -> None:
    """Runs in a process that can import no other distribution."""
    done = subprocess.run([sys.executable, "-c", MISSING + code], cwd=PACKAGE.parent, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"is not installed: pip install -e '{folder}'." in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "package, code, remedy",
    [
        ("ray", "import runpy; runpy.run_path('examples/ray_answers.py')", "pip install -e 'packages/serving[ray]'."),
        ("lmcache", "from hf_diffkv import lmcache; lmcache.register()", "pip install lmcache."),
    ],
)
def test_what_needs_a_package_of_others_says_how_it_is_installed(package: str, code: str, remedy: str) -> None:
    without = f"import sys; sys.modules[{package!r}] = None; "
    done = subprocess.run([sys.executable, "-c", without + code], cwd=PACKAGE.parent, capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: ") and last.endswith(remedy), last


def test_other_errors_of_another_distribution_are_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken_beside.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_module'"):
        extras.import_extra("broken_beside", "serve")


def test_all_messages_say_it_alike() -> None:
    extra = re.compile(r"hf-diffkv\[")
    assert [path.name for path in PACKAGE.rglob("*.py") if extra.search(path.read_text())] == ["extras.py"]
