"""Kernels with absorbed queries against dense float64 attention over the tokens in pages and window."""

import math
from dataclasses import replace

import interpreted  # noqa: F401
import pytest
import torch
import triton.language as tl
from test_decode_attention_kernel import Case, make_case, relative_error, stored_by_hand, untouched

from hf_diffkv.config import Precision
from hf_diffkv.ops.decode_attention import launch
from hf_diffkv.ops.decode_attention.scratch import LATENT_HEADS, KernelConfig, Scratch
from hf_diffkv.ops.softmax import Softmax
from hf_diffkv.ops.tiles import Bounds

SCALING = 0.1
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
K8V8 = Precision(8, 8)
SMALL = (16, 32)


def latent_case(tokens, window, precision=K8V8, dims=SMALL, heads=20, low=None, low_tokens=None, **options) -> Case:
    """Rows with the given tokens in pages and window (int [batch]) and absorbed queries; unused memory is poisoned."""
    numbers = {"metadata_bits": 16, "position_bytes": 0, "dtype": torch.float32, **options}
    counts = [[[count] for count in part] for part in (tokens, low_tokens or [0] * len(tokens))]
    sizes = {"key_dim": dims[0], "value_dim": dims[1], "group": 1}
    case = make_case(*counts, window, high=precision, low=low or precision, **sizes, **numbers)
    generator = torch.Generator().manual_seed(5)
    query = torch.randn(len(tokens), heads, sum(dims), generator=generator)
    return replace(case, query=query.to(case.query.dtype))


def attend(case, splits=3, config=None, softcap=None, sinks=None, **options):
    if config is None:
        config = replace(KernelConfig.for_latents(case.query.dtype, "cpu"), block=32)
        if case.query.dtype != torch.float32:
            config = replace(config, operand=tl.float16)
    scratch = Scratch.allocate(case.query, case.rows, case.max_tokens, splits=splits, config=config)
    for buffer in scratch.tensors():
        buffer.fill_(math.nan)
    softmax = Softmax(SCALING, softcap, sinks)
    return launch.decode_attention(
        case.query, case.rows, softmax, bounds=Bounds(case.max_tokens), scratch=scratch, **options
    )


def dense(case, softcap=None, sinks=None) -> torch.Tensor:
    """Dense attention, with each request's tokens read byte by byte."""
    rows, outputs = case.rows, []
    for request in range(rows.batch):
        parts = []
        if int(rows.high_count[request]) + int(rows.low_count[request]):
            parts.append([part.double() for part in stored_by_hand(rows, request, case.query.dtype)])
        slot = torch.arange(int(rows.window_start[request]), int(rows.length[request])) % rows.slots
        parts.append([window[request, 0, slot].double() for window in (rows.window_key, rows.window_value)])
        key, latent = (torch.cat(part) for part in zip(*parts))
        logits = case.query[request].double() @ torch.cat([key, latent], dim=-1).T * SCALING
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if sinks is not None:
            logits = torch.cat([logits, sinks.double()[:, None]], dim=1)
        outputs.append(logits.softmax(-1)[:, : len(latent)] @ latent)
    return torch.stack(outputs)


def check(case, splits=3, **options) -> torch.Tensor:
    mine = case.copy()
    got = attend(mine, splits, **options)
    options.pop("valid", None)
    want = dense(case, **options)
    assert got.dtype == case.query.dtype and got.shape == want.shape and torch.isfinite(got).all()
    assert relative_error(got, want) < TOLERANCE[case.query.dtype]
    assert untouched(case, mine)
    return got


@pytest.mark.parametrize("bits", [16, 8, 6, 5, 4, 3, 2])
@pytest.mark.parametrize("dims", [(32, 128), (16, 32)])
def test_precisions(bits, dims) -> None:
    precision = Precision(16, 16) if bits == 16 else Precision(8, bits)
    check(latent_case([70], [19], precision, dims))


