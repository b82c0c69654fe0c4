"""Wrong uses of every command: one clear line on stderr, the right exit code, and no wait for PyTorch."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import click
import pytest

from hf_diffkv import DiffKVConfig, __version__
from hf_diffkv.cli import main
from hf_diffkv.commands import COMMANDS, env, load
from hf_diffkv.commands.options import read_file
from hf_diffkv.native.library import instructions
from hf_diffkv.native.path import instructions_at
from hf_diffkv.running import models
from hf_diffkv.running.models import TINY_LM

TINY = ["--model", "tiny-lm"]
ROOT = Path(__file__).parents[2]

# found out before PyTorch is needed; None stands for a usage error of click's own words
QUICK = [
    (["genrate"], "there is no command 'genrate'; did you mean 'generate'?"),
    (["qqq"], "there is no command 'qqq'; choose from generate, chat, plan"),
    (["--verion"], "No such option '--verion'. Did you mean '--version'?"),
    (["generate"], "no PROMPT was given; give one, - to read it from stdin, or --example."),
    (["generate", "a", "--example"], "--example is a prompt; leave the other one out."),
    (["generate", "a", "--prompt", "b"], "give one of PROMPT, --prompt and --prompt-file."),
    (["generate", "--prompt", "a", "--prompt-file", "b"], "give one of PROMPT, --prompt and --prompt-file."),
    (["generate", "a", "b"], "Got unexpected extra argument"),
    (["generate", "--prompt"], "Option '--prompt' requires an argument."),
    (["generate", "--prompt-file", "no/such/file.txt"], "cannot read no/such/file.txt: No such file or directory."),
    (["generate", "--prompt-file", str(TINY_LM)], f"cannot read {TINY_LM}: Is a directory."),
    (["generate", "--prompt-file", str(TINY_LM / "model.safetensors")], "model.safetensors is not UTF-8 text."),
    (["generate", ""], "nothing to continue"),
    (["generate", "a", "--then", ""], "nothing to continue"),
    (["generate", "a\udcff"], "'[PROMPT]': it is not UTF-8 text."),
    (["generate", "a", "--then", "\udcff"], "'--then': it is not UTF-8 text."),
    (["chat", "--system", "\udcff"], "'--system': it is not UTF-8 text."),
    (["generate", "a", "--then"], "Option '--then' requires an argument."),
    (["generate", "a", "--max-new-tokens", "0"], "'--max-new-tokens': 0 is too few; give at least 1."),
    (["generate", "a", "--max-new-tokens", "many"], "'--max-new-tokens': 'many' is not a whole number."),
    (["generate", "a", "--high", "INT8"], "INT8: 'INT8' is not the name of a precision; write it as 'K8V4'"),
    (["generate", "a", "--low", "K9V4"], "K9V4: Precision.k_bits=9 is not supported"),
    (["generate", "a", "--alpha-low", "2"], "alpha_low=2.0 is above alpha_high=1.0"),
    (["generate", "a", "--alpha-high", "-1"], "alpha_high=-1.0 must be a number of at least 0"),
    (["generate", "a", "--preset", "smal"], "'--preset': there is no preset 'smal'; did you mean 'small'? Choose one"),
    (["serve", "tiny-lm", "--preset", "tiny"], "'--preset': there is no preset 'tiny'; choose one of 'quality', 'bal"),
    (["demo", "--preset", "Quality"], "there is no preset 'Quality'; did you mean 'quality'?"),
    (
        ["generate", "a", "--preset", "small", "--lossless"],
        "--lossless and --preset cannot be combined; leave one out.",
    ),
    (["chat", "--preset", "small", "--config", "x"], "--config and --preset cannot be combined; leave one out."),
    (
        ["verify", *TINY, "--preset", "small", "--high", "K8V4", "--alpha-low", "0", "--window", "9"],
        "--preset small chooses bits and levels; leave --alpha-low, --high out.",
    ),
    (
        ["inspect", "--config", "small"],
        "'small' is not a folder; did you mean --preset small (preset='small' in Python)?",
    ),
    (
        ["plan", *TINY, "--memory", "1GB", "--config", "Balancd"],
        "'Balancd' is not a folder; did you mean --preset balanced",
    ),
    (["generate", "a", "--alpha-high", "x"], "'--alpha-high': 'x' is not a valid float."),
    (["generate", "a", "--window", "0"], "'--window': 0 is too few; give at least 1."),
    (["generate", "a", "--sinks", "-1"], "'--sinks': -1 is too few; give at least 0."),
    (["generate", "a", "--max-bytes", "lots"], "'lots' is not a size; write 24GB, 512MiB or a number of bytes."),
    (["generate", "a", "--max-bytes", "101%"], "'101%' is not a share of the free memory; give more than 0%"),
    (["generate", "a", "--max-bytes", "0GB"], "'0GB' is less than a byte; give at least one."),
    (["generate", "a", "--lossless", "--high", "K8V4"], "--lossless stores everything as it is; leave --high out."),
    (["generate", "a", "--lossless", "--config", "x"], "--lossless and --config cannot be combined"),
    (["generate", "a", "--config", str(ROOT)], "diffkv_config.json does not exist"),
    (["generate", "a", "--temperature", "1"], "--temperature has no effect without --sample."),
    (["generate", "a", "--sample", "--top-p", "nan"], "'--top-p': nan is not in the range 0<x<=1."),
    (["generate", "a", "--sample", "--top-p", "2"], "'--top-p': 2.0 is not in the range 0<x<=1."),
    (["generate", "a", "--sample", "--temperature", "0"], "'--temperature': 0.0 is not in the range x>0."),
    (["generate", "a", "--sample", "--top-k", "0"], "'--top-k': 0 is too few"),
    (["generate", "a", "--seed", "x"], "'--seed': 'x' is not a valid integer."),
    (["generate", "a", "--system", "b"], "--system has no effect without --chat."),
    (["generate", "a", "--json", "--quiet"], "--quiet and --json cannot be combined"),
    (["generate", "a", "--dtype", "int8"], "'int8' is not one of 'auto', 'float32', 'bfloat16', 'float16'."),
    (["generate", "a", "--model", "smolm2"], "did you mean 'smollm2'?"),
    (["generate", "a", "--sampel"], "No such option '--sampel'."),
    (["chat", "--max-new-tokens", "-1"], "'--max-new-tokens': -1 is too few"),
    (["chat", "--top-p", "0.5"], "--top-p has no effect without --sample."),
    (["chat", "--plain", "--system", "a"], "--system has no effect with --plain."),
    (["chat", "--load", "no/such/folder"], "cannot read no/such/folder/talk.json: No such file or directory."),
    (["chat", "hello"], "Got unexpected extra argument"),
    (["plan", *TINY], "Missing option '--memory'."),
    (["plan", "--memory", "1GB"], "Missing option '--model'."),
    (["plan", *TINY, "--memory", "24 apples"], "'24 apples' is not a size"),
    (["plan", *TINY, "--memory", "24"], "'--memory': '24' is 24 bytes; write 24GB, or 24B if you mean so few."),
    (["plan", *TINY, "--memory", "1GB", "--batch", "0"], "'--batch': 0 is too few"),
    (["verify", *TINY, "--max-kl", "nan"], "'--max-kl': nan is not in the range x>=0."),
    (["plan", *TINY, "--memory", "1GB", "--high-share", "2"], "'--high-share': 2.0 is not in the range 0<=x<=1."),
    (["inspect", ""], "the prompt is empty; there is nothing to inspect."),
    (["inspect", "--model", "tinylm"], "did you mean 'tiny-lm'?"),
    (["verify"], "Missing option '--model'."),
    (["verify", *TINY, "--lossless"], "No such option '--lossless'."),
    (["verify", *TINY, "--max-kl", "-1"], "'--max-kl': -1.0 is not in the range x>=0."),
    (["verify", *TINY, "--continued", "1"], "'--continued': 1 is too few; give at least 2."),
    (["bench"], "Missing option '--model'."),
    (["bench", *TINY, "--steps", "0"], "'--steps': 0 is too few"),
    (["demo", "--port", "99999"], "--port 99999 is not a port; give one up to 65535."),
    (["serve"], "Missing argument 'MODEL'."),
    (["serve", "tinylm"], "did you mean 'tiny-lm'?"),
    (["serve", "tiny-lm", "--port", "99999"], "'--port': 99999 is not in the range 0<=x<=65535."),
    (["serve", "tiny-lm", "--max-bytes", "8GB", "--memory-share", "0.5"], "--max-bytes and --memory-share cannot be"),
    (["serve", "tiny-lm", "--memory-share", "1.5"], "'--memory-share': 1.5 is not in the range 0<x<=1."),
    (["serve", "tiny-lm", "--max-requests", "0"], "'--max-requests': 0 is too few; give at least 1."),
    (["serve", "tiny-lm", "--greedy", "--top-k", "3"], "--greedy and --top-k cannot be combined; leave one out."),
    (["serve", "tiny-lm", "--prefix-folder-bytes", "1GB"], "--prefix-folder-bytes has no effect without"),
    (["serve", "tiny-lm", "--lossless", "--low", "K4V2"], "--lossless stores everything as it is; leave --low out."),
    (
        ["serve", "tiny-lm", "--prefix-folder", ""],
        "'--prefix-folder': the path is empty; give one, or leave the option",
    ),
    (["serve", "tiny-lm", "--prefix-folder", __file__], f"--prefix-folder {__file__} is a file; give a folder"),
    (["generate", "a", "--save-cache", ""], "'--save-cache': the path is empty"),
    (["evaluate", *TINY, "--output", ""], "'--output': the path is empty"),
    (["env", "now"], "Got unexpected extra argument"),
    (["evaluate", *TINY], "Missing option '--output'."),
    (["evaluate", *TINY, "--output", "x", "--batch-size", "0"], "--batch-size was removed; tasks that generate"),
    (["evaluate", "--model", "gemma-270m", "--output", "x"], "did you mean 'gemma3-270m'?"),
    (["calibrate", *TINY, "--output", "x", "--alpha-high", "1,-2"], "'1,-2' is not a list of numbers of at least 0"),
    (["calibrate", *TINY, "--ratio", "0.2", "--documents", "2"], "but --documents measures thresholds"),
    (["calibrate"], "Missing option '--model'."),
]

# these load a configuration or a tokenizer, or ask PyTorch for a device
SLOW = [
    (["generate", "a", "--low", "K8V8", "--high", "K4V2"], 2, "swap the two precisions"),
    (["generate", "a" * 4050], 2, "max_position_embeddings is 4096; shorten the prompt"),
    (["generate", "a" * 2000, "--then", "b" * 1969], 2, "has 3969 tokens and 128 are to be generated"),
    (["generate", "a", "--chat"], 2, "--chat cannot be used with tiny-lm: the tokenizer has no chat template"),
    (["generate", "a", "--device", "abacus"], 2, "--device abacus cannot be used: "),
    (["generate", "a", "--device", "meta"], 2, "--device meta cannot be used: "),
    (["generate", "a", "--output", __file__], 2, f"cannot write to {__file__}: "),
    (["generate", "a", "--output", "/proc"], 2, "cannot write to /proc: "),
    (["generate", "a", "--model", "no/such/model/folder"], 2, "there is no folder 'no/such/model/folder'."),
    (["inspect", "a" * 4097], 2, "the prompt has 4097 tokens, but the model's max_position_embeddings is 4096"),
    (["inspect", "--model", str(ROOT / "docs"), "--quiet"], 2, "cannot load the model "),
    (["inspect", "--window", "9", "--high", "K5V4", "--low", "K5V4", "--quiet", "--max-bytes", "9B"], 0, ""),
    (["inspect", "a" * 200, *TINY, "--quiet", "--max-bytes", "1KB"], 1, "max_bytes=1000 cannot even hold"),
    (["verify", *TINY, "--length", "200", "--continued", "2", "--quiet", "--max-bytes", "1KB"], 1, "max_bytes=1000"),
    (["chat", *TINY, "--quiet"], 2, "tiny-lm cannot chat: the tokenizer has no chat template"),
    (["plan", *TINY, "--memory", "5MB"], 1, "the weights use 8.93 MB, which leaves nothing of 5.00 MB"),
    (["plan", *TINY, "--memory", "1GB", "--context", "5000"], 2, "--context 5000 is above the model's"),
    (
        ["verify", *TINY, "--window", "64", "--length", "64", "--quiet"],
        2,
        "the window of 64 and the sinks hold such a prompt",
    ),
    (["verify", *TINY, "--length", "4000", "--quiet"], 2, "add up to 4128 tokens"),
    (["verify", *TINY, "--text", "no.txt", "--quiet"], 2, "--text no.txt: there is no such file"),
    (["serve", "tiny-lm", "--max-length", "5000"], 2, "--max-length 5000 is above the model's max_position_embeddings"),
    (["serve", "tiny-lm", "--chat-template", "no.jinja"], 2, "cannot read no.jinja: No such file or directory."),
    (["serve", "tiny-lm", "--host", "no.such.host.invalid"], 2, "cannot listen on no.such.host.invalid:8000: "),
    (["serve", "tiny-lm", "--host", "a..b"], 2, "cannot listen on a..b:8000: "),
    (["serve", "tiny-lm", "--port", "0", "--max-bytes", "9KB", "--quiet"], 1, "max_bytes=9000"),
    (["bench", *TINY, "--context", "4095", "--quiet"], 2, "add up to 4113 tokens"),
    (["bench", *TINY, "--caches", "dens", "--quiet"], 2, "unknown cache 'dens': did you mean dense"),
    (["bench", *TINY, "--caches", "kvpress:knorm+0.5", "--quiet"], 2, "is measured by benchmarks/quality/peers.py"),
]


def name_of(case: tuple) -> str:
    return " ".join(case[0])[:50]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("arguments, code, said", [(a, 2, m) for a, m in QUICK] + SLOW, ids=map(name_of, QUICK + SLOW))
def test_a_wrong_use_gets_one_line(
    arguments: list[str], code: int, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == code
    printed = capfd.readouterr()
    if code == 0:
        return
    assert printed.out == ""
    *progress, line = printed.err.splitlines()
    assert line.startswith("hf-diffkv: ") and said in line and "Traceback" not in printed.err
    assert all(text.startswith(("loading ", "reading ")) for text in progress)
    assert not list(tmp_path.iterdir())


def test_serve_is_no_rank(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["serve", "tiny-lm"]) == 2
    assert "WORLD_SIZE=2" in capsys.readouterr().err


def test_an_empty_key_is_no_key(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HF_DIFFKV_API_KEY", "")
    assert main(["serve", "tiny-lm"]) == 2
    assert "the API key is empty; give --api-key or HF_DIFFKV_API_KEY one" in capsys.readouterr().err


def test_a_key_that_no_client_can_send(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    # as a file with a newline at its end has it; the other options are refused later
    monkeypatch.setenv("HF_DIFFKV_API_KEY", "secret\n")
    assert main(["serve", "tiny-lm", "--max-bytes=1GB", "--memory-share=0.5"]) == 2
    said = capsys.readouterr().err
    assert "the API key ends in white space" in said and "secret" not in said


@pytest.mark.skipif(sys.platform == "win32", reason="no two sockets have one address there")
def test_another_server_got_the_address(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Two servers may have one address until one of them listens, which here happens while the other loads."""
    load_model = models.load_model
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))

        def load_slowly(*args: Any) -> Any:
            other.listen()
            return load_model(*args)

        monkeypatch.setattr(models, "load_model", load_slowly)
        port = str(other.getsockname()[1])
        address = ["--host", "127.0.0.1", "--port", port]
        assert main(["serve", "tiny-lm", *address, "--max-bytes", "16MB", "--device", "cpu", "--quiet"]) == 1
    assert f"hf-diffkv: cannot listen on 127.0.0.1:{port}: Address already in use." in capfd.readouterr().err


