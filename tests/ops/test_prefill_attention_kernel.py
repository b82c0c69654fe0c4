import interpreted  # noqa: F401
import pytest
import torch
from chosen_ops import prefill_attention
from hand_past import attend_prompt, hand_past
from test_prefill_attention_reference import dense

from hf_diffkv.ops.backend import use_backend
from hf_diffkv.ops.prefill_attention import launch, reference, tiles
from hf_diffkv.ops.softmax import Softmax

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
SMALL_TILE = tiles.Tile(32, 16, 4, 1)


@pytest.fixture(autouse=True)
def poisoned_buffers(monkeypatch):
    """Fills memory that the launcher leaves uninitialised with NaN, or with 0xFF bytes."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        out = empty(*args, **kwargs)
        if out.numel():
            out.fill_(float("nan")) if out.is_floating_point() else out.fill_(-1)
        return out

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture
def small_tiles(monkeypatch):
    """Gives many blocks at small lengths."""
    monkeypatch.setattr(launch, "forward_tile", lambda *_, **__: SMALL_TILE)
    monkeypatch.setattr(launch, "column_tile", lambda *_: SMALL_TILE)
    monkeypatch.setattr(launch, "past_tile", lambda *_: SMALL_TILE)


def make_inputs(batch, query_heads, kv_heads, length, key_dim, value_dim=None, *, past=None, dtype=torch.float32):
    """Random tensors; logits vary by several units, so that significance differs between tokens.

    past: number of stored tokens per row, half of them at each level and one in the window if it is odd.
    """
    generator = torch.Generator().manual_seed(length)
    value_dim = value_dim or key_dim

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    inputs = {
        "query": draw(batch, query_heads, length, key_dim) * 2,
        "key": draw(batch, kv_heads, length, key_dim),
        "value": draw(batch, kv_heads, length, value_dim),
    }
    inputs = {name: x.to(dtype) for name, x in inputs.items()} | {"scaling": key_dim**-0.5}
    if past is not None:
        rows = [[past // 2] * kv_heads] * batch
        inputs["past"], *_ = hand_past(
            rows, rows, [past % 2] * batch, key_dim=key_dim, value_dim=value_dim, dtype=dtype
        )
    return inputs


def padding(*rows):
    """bool [rows, longest] from strings in which a dot means padding."""
    return torch.tensor([[letter != "." for letter in row] for row in rows])


def relative_error(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))


def assert_alike(got, want, dtype):
    for name, left, right in zip(("output", "received"), got, want):
        assert left.shape == right.shape, name
        assert torch.isfinite(left).all(), name
        assert relative_error(left, right) < TOLERANCE[dtype], name


def attend(op, query, key, value, **options):
    return attend_prompt(op.prefill_attention, query, key, value, **options)


def check(inputs, dtype=torch.float32):
    got = attend(launch, **inputs)
    want = attend(reference, **inputs)
    assert got[0].dtype == inputs["query"].dtype and got[1].dtype == torch.float32
    assert_alike(got, want, dtype)
    return got


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 2, 65, 130])
@pytest.mark.sampled(4)
def test_a_prompt_matches_dense_attention_and_the_reference(length, dtype):
    inputs = make_inputs(1, 4, 2, length, 64, dtype=dtype)
    got = check(inputs, dtype)
    assert_alike(got, dense(**inputs), dtype)


@pytest.mark.parametrize("group", [1, 2, 5])
@pytest.mark.parametrize("length", [31, 33])
@pytest.mark.sampled(6)
def test_many_blocks_and_group_sizes(group, length, small_tiles):
    inputs = make_inputs(1, 2 * group, 2, length, 16)
    assert_alike(check(inputs), dense(**inputs), torch.float32)


def test_programs_may_share_a_group_or_walk_it(small_tiles, monkeypatch):
    inputs = make_inputs(1, 4, 1, 50, 16, past=41)
    shared = check(inputs)
    monkeypatch.setattr(launch, "MANY_PROGRAMS", 0)
    torch.testing.assert_close(shared, check(inputs), rtol=0, atol=0)


@pytest.mark.parametrize(
    "key_dim, value_dim",
    [
        *((dim, dim) for dim in (8, 80, 96, 128, 256, 512)),
        *((8, 32), (64, 16), (72, 112), (192, 128), (24, 130)),
    ],
)
@pytest.mark.sampled(8)
def test_head_dimensions(key_dim, value_dim):
    inputs = make_inputs(1, 2, 1, 70, key_dim, value_dim, dtype=torch.float16)
    assert_alike(check(inputs, torch.float16), dense(**inputs), torch.float16)


PADDED = {
    "left": ("..........................xxxxxxxxxxxxxxxxxxxxxxxxx", "x" * 51),
    "right": ("xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx.................", "x" * 51),
    "inner": ("...xxxxxxxxxx....xxxxxxxxxxxxxxxxx.x.xxxxxxxxxxx...", "xxxxxx" + "." * 39 + "xxxxxx"),
    "nothing": ("." * 51, "x" * 51, "." * 50 + "x", "x" + "." * 50),
}


@pytest.mark.parametrize("window", [None, 1, 7, 1000])
@pytest.mark.parametrize("rows", PADDED.values(), ids=PADDED.keys())
@pytest.mark.sampled(16)
def test_padding_is_not_read_and_yields_zeros(rows, window, small_tiles):
    valid = padding(*rows)
    inputs = make_inputs(len(rows), 2, 1, valid.shape[1], 16)
    inputs |= {"valid": valid, "observation_window": window}
    want = attend(reference, **inputs)
    for name in ("query", "key", "value"):
        inputs[name] = inputs[name].masked_fill(~valid[:, None, :, None], torch.nan)
    output, received = attend(launch, **inputs)
    assert_alike((output, received), want, torch.float32)
    assert (output.masked_select(~valid[:, None, :, None]) == 0).all()
    assert (received.masked_select(~valid[:, None]) == 0).all()


def test_one_long_and_many_short_requests(small_tiles):
    lengths = [90, 1, 3, 2, 17, 0]
    valid = torch.arange(90)[None] >= 90 - torch.tensor(lengths)[:, None]
    inputs = make_inputs(6, 2, 1, 90, 16, dtype=torch.float16) | {"valid": valid}
    output, received = check(inputs, torch.float16)
    for row, length in enumerate(lengths):
        if length:
            part = (slice(row, row + 1), slice(None), slice(-length, None))
            want = dense(*(inputs[name][part] for name in ("query", "key", "value")), inputs["scaling"])
            assert relative_error(output[part], want[0]) < 1e-3
            assert relative_error(received[part], want[1]) < 1e-3 or length == 1


@pytest.mark.slow
def test_a_window_reads_its_queries_only(small_tiles, monkeypatch):
    inputs = make_inputs(2, 2, 1, 100, 16, past=21) | {"observation_window": 9}
    want = attend(reference, **inputs)

    class SpoiltDenominators:
        """Makes the probabilities of queries before the window infinite if they are read."""

        def __init__(self, kernel):
            self.kernel, self.arg_names = kernel, kernel.arg_names

        def __getitem__(self, grid):
            def run(**arguments):
                arguments["lse"][..., :-9] = -torch.inf
                self.kernel[grid](**arguments)

            return run

    monkeypatch.setattr(launch, "column_scores", SpoiltDenominators(launch.column_scores))
    monkeypatch.setattr(launch, "past_scores", SpoiltDenominators(launch.past_scores))
    assert_alike(attend(launch, **inputs), want, torch.float32)


def dense_past(batch, kv_heads, tokens, key_dim, value_dim=None):
    generator = torch.Generator().manual_seed(1)
    return {
        "past_key": torch.randn(batch, kv_heads, tokens, key_dim, generator=generator),
        "past_value": torch.randn(batch, kv_heads, tokens, value_dim or key_dim, generator=generator),
    }


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("length, past, stored", [(1, 1, None), (1, 40, 9), (35, 15, None), (35, 17, 33)])
@pytest.mark.sampled(16)
def test_a_dense_past_of_different_lengths_per_head(past, length, stored, window, small_tiles):
    inputs = make_inputs(2, 2, 2, length, 16, 24, past=stored) | dense_past(2, 2, past, 16, 24)
    counts = torch.tensor([[past, past // 2], [0, 1]])
    exists = torch.arange(past) < counts[..., None]
    valid = torch.ones(2, length, dtype=torch.bool)
    valid[1, : length // 3] = False
    inputs |= {"past_valid": exists, "valid": valid, "observation_window": window}
    want = attend(reference, **{**inputs, "past_key": inputs["past_key"].masked_fill(~exists[..., None], 0)})
    for name in ("past_key", "past_value"):
        inputs[name] = inputs[name].masked_fill(~exists[..., None], torch.nan)
    got = attend(launch, **inputs)
    assert_alike(got, want, torch.float32)
    assert (got[1][..., -past - length : -length].masked_select(~exists) == 0).all()


def test_a_dense_past_with_holes_and_another_dtype(small_tiles):
    inputs = make_inputs(1, 2, 2, 20, 16, dtype=torch.float16) | dense_past(1, 2, 50, 16)
    inputs["past_valid"] = (torch.arange(100).view(1, 2, 50) * 7 % 5) > 1
    check(inputs, torch.float16)


def test_an_empty_dense_past_is_no_past():
    inputs = make_inputs(1, 2, 1, 9, 16) | dense_past(1, 1, 0, 16)
    check(inputs | {"past_valid": torch.ones(1, 1, 0, dtype=torch.bool)})


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("softcap, sinks", [(5.0, False), (None, True), (2.0, True)])
@pytest.mark.sampled(6)
def test_soft_cap_and_sinks(softcap, sinks, window, small_tiles):
    inputs = make_inputs(1, 4, 2, 40, 16, past=21)
    inputs |= {"softcap": softcap, "observation_window": window}
    if sinks:
        inputs["sinks"] = torch.tensor([0.5, 3.0, -torch.inf, -2.0])
    check(inputs)


def test_a_large_logit_saturates_the_soft_cap():
    inputs = make_inputs(1, 2, 1, 20, 16) | {"softcap": 3.0}
    inputs["query"] *= 1e4
    check(inputs)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.sampled(6)
def test_a_mask_replaces_the_causal_rule(shared, window, small_tiles):
    inputs = make_inputs(2, 2, 1, 45, 16, past=11)
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(1 if shared else 2, 1, 45, 45, generator=generator) > 0.5
    mask[:, :, 7] = False
    valid = torch.ones(2, 45, dtype=torch.bool)
    valid[0, :20] = False
    inputs |= {"mask": mask.expand(2, -1, -1, -1), "valid": valid, "observation_window": window}
    check(inputs)
    output, received = check({**inputs, "past": None})
    assert (output[:, :, 7] == 0).all()


def test_strided_inputs_and_the_layout_of_the_output():
    inputs = make_inputs(2, 4, 2, 20, 16)
    expected = check(inputs)
    for name in ("query", "key", "value"):
        inputs[name] = inputs[name].transpose(1, 2).contiguous().transpose(1, 2)
    got = check(inputs)
    inputs["key"] = inputs["key"].mT.contiguous().mT
    also = check(inputs)
    for left, middle, right in zip(expected, got, also):
        assert torch.equal(left, middle) and torch.equal(left, right)
    assert got[0].transpose(1, 2).is_contiguous()


def test_nothing_to_do():
    for inputs in (make_inputs(0, 2, 1, 5, 16), make_inputs(1, 2, 1, 0, 16)):
        output, received = attend(launch, **inputs)
        assert output.shape == inputs["query"].shape and received.shape == inputs["key"].shape[:3]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"query": torch.zeros(1, 4, 5, 16, dtype=torch.float64)}, "float64"),
        ({"key": torch.zeros(1, 2, 4, 16)}, "key must be"),
        ({"valid": torch.ones(1, 5)}, "valid must be bool"),
        ({"mask": torch.ones(1, 1, 5, 4, dtype=torch.bool)}, "mask must be"),
        ({"sinks": torch.zeros(3)}, "sinks must be"),
        ({"past_key": torch.zeros(1, 2, 3, 16)}, "valid together"),
        ({"observation_window": -1}, "observed must be"),
        ({"scaling": 0.0}, "scaling"),
        ({"query": torch.zeros(1, 3, 5, 16)}, "multiple"),
    ],
)
def test_what_the_kernels_cannot_take_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        attend(launch, **{**make_inputs(1, 4, 2, 5, 16), **change})


def test_more_rows_than_a_launch_takes_are_refused():
    """Programs along a launch's third axis are counted in 16 bits."""
    one = torch.zeros(1, 2, 1, 16).expand(32768, -1, -1, -1)
    with pytest.raises(ValueError, match="32768 sequences of 2 KV heads are more than 65535"):
        attend_prompt(launch.prefill_attention, one, one, one, scaling=0.25)


def test_wider_heads_are_refused_where_kernels_are_chosen():
    wide = torch.zeros(1, 1, 1, 520)
    with use_backend("kernels"), pytest.raises(ValueError, match="head dimensions up to 512, not 520"):
        prefill_attention(wide, wide, wide, Softmax(0.25))
