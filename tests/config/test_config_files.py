"""Configurations in folders and on the Hub: the Hub's library against a small server that answers as the Hub does."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hub_stand_in import TOKEN, Handler, Hub
from tiny_models import tiny_model

from hf_diffkv import DiffKVConfig, Precision
from hf_diffkv.config.diffkv_config import with_calibration
from hf_diffkv.config.files import to_text
from hf_diffkv.heads.hub import CONFIG_NAME, QUERIES_NAME

ROOT = Path(__file__).parents[2]
CALIBRATION = {"model": "some/model", "limit": {"kl": 0.01}, "candidates": [{"alpha_high": 1.0, "kl": 0.003}]}


@pytest.fixture
def config() -> DiffKVConfig:
    return with_calibration(DiffKVConfig(low=Precision(4, 2, 2, 4), alpha_high=(3.0, 1.0), window=32), CALIBRATION)


def client(hub: Hub, home: Path, code: str, **environment: str) -> str:
    """Returns the output of a process that uses `hub`. An error is one line with its type and message."""
    program = (
        "import json\nfrom hf_diffkv import DiffKVConfig\n"
        f"try:\n    {code}\nexcept Exception as error:\n    print(type(error).__name__, error)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**hub.environment(home), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return result.stdout.removesuffix("\n")


def test_calibration_stays_with_a_configuration_in_a_folder(config: DiffKVConfig, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    values = json.loads((tmp_path / CONFIG_NAME).read_text())
    assert values["calibration"] == CALIBRATION and values["alpha_high"] == [3.0, 1.0]
    read = DiffKVConfig.from_pretrained(tmp_path)
    assert read == config and read.calibration == CALIBRATION
    assert copy.deepcopy(read).calibration == pickle.loads(pickle.dumps(read)).calibration == CALIBRATION


def test_a_changed_configuration_has_no_calibration(config: DiffKVConfig) -> None:
    changed = dataclasses.replace(config, window=64)
    assert changed.calibration is None and "calibration" not in json.loads(
        to_text(changed.to_dict(), changed.calibration)
    )
    assert DiffKVConfig().calibration is None
    plain = dataclasses.replace(config)
    assert plain == config and hash(plain) == hash(config) and "calibration" not in config.to_dict()


def test_files_of_windows_editors(config: DiffKVConfig, tmp_path: Path) -> None:
    (tmp_path / CONFIG_NAME).write_bytes(b"\xef\xbb\xbf" + config.to_json().replace("\n", "\r\n").encode())
    assert DiffKVConfig.from_pretrained(tmp_path) == config


def test_other_unknown_keys_are_refused(config: DiffKVConfig, tmp_path: Path) -> None:
    values = {**json.loads(to_text(config.to_dict(), config.calibration)), "alfa_high": 2.0}
    (tmp_path / CONFIG_NAME).write_text(json.dumps(values))
    with pytest.raises(ValueError, match=rf"{CONFIG_NAME}: unknown DiffKV config keys \['alfa_high'\]"):
        DiffKVConfig.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"unknown DiffKV config keys \['calibration'\]"):
        DiffKVConfig.from_dict(json.loads(to_text(config.to_dict(), config.calibration)))
    (tmp_path / CONFIG_NAME).write_text('{"calibration": 5}')
    with pytest.raises(ValueError, match=f"{CONFIG_NAME}.*calibration=5 must be a JSON object"):
        DiffKVConfig.from_pretrained(tmp_path)
    (tmp_path / CONFIG_NAME).write_text("{")
    with pytest.raises(ValueError, match=CONFIG_NAME):
        DiffKVConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("file", [CONFIG_NAME, "mine.json"])
def test_a_file_in_place_of_its_folder(
    file: str, config: DiffKVConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative paths look like ids on the Hub, which is not asked."""
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / file).write_text(config.to_json())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", None)
    with pytest.raises(FileNotFoundError, match=f"^'saved/{file}' is a file; give a folder"):
        DiffKVConfig.from_pretrained(f"saved/{file}")