@pytest.mark.parametrize("arguments", [["generate", "-"], ["chat", "--load", "nothing"], ["--version"]])
def test_closed_streams_are_empty(arguments: list[str]) -> None:
    """Services and schedulers may start a program without any of the three."""
    program = f"import sys, os; from hf_diffkv.cli import main; os._exit(main({arguments}))"
    for closed in ("<&-", ">&- 2>&-", "<&- >&- 2>&-"):
        given = ["sh", "-c", f'exec "$0" "$@" {closed}', sys.executable, "-c", program]
        result = subprocess.run(
            given, stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
        )
        assert result.returncode == (0 if arguments == ["--version"] else 2), result
        assert "Traceback" not in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("alone", [["--no-compare"], []])
def test_characters_that_stdout_lacks_are_escaped(alone: list[str], smollm2: Path) -> None:
    """Pipes of Windows and pure ASCII locales have no room for every character."""
    text = "Le gar\u00e7on a d\u00e9j\u00e0 mang\u00e9 \u00e0 No\u00ebl"
    prompt = f'Repeat this French sentence: "{text}". Say it again and again'
    options = ["--chat", "--max-new-tokens", "12", "--device", "cpu", "--quiet", *alone]
    command = [sys.executable, "-m", "hf_diffkv", "generate", prompt, "--model", str(smollm2), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    # which words have them differs between processors
    assert re.search(r"\w\\x[c-f][0-9a-f]", result.stdout) and result.stdout.isascii()


def test_there_are_enough_of_them() -> None:
    assert len(QUICK) + len(SLOW) >= 60
    used = {arguments[0] for arguments, *_ in QUICK + SLOW}
    assert set(COMMANDS) - used == {"lm-eval"}, "lm-eval hands everything over"


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "lm-eval"])
def test_each_option_is_there_once(name: str) -> None:
    options = [option for parameter in load(name).params for option in parameter.opts]
    assert len(options) == len(set(options)), sorted(options)