@pytest.mark.parametrize("bits", [8, 6, 5, 4, 16])
def test_sizes_of_large_models(bits) -> None:
    precision = Precision(16, 16) if bits == 16 else Precision(8, bits)
    check(latent_case([40], [3], precision, (64, 512)), splits=2)


@pytest.mark.parametrize("heads", [1, 16, 64, 128])
def test_heads_come_in_blocks(heads) -> None:
    check(latent_case([12], [9], heads=heads), splits=1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [16, 8, 5])
def test_dtypes(dtype, bits) -> None:
    precision = Precision(16, 16) if bits == 16 else Precision(8, bits)
    check(latent_case([70], [19], precision, (32, 128), dtype=dtype))


@pytest.mark.parametrize(
    "precision", [Precision(8, 8, 2, 4), Precision(8, 4, 4, 2), Precision(8, 6, 8, 1), Precision(16, 5, 1, 4)]
)
@pytest.mark.parametrize("metadata_bits", [16, 32])
def test_quantisation_groups(precision, metadata_bits) -> None:
    check(latent_case([40], [3], precision, metadata_bits=metadata_bits))


def test_dims_that_are_no_powers_of_two() -> None:
    check(latent_case([40], [3], Precision(8, 4), (24, 40), heads=5))


@pytest.mark.parametrize("splits", [1, 2, 7])
def test_unequal_rows_and_splits(splits) -> None:
    """Rows are empty, full, of one token or several pages; there are more splits than some rows have blocks."""
    capacity = latent_case([1], [1]).layout.high.capacity
    check(latent_case([0, capacity, 1, capacity + 1, 2 * capacity], [19, 1, 24, 17, 16], heads=3), splits)


def test_rows_of_two_precisions() -> None:
    case = latent_case([70, 0, 40], [9, 3, 5], low=Precision(8, 4), low_tokens=[0, 50, 33], heads=3)
    assert not case.layout.one_tier
    check(case)


def test_padding_has_no_output() -> None:
    case = latent_case([40, 40, 0], [3, 5, 4], heads=3)
    want = dense(case)
    case.query[1] = math.nan
    got = attend(case, valid=torch.tensor([True, False, True]))
    assert (got[1] == 0).all()
    assert relative_error(got[::2], want[::2]) < TOLERANCE[torch.float32]


def test_a_request_that_has_seen_nothing() -> None:
    case = latent_case([40, 0], [3, 0], heads=3)
    got = attend(case)
    assert (got[1] == 0).all() and (got[0] != 0).any()


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("learned", [False, True])
def test_softcap_and_sinks(softcap, learned) -> None:
    sinks = torch.linspace(-2, 3, 20) if learned else None
    check(latent_case([40], [9]), softcap=softcap, sinks=sinks)


def test_chosen_buffers() -> None:
    """If no buffers are given, the launcher allocates them for blocks of heads."""
    case = latent_case([200], [9], heads=40)
    made = Scratch.allocate(case.query, case.rows, case.max_tokens)
    assert made.config.heads == LATENT_HEADS and made.output.shape[2:] == (40, SMALL[1])
    got = launch.decode_attention(case.query, case.rows, Softmax(SCALING), bounds=Bounds(case.max_tokens))
    assert relative_error(got, dense(case)) < TOLERANCE[torch.float32]


def test_what_is_not_taken_is_refused() -> None:
    case = latent_case([20], [3])
    options = {"bounds": Bounds(case.max_tokens)}
    with pytest.raises(ValueError, match="16], or 48 if it is absorbed"):
        launch.decode_attention(case.query[..., :40], case.rows, Softmax(SCALING), **options)
    for other in ({"position_bytes": 2}, {"precision": Precision(8, 4, 1, 8)}, {"precision": Precision(8, 1)}):
        case = latent_case([20], [3], **other)
        with pytest.raises(ValueError, match="without scores"):
            launch.decode_attention(case.query, case.rows, Softmax(SCALING), **options)