def test_options_of_the_hub_without_the_hub_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="repo_id can only be used with push_to_hub=True|token can only be used with push_to_hub=True"
    ):
        DiffKVConfig().save_pretrained(tmp_path / "new", token="x")
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_pushed_configurations_come_back(hub: Hub, config: DiffKVConfig, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path / "saved")
    load = f"DiffKVConfig.from_pretrained({str(tmp_path / 'saved')!r})"
    push = f"print({load}.push_to_hub('org/name', token={TOKEN!r}, private=True).commit_url)"
    assert client(hub, tmp_path, push) == f"{hub.endpoint}/org/name/commit/0"
    assert hub.private == {"org/name"}
    (pushed,) = hub.repositories["org/name"].items()
    assert pushed == (CONFIG_NAME, (tmp_path / "saved" / CONFIG_NAME).read_bytes())
    # into a repository that exists
    again = (
        f"{load}.save_pretrained({str(tmp_path / 'again')!r}, push_to_hub=True, token={TOKEN!r}, repo_id='org/name')"
    )
    assert client(hub, tmp_path, again) == ""
    assert (tmp_path / "again" / CONFIG_NAME).is_file()
    assert set(hub.repositories["org/name"]) == {CONFIG_NAME}
    # with the moments of queries that calibrating left beside it
    (tmp_path / "again" / QUERIES_NAME).write_bytes(b"moments")
    assert client(hub, tmp_path, again) == ""
    pushed = {CONFIG_NAME: (tmp_path / "saved" / CONFIG_NAME).read_bytes(), QUERIES_NAME: b"moments"}
    assert hub.repositories["org/name"] == pushed

    fetch = "DiffKVConfig.from_pretrained('org/name', token={!r}, cache_dir={!r})"
    fetch = fetch.format(TOKEN, str(tmp_path / "cache"))
    found = f"config = {fetch}; print(config.to_json(), config.calibration == {CALIBRATION})"
    assert client(hub, tmp_path, found) == f"{config.to_json()} True"
    assert list((tmp_path / "cache").rglob(CONFIG_NAME))
    # what was downloaded needs no connection
    assert client(hub, tmp_path, found, HF_HUB_OFFLINE="1") == f"{config.to_json()} True"


