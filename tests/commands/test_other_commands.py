"""plan, chat, inspect, verify and bench: what they print, against caches and models asked directly."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from measured_heads import measured
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.cli import main
from hf_diffkv.compat import passing
from hf_diffkv.evaluation import verification
from hf_diffkv.heads.allocation import HEAD_LADDER
from hf_diffkv.heads.lookup import keep
from hf_diffkv.planning import ModelShape
from hf_diffkv.running.models import TINY_LM

TEXT = (TINY_LM.parents[1] / "prompts" / "recall.txt").read_text()
FACTS = "@oak=5305 @elm=1177 key_dim: int, value_dim: int @ash=8642 @oak=5305 @elm=1177 ?oak="


def found_by(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict:
    assert main([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


# plan


def test_plan_fits_and_not_one_token_more(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", "--model", "tiny-lm", "--memory", "12MB", "--batch", "2", "--context", "500"]
    found = found_by(capsys, *plan)
    weights = (TINY_LM / "model.safetensors").stat().st_size
    assert found["free"] == 12_000_000 - 1_200_000 - weights
    dense, fp8, diffkv = found["caches"]
    # 6 layers, 2 heads, keys and values of 64 elements in bfloat16
    token = 6 * 2 * 2 * 64 * 2
    assert (dense["cache"], dense["bytes_per_token"]) == ("dense, bfloat16", token)
    assert dense["longest_context"] == found["free"] // (2 * token)
    assert dense["largest_batch"] == found["free"] // (500 * token)
    assert fp8["longest_context"] == found["free"] // token
    shape = ModelShape.of(AutoModelForCausalLM.from_pretrained(TINY_LM).config, str(TINY_LM))
    longest = diffkv["longest_context"]
    sizes = [2 * shape.diffkv_bytes(tokens, DiffKVConfig.preset("balanced"), 1.0) for tokens in (longest, longest + 1)]
    assert sizes[0] <= found["free"] < sizes[1]
    assert diffkv["cache"] == "DiffKV, K5V4" and longest > dense["longest_context"]


def test_plan_says_when_heads_are_lowered(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", "--model", "tiny-lm", "--memory", "12MB", "--context", "500"]
    all_of_it = found_by(capsys, *plan)
    filling = all_of_it["until_full"]
    assert filling["max_bytes"] == all_of_it["free"] and (filling["precise"], filling["final"]) == ("K8V8", "K5V4")
    assert 0 < filling["lowering_begins"] < filling["room_ends"] <= all_of_it["caches"][-1]["longest_context"]
    half = found_by(capsys, *plan, "--max-bytes", "50%")["until_full"]
    assert half["max_bytes"] == all_of_it["free"] // 2 and half["room_ends"] < 0.6 * filling["room_ends"]
    assert found_by(capsys, *plan, "--max-bytes", "1.5MB")["until_full"]["max_bytes"] == 1_500_000
    assert found_by(capsys, *plan, "--low", "K2V1")["until_full"] is None
    assert main([*plan, "--max-bytes", "1.5MB", "--batch", "2"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "With a budget (max_bytes) of 1.50 MB, all tokens are K8V8 at first; from" in text
    assert "tokens of each of 2 requests on, heads are lowered to K5V4, and room ends at" in text
    assert main([*plan, "--max-bytes", "2MB"]) == 2
    assert "max_bytes=2000000 exceeds the" in " ".join(capsys.readouterr().err.split())
    assert main(["plan", "--model", "tiny-lm", "--memory", "1GB"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "all tokens are K8V8 up to the model's limit of 4,096; nothing is lowered." in text


@pytest.mark.parametrize("levels", [[], ["--high", "K8V4", "--low", "K4V2", "--high-share", "0.5"]])
def test_plan_keeps_caches_within_their_budget(levels: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", "--model", "tiny-lm", "--memory", "1GB", "--batch", "2", "--context", "500", *levels]
    dense, fp8, free = found_by(capsys, *plan)["caches"]
    budget = 1_500_000
    assert free["longest_context"] == 4096 and free["largest_batch"] > 500
    found = found_by(capsys, *plan, "--max-bytes", str(budget) + "B")["caches"]
    # dense caches have no such budget
    assert found[:2] == [dense, fp8]
    config = DiffKVConfig(high="K8V4", low="K4V2") if levels else DiffKVConfig(max_bytes=budget)
    shape = ModelShape.of(AutoModelForCausalLM.from_pretrained(TINY_LM).config, str(TINY_LM))
    longest, most = found[2]["longest_context"], found[2]["largest_batch"]
    sizes = [2 * shape.diffkv_bytes(tokens, config, 0.5) for tokens in (longest, longest + 1)]
    assert sizes[0] <= budget < sizes[1]
    each = shape.diffkv_bytes(500, config, 0.5)
    assert most == budget // each > 0


def test_plan_of_a_budget_below_the_windows(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", "--model", "tiny-lm", "--memory", "1GB", "--max-bytes", "50KB"]
    assert main([*plan, "--batch", "3"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "A budget (max_bytes) of 0.05 MB does not hold the windows and tables of each of 3 requests." in text
    assert found_by(capsys, *plan)["caches"][2]["longest_context"] == 0
    # which a real cache refuses
    model = AutoModelForCausalLM.from_pretrained(TINY_LM)
    ids = torch.zeros(1, 10, dtype=torch.int64)
    with pytest.raises(MemoryError, match="cannot even hold this cache's windows and tables"):
        model.generate(ids, max_new_tokens=2, cache_implementation="diffkv", cache_config={"max_bytes": 50_000})


def test_plan_marks_what_the_model_cannot_take(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["plan", "--model", "tiny-lm", "--memory", "1GB", "--low", "K2V1"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 40
    assert "DiffKV, K2V1" in text and "DiffKV, 50% K8V4" in text
    assert text.count("longest context: 4,096*") == 5 and "* the model's limit (4,096)" in text


def test_plan_predicts_and_draws_what_heads_lose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_DIFFKV_CACHE", str(tmp_path / "kept"))
    plan = ["plan", "--model", "tiny-lm", "--memory", "1GB"]
    assert found_by(capsys, *plan)["predicted_loss"] == []
    assert main([*plan, "--plot", str(tmp_path / "loss.png")]) == 2
    assert "this model's heads were not measured" in capsys.readouterr().err
    keep(measured(AutoModelForCausalLM.from_pretrained(TINY_LM)))
    found = found_by(capsys, *plan, "--preset", "small")
    assert "by head" in found["caches"][-1]["cache"]
    ladder = [point for point in found["predicted_loss"] if point["precision"]]
    assert [point["precision"] for point in ladder] == list(HEAD_LADDER)
    # made-up losses: of 6 layers with 2 heads the first loses a hundred times what the other does
    assert ladder[0]["one_for_all"] == pytest.approx(6 * 2 * (1e-2 + 1e-4), rel=1e-3)
    assert ladder[1]["each_head"] < 0.6 * ladder[1]["one_for_all"]
    assert main([*plan, "--plot", str(tmp_path / "loss.png")]) == 0
    text = capsys.readouterr().out
    assert f"{ladder[1]['each_head']:.4f}" in text and text.count("%*") == 1
    assert (tmp_path / "loss.png").stat().st_size > 10_000
    assert main([*plan, "--plot", str(tmp_path / "loss.odd")]) == 2
    assert "loss.odd' must end in .png, .svg, .pdf." in capsys.readouterr().err
    assert main([*plan, "--plot", "/dev/null/loss.png"]) == 1
    assert "hf-diffkv: --plot /dev/null/loss.png: Not a directory.\n" in capsys.readouterr().err


# chat


def talk(monkeypatch: pytest.MonkeyPatch, lines: list[str], *options: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return main(["chat", "--model", "tiny-lm", "--plain", "--max-new-tokens", "5", "--quiet", *options])


def answers_by_hand() -> tuple[list[str], DiffKVCache]:
    tokenizer, model = AutoTokenizer.from_pretrained(TINY_LM), AutoModelForCausalLM.from_pretrained(TINY_LM)
    cache, text, answers = DiffKVCache(model.config), "", []
    for turn in (FACTS, "?ash=", "?elm="):
        ids = tokenizer(text + turn, return_tensors="pt")
        output = model.generate(**ids, **passing(cache), max_new_tokens=5, do_sample=False)[0]
        answers.append(tokenizer.decode(output[ids.input_ids.shape[1] :]))
        text = tokenizer.decode(output)
    return answers, cache


def test_a_talk_on_one_cache_that_is_saved_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers, cache = answers_by_hand()
    assert answers == ["5305\n", "8642\n", "1177\n"]
    saved = str(tmp_path / "saved")
    assert talk(monkeypatch, [FACTS, "", "?ash=", f"/save {saved}", "/reset", "/memory", "/quit", "?ash="]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert lines == ["5305", "8642", f"Wrote {saved}.", "Everything is forgotten.", "The cache is empty."]
    assert talk(monkeypatch, ["?elm=", "/memory", "/levels", "/help"], "--load", saved) == 0
    text = capsys.readouterr().out
    held = cache.memory()
    assert text.startswith("1177\n")
    assert f"{cache.get_seq_length()} tokens use {held.bytes / 1e6:.2f} MB, {held.ratio:.1%}" in " ".join(text.split())
    layer = held.layers[2]
    stored, window = sum(layer.high) + sum(layer.low), sum(layer.window)
    row = next(line for line in text.splitlines() if line.startswith("layer 2"))
    # every token of a head has the same precision: there are no levels
    assert row.split()[2:-1] == [f"{count / (stored + window):.0%}" for count in (stored, window)]
    assert sum(layer.pruned) == 0 and " high" not in text and " low" not in text
    assert "/quit" in text


@pytest.mark.parametrize(
    "line, said",
    [
        ("/nope", "there is no command /nope"),
        ("/save", "/save needs a folder."),
        ("/save /dev/null/saved", "cannot save to /dev/null/saved: Not a directory."),
        ("a" * 4096, "the conversation has"),
        ("a\udcff", "stdin is not UTF-8 text."),
    ],
)
def test_a_script_ends_at_what_cannot_be_done(
    line: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(monkeypatch, [line, "?oak="]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith(f"hf-diffkv: {said}") and printed.err.count("\n") == 1


def test_a_script_is_utf_8_in_every_locale(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = io.TextIOWrapper(io.BytesIO("/caf\u00e9\n".encode()), encoding="ascii", errors="surrogateescape")
    monkeypatch.setattr("sys.stdin", lines)
    assert main(["chat", "--model", "tiny-lm", "--plain", "--quiet", "--device", "cpu"]) == 1
    assert "there is no command /caf\u00e9" in capsys.readouterr().err


class TypedLines(io.StringIO):
    """Input that counts as a terminal's."""

    def isatty(self) -> bool:
        return True


