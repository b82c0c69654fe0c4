"""The training example: its data against independent parsers, a short run end to end, the bundled model's recall."""

import itertools
import random
import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from hf_diffkv import DiffKVCache
from hf_diffkv.compat import passing

EXAMPLES = Path(__file__).parents[2] / "examples"
BUNDLED = EXAMPLES / "models" / "tiny-lm"
SEEDS = range(20)


@pytest.fixture(scope="module", autouse=True)
def examples_on_path():
    sys.path.insert(0, str(EXAMPLES))
    yield
    sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def data():
    import tiny_lm_data

    return tiny_lm_data


@pytest.fixture(scope="module")
def example():
    import train_tiny_lm

    return train_tiny_lm


def flatten(pieces):
    """Text and one weight per character."""
    return "".join(text for text, _ in pieces), [weight for text, weight in pieces for _ in text]


def full_weight_spans(weights):
    """Start and end of each run of weight 1."""
    marks = "".join("1" if weight == 1.0 else "0" for weight in weights)
    return [match.span() for match in re.finditer("1+", marks)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("length", [64, 200, 700])
def test_recall_answers_are_the_stated_facts(data, length, seed):
    text, weights = flatten(data.recall(random.Random(seed), length))
    stated = dict(re.findall(r"^@([a-z]{2,3})=(\d{4})$", text, re.MULTILINE))
    asked = list(re.finditer(r"^\?([a-z]{2,3})=(\d{4})$", text, re.MULTILINE))
    assert asked and text.count("@") == len(stated) and text.count("?") == len(asked)
    for question in asked:
        assert stated[question[1]] == question[2]
    assert full_weight_spans(weights) == [question.span(2) for question in asked]
    assert all(weights[text.index(f"@{key}=") + i] < 0.1 for key in stated for i in range(8))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("length", [64, 256, 500])
def test_recall_prompt_has_its_length_and_answer(data, length, seed):
    prompt, answer = data.recall_prompt(random.Random(seed), length)
    assert len(prompt) == length
    *_, question = prompt.split("\n")
    assert question[0] == "?" and question[-1] == "="
    assert f"@{question[1:-1]}={answer}\n" in prompt


def test_recall_prompt_needs_room(data):
    with pytest.raises(ValueError, match="at least 64"):
        data.recall_prompt(random.Random(0), 63)


@pytest.mark.parametrize("seed", SEEDS)
def test_chain_shows_latest_values_and_sums(data, seed):
    text, weights = flatten(data.chain(random.Random(seed), 300))
    start, steps = re.fullmatch(r"#((?:[a-z]\d)+)\|((?:[a-z]\d\+[a-z]\d>[a-z]\d;)+)\n", text).groups()
    values = {name: int(value) for name, value in re.findall(r"([a-z])(\d)", start)}
    for left, x, right, y, result, total in re.findall(r"(.)(.)\+(.)(.)>(.)(.);", steps):
        assert (int(x), int(y)) == (values[left], values[right])
        assert int(total) == (int(x) + int(y)) % 10
        values[result] = int(total)
    first = len(start) + 2
    predictable = [i for i, character in enumerate(text) if i >= first and character.isdigit()]
    assert [i for i, weight in enumerate(weights) if weight == 1.0] == predictable


@pytest.mark.parametrize("seed", SEEDS)
def test_copying_repeats_lines_known_by_their_first_character(data, seed):
    text, weights = flatten(data.copying(random.Random(seed), 64))
    lines = text.splitlines(keepends=True)
    stated = lines[: next(i for i, line in enumerate(lines) if line in lines[:i])]
    repeats = lines[len(stated) :]
    assert len({line[0] for line in stated}) == len(stated) and set(repeats) <= set(stated)
    expected = "0" * sum(map(len, stated)) + "".join("0" + "1" * (len(line) - 1) for line in repeats)
    assert "".join("1" if weight == 1.0 else "0" for weight in weights) == expected


def test_rows_are_ascii_of_the_asked_length_and_repeatable(data, example):
    for stage in example.make_stages(320):
        ids, weights = data.row(random.Random(3), stage.tasks, stage.length)
        assert len(ids) == len(weights) == stage.length
        assert all(3 < token < 128 for token in ids) and max(weights) <= 1.0
        assert (ids, weights) == data.row(random.Random(3), stage.tasks, stage.length)


def test_held_out_text_is_not_trained_on(data):
    line = max(data.library_text(held_out=True).splitlines(), key=len)
    assert line not in data.library_text()


@pytest.mark.parametrize("max_length", [48, 96, 320, 1024])
def test_stages_grow_and_end_with_text(data, example, max_length):
    stages = example.make_stages(max_length)
    assert list(stages[0].tasks) == [data.copying]
    assert [data.library in stage.tasks for stage in stages] == [False] * (len(stages) - 1) + [True]
    assert stages[-1].length == max_length and stages[-1].deadline == 1.0
    for before, after in itertools.pairwise(stages):
        assert before.length <= after.length and before.deadline < after.deadline


def test_dataset_follows_the_curriculum(example):
    curriculum = example.Curriculum(example.make_stages(160), seconds=3600)
    batches = iter(example.make_dataset(curriculum, seed=0))
    lengths = []
    for _ in range(2):
        lengths.append(len(next(batches)["input_ids"][0]))
        curriculum.accuracies.extend([1.0] * curriculum.accuracies.maxlen)
        assert curriculum.advance() and not curriculum.advance()
    assert lengths == [64, 96]


def test_curriculum_waits_until_learnt_or_out_of_time(example):
    curriculum = example.Curriculum(example.make_stages(160), seconds=3600)
    curriculum.accuracies.extend([0.9] * curriculum.accuracies.maxlen)
    assert not curriculum.advance()
    curriculum.started -= 0.41 * 3600
    assert curriculum.advance() and curriculum.index == 1


def test_weighted_loss_matches_a_loop(data, example):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 7, generator=generator)
    ids = torch.randint(0, 7, (2, 5), generator=generator)
    weights = torch.tensor([[1.0, 0.5, 1.0, 0.0, 1.0], [0.0, 1.0, 0.02, 0.5, 1.0]])
    loss, accuracy = example.weighted_loss(logits, ids, weights)
    total = norm = 0.0
    right = []
    for row in range(2):
        for i in range(1, 5):
            log_probability = logits[row, i - 1].log_softmax(-1)
            total -= weights[row, i].item() * log_probability[ids[row, i]].item()
            norm += weights[row, i].item()
            if weights[row, i] == 1.0:
                right.append(log_probability.argmax().item() == ids[row, i].item())
    assert loss.item() == pytest.approx(total / norm, rel=1e-5)
    assert accuracy == pytest.approx(sum(right) / len(right))