@pytest.mark.slow
def test_a_model_of_the_hub_brings_its_configuration(hub: Hub, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    files = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    config = DiffKVConfig(head_precisions=(("K5V4", "K3V3"), ("K4V3", "K4V3")), window=9)
    hub.repositories["org/without"] = files
    hub.repositories["org/with"] = {**files, CONFIG_NAME: to_text(config.to_dict(), None).encode()}
    cache = "from transformers import AutoModelForCausalLM as A; from hf_diffkv import DiffKVCache; "
    cache += "print(DiffKVCache(A.from_pretrained('org/{}')).config.to_json())"
    for offline in ({}, {"HF_HUB_OFFLINE": "1"}):
        assert client(hub, tmp_path, cache.format("with"), **offline) == config.to_json()
        assert client(hub, tmp_path, cache.format("without"), **offline) == DiffKVConfig.preset("balanced").to_json()
    assert hub.fetched.count(("org/with", CONFIG_NAME)) == 1


@pytest.mark.slow
def test_a_model_that_was_asked_for_before_its_download(hub: Hub, tmp_path: Path) -> None:
    """Nobody knows of its configuration then, which is found once the model is there."""
    files = {"config.json": b"{}", CONFIG_NAME: DiffKVConfig(window=7).to_json().encode()}
    hub.repositories["org/name"] = files
    ask = "print(DiffKVConfig.for_model('org/name').window); "
    download = "from huggingface_hub import hf_hub_download as get; get('org/name', 'config.json'); "
    assert client(hub, tmp_path, ask + download + ask) == f"{DiffKVConfig().window}\n7"


@pytest.mark.slow
def test_a_hub_that_does_not_answer_is_asked_once(hub: Hub, tmp_path: Path) -> None:
    """The Hub's library waits between its attempts, half a minute altogether."""
    hub.repositories["org/name"] = {"config.json": b"{}"}
    assert (
        client(hub, tmp_path, "from huggingface_hub import hf_hub_download as get; get('org/name', 'config.json')")
        == ""
    )
    ask = "import time; time.sleep = None; print(DiffKVConfig.for_model('org/name').window)"
    assert client(hub, tmp_path, ask, HF_ENDPOINT="http://127.0.0.1:9") == f"{DiffKVConfig().window}"


def test_a_cache_of_the_hub_that_cannot_be_written(hub: Hub, tmp_path: Path) -> None:
    hub.repositories["org/name"] = {CONFIG_NAME: DiffKVConfig().to_json().encode()}
    (tmp_path / "file").touch()
    read = f"DiffKVConfig.from_pretrained('org/name', cache_dir={str(tmp_path / 'file')!r})"
    said = client(hub, tmp_path, read)
    assert said.startswith(f"OSError cannot write {CONFIG_NAME} of org/name into the Hub's cache (")
    assert "cache_dir" in said


def test_the_name_of_the_folder_is_that_of_the_repository(hub: Hub, tmp_path: Path) -> None:
    folder = str(tmp_path / "my-config")
    save = f"DiffKVConfig(window=5).save_pretrained({folder!r}, push_to_hub=True)"
    assert client(hub, tmp_path, save, HF_TOKEN=TOKEN) == ""
    assert json.loads(hub.repositories["me/my-config"][CONFIG_NAME])["window"] == 5


@pytest.mark.slow
def test_revisions(hub: Hub, tmp_path: Path) -> None:
    content = to_text(DiffKVConfig(window=7).to_dict(), None).encode()
    hub.repositories["org/name"] = {CONFIG_NAME: content}
    revision = hashlib.sha1(content).hexdigest()
    read = "print(DiffKVConfig.from_pretrained('org/name', revision={!r}).window)"
    assert client(hub, tmp_path, read.format(revision)) == "7"
    expected = "FileNotFoundError org/name on the Hub has no revision 'v2'; see its branches, tags and commits."
    assert client(hub, tmp_path, read.format("v2")) == expected


def test_what_is_not_there(hub: Hub, tmp_path: Path) -> None:
    hub.repositories |= {"org/empty": {}, "org/private": {CONFIG_NAME: DiffKVConfig().to_json().encode()}}
    hub.private.add("org/private")

    def read(name: str, **environment: str) -> str:
        return client(hub, tmp_path, f"DiffKVConfig.from_pretrained({name!r})", **environment)

    expected = f"FileNotFoundError org/empty on the Hub has no {CONFIG_NAME}; use DiffKVConfig.for_model, or write"
    assert read("org/empty").startswith(expected)
    for name in ("org/missing", "org/private"):
        expected = (
            f"FileNotFoundError {name!r} is neither a folder nor a repository on the Hub that you may read; check"
        )
        assert read(name).startswith(expected)
    assert read("org/private", HF_TOKEN=TOKEN) == ""
    expected = f"FileNotFoundError {CONFIG_NAME} of org/missing is not in the Hub's cache, and the Hub was not queried"
    assert read("org/missing", HF_HUB_OFFLINE="1").startswith(expected)
    expected = "FileNotFoundError '/no/such/folder' is neither a folder nor the id of a Hub repository; write "
    assert read("/no/such/folder").startswith(expected)


def test_downloads_that_break_off(hub: Hub, tmp_path: Path) -> None:
    files = {CONFIG_NAME: DiffKVConfig().to_json().encode(), QUERIES_NAME: b"moments"}
    hub.repositories["org/name"] = files
    hub.cut_off = {("org/name", name) for name in files}
    # the Hub's library waits between its attempts
    at_once = "import time; time.sleep = lambda seconds: None; from hf_diffkv.heads.hub import configuration, file_of; "
    read = f"{at_once}print(file_of('org/name', 'main', {QUERIES_NAME!r})); DiffKVConfig.from_pretrained('org/name')"
    found = client(hub, tmp_path, read)
    assert found.startswith(f"None\nOSError cannot download {CONFIG_NAME} of org/name (")
    hub.repositories["org/name"]["config.json"] = b"{}"
    ask = "from huggingface_hub import hf_hub_download as get; get('org/name', 'config.json'); "
    assert client(hub, tmp_path, f"{at_once}{ask}print(configuration('org/name'))") == "None"


@pytest.mark.slow
def test_what_may_not_be_written(hub: Hub, tmp_path: Path) -> None:
    def push(name: str, **environment: str) -> str:
        return client(hub, tmp_path, f"DiffKVConfig().push_to_hub({name!r})", **environment)

    expected = (
        "FileNotFoundError 'org/name' is not a repository on the Hub that you may write; check the name, and log in"
    )
    assert push("org/name").startswith(expected)
    assert push("org/name", HF_TOKEN="hf_of_somebody_else").startswith(expected)
    assert push("org/name", HF_HUB_OFFLINE="1").startswith("OSError cannot reach the Hub to write org/name (")
    assert push("a/b/c", HF_TOKEN=TOKEN).startswith("ValueError repo_id='a/b/c' is not a repository id; write OWNER/")
    assert not hub.repositories


@pytest.mark.slow
def test_the_page_of_a_proxy_in_place_of_the_hubs_answer(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def page(handler: Handler) -> None:
        handler.rfile.read(int(handler.headers["Content-Length"]))
        handler.answer(200, b"<html></html>")

    monkeypatch.setattr(Handler, "do_POST", page)
    found = client(hub, tmp_path, "DiffKVConfig().push_to_hub('org/name')", HF_TOKEN=TOKEN)
    assert found.startswith("OSError cannot reach the Hub to write org/name (")