def test_an_answer_that_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The budget is full before the answer ends."""
    lines = [FACTS, "?ash=", f"/save {tmp_path / 'saved'}", "/reset", "/memory"]
    monkeypatch.setattr("sys.stdin", TypedLines("".join(f"{line}\n" for line in lines)))
    options = ["--plain", "--max-new-tokens", "400", "--max-bytes", "450KB", "--quiet"]
    assert main(["chat", "--model", "tiny-lm", "--preset", "balanced", *options]) == 0
    printed = capsys.readouterr()
    said = " ".join(printed.err.split())
    assert said.count("450000 is full: with all tokens at") == 1
    assert said.count("cannot continue; /reset starts over.") == 3
    assert not (tmp_path / "saved").exists()
    assert "Everything is forgotten.\n> The cache is empty." in printed.out


# inspect


def test_inspect_counts_what_the_cache_holds(capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"alpha_high": 1.5, "alpha_low": 0.5, "window": 20}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    found = found_by(capsys, "inspect", TEXT[:400], *options)
    model = AutoModelForCausalLM.from_pretrained(TINY_LM)
    model.set_attn_implementation("diffkv")
    cache = DiffKVCache(model.config, **settings)
    with torch.no_grad():
        model(AutoTokenizer.from_pretrained(TINY_LM)(TEXT[:400], return_tensors="pt").input_ids, **passing(cache))
    memory = cache.memory()
    assert (found["bytes"], found["dense_bytes"], found["levels"]) == (memory.bytes, memory.dense_bytes, memory.tokens)
    assert all(memory.tokens.values()), "the settings must bring about every level"
    assert "".join(token["text"] for token in found["tokens"]) == TEXT[:400]
    levels = torch.cat([cache.levels(i)[0] for i in range(6)])
    for code, name in enumerate(("pruned", "low", "high", "window")):
        assert [token[name] for token in found["tokens"]] == (levels == code).sum(0).tolist()
    (page,) = found["pages"]
    assert page["dense_token_bytes"] == 2 * 64 * 2
    # more than the codes, which take 8 and 4 bits, and 4 and 2
    sizes = [page["levels"][name]["token_bytes"] for name in ("high", "low")]
    assert 64 + 32 < sizes[0] < 256 and 32 + 16 < sizes[1] < sizes[0]


def test_inspect_without_a_prompt_needs_no_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import Gemma3TextConfig

    types = ["sliding_attention", "full_attention", "sliding_attention"]
    Gemma3TextConfig(
        num_hidden_layers=3,
        layer_types=types,
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
    ).save_pretrained(tmp_path)
    assert main(["inspect", "--model", str(tmp_path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "1 of 3 layers are compressed." in text and "(DynamicSlidingWindowLayer): 0, 2." in text
    # the default chooses no tokens
    assert "K5V4" in text and "K4V2" not in text


# verify


def by_hand(config: DiffKVConfig | None, ids: torch.Tensor, length: int) -> tuple[torch.Tensor, int]:
    """Log-probabilities behind each token after the prompt, and the bytes that were held of the prompt."""
    model = AutoModelForCausalLM.from_pretrained(TINY_LM)
    model.set_attn_implementation("sdpa" if config is None else "diffkv")
    cache = None if config is None else DiffKVCache(model.config, config)
    with torch.no_grad():
        output = model(ids[:, :length], **passing(cache), use_cache=True)
        cache = output.past_key_values
        held = 0 if config is None else cache.memory().bytes
        logits = [model(ids[:, i : i + 1], **passing(cache)).logits[0] for i in range(length, length + 16)]
        logits.append(model(ids[:, length + 16 : -1], **passing(cache)).logits[0])
    return torch.cat(logits).float().log_softmax(-1), held


def test_verify_measures_and_suggests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    run = ["verify", "--model", "tiny-lm", "--text", str(tmp_path / "text.txt"), "--length", "300", "--continued", "40"]
    found = found_by(capsys, *run, "--alpha-high", "3", "--alpha-low", "1", "--max-kl", "0.001", code=1)
    lossless, chosen, *gentler = found["outcomes"]
    ids = AutoTokenizer.from_pretrained(TINY_LM)(TEXT, return_tensors="pt").input_ids[:, :340]
    dense, _ = by_hand(None, ids, 300)
    mine, held = by_hand(DiffKVConfig(alpha_high=3.0, alpha_low=1.0), ids, 300)
    kl = (dense.exp() * (dense - mine)).sum(-1).mean()
    assert chosen["kl"] == pytest.approx(float(kl), rel=1e-4) and chosen["kl"] > 0.001
    assert chosen["top1"] == pytest.approx(float((dense.argmax(-1) == mine.argmax(-1)).float().mean()))
    assert chosen["bytes"] == held
    assert lossless["kl"] < 1e-3
    assert [each["name"] for each in gentler] == ["all K8V4"] and gentler[0]["kl"] <= 0.001
    assert not found["good"] and "use --alpha-high 0 --alpha-low 0 --high K8V4" in found["verdict"]


def test_verify_of_what_is_good_enough(capsys: pytest.CaptureFixture[str]) -> None:
    run = ["verify", "--model", "tiny-lm", "--length", "300", "--continued", "8", "--max-kl", "10", "--quiet"]
    assert main(run) == 0
    printed = capsys.readouterr()
    assert printed.err == "" and " ".join(printed.out.split()).count("Good: ") == 1
    assert [line.split()[0] for line in printed.out.splitlines()[1:3]] == ["lossless", "chosen"]
    assert main([*run, "--length", "40"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.endswith("but the cache saves nothing at this --length; set it to that of your prompts.")


def test_verify_measures_rounding_where_a_lossless_cache_differs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some processors round bfloat16 so much that a lossless cache is further away than the fixed limit."""
    monkeypatch.setattr(verification, "ROUNDING", -1.0)
    run = ["verify", "--model", "tiny-lm", "--length", "300", "--continued", "20", "--max-kl", "10"]
    found = found_by(capsys, *run, "--dtype", "bfloat16")
    lossless, eager, chosen = found["outcomes"]
    assert [each["name"] for each in found["outcomes"]] == ["lossless", "dense, eager", "chosen"] and found["good"]
    assert 0 < eager["kl"] < 1e-2 and lossless["kl"] <= 3 * eager["kl"] and eager["bytes"] == eager["dense_bytes"]
    assert chosen["bytes"] < chosen["dense_bytes"]


def test_verify_finds_a_cache_that_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A "lossless" configuration that loses much stands in for a model that does not work."""
    wrong = DiffKVConfig(high=(2, 1), low=(2, 1), alpha_high=0.0, alpha_low=0.0)
    monkeypatch.setattr(DiffKVConfig, "lossless", lambda **fields: wrong)
    assert main(["verify", "--model", "tiny-lm", "--length", "300", "--continued", "20", "--quiet"]) == 1
    assert "DiffKV does not work with this model" in capsys.readouterr().err