def test_help_and_usage_errors_load_no_pytorch() -> None:
    """Checks that packages that take seconds to import are not imported."""
    cases = [arguments for arguments, _ in QUICK]
    cases += [["--help"], ["--version"], ["env"], *([name, "--help"] for name in COMMANDS if name != "lm-eval")]
    program = (
        "import json, sys; from hf_diffkv.cli import main\n"
        "for case in json.loads(sys.argv[1]):\n"
        "    main(case)\n"
        "    heavy = {'torch', 'transformers', 'numpy', 'huggingface_hub', 'tokenizers'} & set(sys.modules)\n"
        "    assert not heavy, (case, heavy)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, json.dumps(cases)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-2000:]


@pytest.mark.parametrize("columns", ["40", "80", "200"])
@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_is_complete_and_fits(
    name: str, columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    if name == "lm-eval":
        pytest.skip("shows the help of the harness")
    assert main([*([name] if name else []), "--help"]) == 0
    text = capsys.readouterr().out
    # a list with commas cannot be broken
    assert all(len(line) <= int(columns) or len(line.split()) == 1 for line in text.splitlines())
    words = " ".join(text.split())
    for command, summary in COMMANDS.items() if not name else ():
        assert command in words and summary in words
    for option in load(name).params if name else ():
        if isinstance(option, click.Option) and not option.hidden:
            assert option.help and option.opts[0] in words


def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("Usage: hf-diffkv") and "generate" in printed.err
    tried = [line.split("  ")[1] for line in printed.err.splitlines() if line.startswith("  hf-diffkv ")]
    assert len(tried) == 3 and printed.err.index(tried[-1]) < printed.err.index("Commands:")
    for command in tried:
        _, name, *options = command.split()
        assert load(name).make_context(name, options).params.keys() >= {"model"}


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hf-diffkv {__version__}\n"


def test_env(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    assert main(["env"]) == 0
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["torch"] == torch.__version__
    assert lines["hf-diffkv"].startswith(__version__)
    assert {"python", "platform", "transformers", "triton", "accelerate"} <= set(lines)
    assert lines["cpu"] and int(lines["cores"].split()[0]) >= 1 and float(lines["memory"].split(" GB")[0]) > 0
    assert lines["native code"] == (instructions() or f"not built: {env.REINSTALL}")
    assert main(["env", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert [*again] == [*lines] and {**again, "memory": ""} == {**lines, "memory": ""}


def test_env_names_gpus(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And why there is no native code."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA A10, 23028 MiB, 550.90'\necho 'NVIDIA L4, 23034 MiB, 550.90'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert main(["env", "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)
    assert lines["cuda:0"] == "NVIDIA A10, 23028 MiB, driver 550.90" and lines["cuda:1"].startswith("NVIDIA L4")
    for content, said in (None, "not built"), ("no library", "lib.so"):
        if content is not None:
            (tmp_path / "lib.so").write_text(content)
        with pytest.raises(OSError, match=said):
            instructions_at(tmp_path / "lib.so")


@pytest.mark.parametrize(
    "text, size",
    [
        ("24GB", 24_000_000_000),
        ("1.5KiB", 1536),
        ("512mib", 512 << 20),
        ("7B", 7),
        ("1000000", 1_000_000),
        ("2 TB", 2 * 10**12),
    ],
)
def test_sizes(text: str, size: int) -> None:
    from hf_diffkv.commands.options import SIZE_TYPE

    assert SIZE_TYPE.convert(text, None, None) == size


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device", "folder/file"), "folder/file: No space left on device."),
        (OSError(28, "No space left on device"), "No space left on device."),
        (OSError("cannot write file: no"), "cannot write file: no."),
    ],
)
def test_errors_of_files_get_one_line(error: OSError, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    @click.command()
    def failing() -> None:
        raise error

    assert main([], failing) == 1
    assert capsys.readouterr().err == f"hf-diffkv: {said}\n"


def test_a_saved_configuration_that_is_broken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    DiffKVConfig().save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "diffkv_config.json").write_text("{}}")
    assert main(["generate", "a", "--config", str(tmp_path / "saved")]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("hf-diffkv: ") and "diffkv_config.json: " in line


@pytest.mark.parametrize("text", ["a\r\nb\r\n", "\ufeffa\r\nb", "\ufeffa\r\nb\r\n"])
def test_files_of_windows_editors(text: str, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(text.encode())
    assert read_file(str(path)) == "a\r\nb"


def test_warnings_are_a_line_without_their_place() -> None:
    shown = []

    @click.command
    def warns() -> None:
        shown.append(warnings.formatwarning("a disk is full", RuntimeWarning, "tiers.py", 3))

    before = warnings.formatwarning
    assert main([], warns) == 0
    assert shown == ["RuntimeWarning: a disk is full\n"] and warnings.formatwarning is before
