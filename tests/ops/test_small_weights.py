"""One token dominates a long row, and the others' weights times scales are below fp16's resolution."""

from dataclasses import replace

import pytest
import torch
import triton.language as tl
from test_decode_attention_kernel import Case, make_case, relative_error, stored_by_hand
from test_latent_kernel import SCALING, attend, dense, latent_case

from hf_diffkv.config import Precision
from hf_diffkv.ops.decode_attention import launch
from hf_diffkv.ops.decode_attention.scratch import KernelConfig, Scratch
from hf_diffkv.ops.quantize import reference as quantize
from hf_diffkv.ops.softmax import Softmax
from hf_diffkv.ops.tiles import Bounds
from hf_diffkv.pages.segments import Contents

# the others' logits are GAP and GAP - 0.5 below that of the dominant token
TOKENS, GAP = 8192, 9.5
BITS = [8, 6, 5, 4, 3, 2]
# scale of values; weight times scale is then below half of fp16's smallest number, but close to it for 2 bits
SPREAD = 2.0**-11


def rewrite(case: Case) -> torch.Tensor:
    """Writes the tokens and returns the queries [2, key_dim] that find token 5."""
    generator = torch.Generator().manual_seed(3)
    layout, rows = case.layout.high, case.rows
    direction = torch.nn.functional.normalize(torch.randn(layout.key_dim, generator=generator), dim=0)
    key = torch.randn(TOKENS, layout.key_dim, generator=generator) * 0.3
    key -= (key @ direction)[:, None] * direction
    key[5] += 8 * direction
    # values share a mean, so that losses do not cancel out
    value = torch.randn(TOKENS, layout.value_dim, generator=generator) + torch.arange(layout.value_dim).sin()
    value *= SPREAD
    value[5] = 0
    token = torch.arange(TOKENS)
    page = rows.page_table[0, 0, token // layout.capacity].long()
    contents = Contents(key, value, torch.zeros(TOKENS), token)
    quantize.store_tokens(rows.pages, layout, page, token % layout.capacity, contents, case.query.dtype)
    for window in (rows.window_key, rows.window_value):
        window.zero_()
    return torch.tensor([GAP, GAP - 0.5])[:, None] / 8 * direction


@pytest.mark.parametrize("metadata_bits", [16, 32])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.sampled(4)
def test_stored_tokens(bits: int, metadata_bits: int) -> None:
    precision = Precision(8, bits)
    numbers = {"metadata_bits": metadata_bits, "position_bytes": 0, "dtype": torch.bfloat16}
    case = make_case([[TOKENS]], [[0]], [1], high=precision, low=precision, **numbers)
    case = replace(case, query=(rewrite(case) / case.scaling)[None].bfloat16())
    key, value = (part.double() for part in stored_by_hand(case.rows, 0, torch.bfloat16))
    # and the window's token, which is zero
    weights = torch.nn.functional.pad(case.query[0].double() @ key.T * case.scaling, (0, 1)).softmax(-1)
    assert weights[:, 5].min() > 0.4
    config = KernelConfig.choose(case.layout, 2, torch.bfloat16, "cpu")
    config = replace(config, block=512, operand=tl.float16)
    scratch = Scratch.allocate(case.query, case.rows, case.max_tokens, splits=2, config=config)
    softmax, bounds = Softmax(case.scaling), Bounds(case.max_tokens)
    got = launch.decode_attention(case.query, case.rows, softmax, bounds=bounds, scratch=scratch)
    assert relative_error(got[0], weights[:, :-1] @ value) < 0.05


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.sampled(3)
def test_latents(bits: int) -> None:
    case = latent_case([TOKENS], [1], Precision(8, bits), dtype=torch.bfloat16)
    query = torch.nn.functional.pad(rewrite(case) / SCALING, (0, case.layout.high.value_dim))
    case = replace(case, query=query[None].bfloat16())
    config = replace(KernelConfig.for_latents(torch.bfloat16, "cpu"), block=512, operand=tl.float16)
    assert relative_error(attend(case, 2, config), dense(case)) < 0.05