def test_optimizer_covers_every_parameter_and_restores(example):
    model = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
    optimizer = example.MuonWithAdamW(model)
    covered = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(covered) == sorted(id(p) for p in model.parameters())
    matrices = optimizer.parts[0].param_groups[0]["params"]
    assert len(matrices) == 7 * model.config.num_hidden_layers
    optimizer.load_state_dict(optimizer.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 0.125
    assert [part.param_groups[0]["lr"] for part in optimizer.parts] == [0.125, 0.125]


@pytest.mark.parametrize("shape", [(6, 6), (10, 4), (3, 12)])
def test_orthogonal_moves_singular_values_alone(shape):
    import tiny_lm_optimizer

    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / matrix.norm()
    a, b, c = tiny_lm_optimizer.QUINTIC
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5
    expected = left @ values.diag() @ right
    torch.testing.assert_close(tiny_lm_optimizer.orthogonal(matrix, torch.float32), expected, rtol=0, atol=1e-4)
    coarse = tiny_lm_optimizer.orthogonal(matrix, torch.bfloat16)
    assert coarse.dtype == torch.float32 and 0 < (coarse - expected).abs().max() < 0.1


def test_muon_is_pytorchs_but_for_rounding():
    import tiny_lm_optimizer

    start = torch.randn(8, 4, generator=torch.Generator().manual_seed(2))
    params = [torch.nn.Parameter(start.clone()) for _ in range(2)]
    theirs = torch.optim.Muon([params[0]], lr=0.01, weight_decay=0.1, adjust_lr_fn="original")
    ours = tiny_lm_optimizer.Muon([params[1]], lr=0.01, weight_decay=0.1)
    for seed in range(3):
        gradient = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
        for optimizer, param in ((theirs, params[0]), (ours, params[1])):
            param.grad = gradient.clone()
            optimizer.step()
    assert (params[0] - start).abs().max() > 0.01
    torch.testing.assert_close(params[1], params[0], rtol=0, atol=2e-3)


@pytest.fixture(scope="module")
def pupil(data, example):
    """Made as the recipe makes it, with the batch that it was not made from."""
    from tiny_lm_latent import Pupil

    batches = example.Curriculum(example.make_stages(160)[-1:], seconds=1, tokens=1024).batches(3)
    teacher = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32, attn_implementation="eager")
    pupil = Pupil(teacher, torch.tensor(next(batches)["input_ids"]))
    return pupil, *(torch.tensor(value) for value in next(batches).values())


def test_converted_attentions_predict_nearly_as_before(example, pupil):
    pupil, ids, weights = pupil
    with torch.no_grad():
        logits = pupil.model(ids, use_cache=False).logits
        assert example.weighted_loss(logits, ids, weights)[1] > 0.85
        assert pupil.loss(logits, ids, weights) < 0.5
        assert pupil.loss(pupil.teacher(ids).logits, ids, weights).abs() < 1e-6


def test_teaching_changes_attentions_alone(pupil):
    pupil, ids, weights = pupil
    pupil.loss(pupil.model(ids[:1], use_cache=False).logits, ids[:1], weights[:1]).backward()
    for name, parameter in pupil.model.named_parameters():
        assert (parameter.grad is not None and parameter.grad.abs().max() > 0) == ("self_attn" in name), name
    assert all(parameter.grad is None for parameter in pupil.teacher.parameters())
    pupil.model.zero_grad()


@pytest.mark.slow
def test_short_run_of_a_latent_model(data, example, tmp_path):
    example.train(tmp_path, minutes=1000, max_length=96, max_steps=3, architecture="latent", tokens=300)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.kv_lora_rank == 128 and model.dtype == torch.bfloat16
    caches = [DynamicCache(config=model.config), DiffKVCache(model)]
    ids = torch.tensor([data.row(random.Random(5), {data.recall: 1.0}, 96)[0]])
    texts = [model.generate(ids, max_new_tokens=8, do_sample=False, **passing(cache)) for cache in caches]
    assert caches[1].memory().ratio < 1 and texts[0].shape == texts[1].shape


@pytest.mark.slow
def test_short_run_lowers_the_loss_and_reloads(data, example, tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        # so many that the schedule, which follows the clock, is that of a machine at rest on a busy one, too
        example.train(tmp_path, minutes=1000, max_length=64, seed=0, max_steps=20)
    finally:
        torch.set_num_threads(threads)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert model.dtype == torch.bfloat16 and model.config.use_cache
    ids, weights = data.row(random.Random(5), {data.copying: 1.0}, 64)
    assert tokenizer(tokenizer.decode(ids))["input_ids"] == ids
    with torch.no_grad():
        loss, _ = example.weighted_loss(model(torch.tensor([ids])).logits, torch.tensor([ids]), torch.tensor([weights]))
    assert loss < 4.5  # log(128) = 4.85 for a model that knows nothing


def test_report_leaves_the_trained_model_alone(example, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    curriculum = example.Curriculum(example.make_stages(64), seconds=60)
    report = example.Teacher(curriculum, tokenizer, characters=64, reports=1, output=tmp_path).recall(model)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(saved.parameters(), model.parameters(), strict=True))
    assert report == "DynamicCache 1.00, DiffKV 1.00"
    assert model.config._attn_implementation == "eager" and model.dtype == torch.float32


@pytest.mark.parametrize("cache", ["DynamicCache", "DiffKV"])
def test_bundled_model_recalls(example, cache):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(BUNDLED), AutoTokenizer.from_pretrained(BUNDLED)
    assert example.exact_recall(model, tokenizer, cache, prompts=10, characters=256, seed=0) >= 0.9
