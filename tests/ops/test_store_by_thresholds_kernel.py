"""Rows levelled anew: kernels and plain PyTorch end with the same bytes, whatever was there before."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace

import interpreted  # noqa: F401
import pytest
import thresholds_oracle
import torch
from torch import Tensor

from hf_diffkv.config import Precision
from hf_diffkv.ops.compact import stored_tokens
from hf_diffkv.ops.rotation import Rotation, rotation_matrix
from hf_diffkv.ops.store_prompt.launch import store_prompt
from hf_diffkv.ops.store_prompt.tokens import Placement, PromptTokens
from hf_diffkv.pages import HIGH, LOW, FreeList, PageLayout
from hf_diffkv.pages.rows import held_tokens
from hf_diffkv.pages.segments import segments
from tools.kernels.rows import given_rows

K8V4, K4V2 = Precision(8, 4), Precision(4, 2)
WINDOW, WIDTH, PAGES = 6, 40, 200
CPU = torch.device("cpu")


class State:
    """Requests without tokens, and pages for them; `turn` draws the next tokens."""

    def __init__(
        self,
        high: Precision,
        low: Precision,
        dtype: torch.dtype,
        *,
        dim: int = 16,
        heads: int = 1,
        sinks: int = 2,
        bits: int = 32,
        rotates: bool = False,
        scored: bool = True,
    ) -> None:
        batch, numbers = 2, {"metadata_bits": bits, "position_bytes": bits // 8 if scored else 0}
        self.layout = PageLayout.build(high, low, dim, dim, dtype.itemsize, 512 * dim // 16, **numbers)
        pages = torch.full((PAGES, self.layout.page_bytes), 0xFF, dtype=torch.uint8)
        free_list = FreeList(CPU)
        free_list.extend(1, PAGES - 1)
        self.generator = torch.Generator().manual_seed(0)
        self.dtype, self.dim, self.rotates = dtype, dim, rotates
        shape, slots = (batch, heads), sinks + WINDOW + 1
        self.rows = given_rows(
            self.layout,
            torch.zeros(*shape, slots, dim, dtype=dtype),
            torch.zeros(*shape, slots, dim, dtype=dtype),
            pool=SimpleNamespace(pages=pages, free_list=free_list),
            page_table=torch.zeros(*shape, WIDTH, dtype=torch.int32),
            window_start=torch.full((batch,), sinks),
            sink_end=torch.full((batch,), sinks),
            sink_slots=sinks,
            key_offset=torch.zeros(*shape, dim if rotates else 0),
            alpha_high=1.0 + torch.arange(batch * heads).view(shape) / 8,
            alpha_low=0.5 - torch.arange(batch * heads).view(shape) / 8,
        )

    def turn(
        self,
        tokens: int,
        padded: int = 0,
        share: float = 1.0,
        *,
        feedback: Tensor | None = None,
    ) -> tuple:
        """Draws arguments for `tokens` new tokens. The first `padded` ones of the second request are padding.

        Args:
            share: received attention relative to the average; if it is small, fewer tokens stay high than before.
        """
        rows = self.rows
        batch, heads = rows.high_count.shape
        draw = [torch.randn(batch, heads, tokens, self.dim, generator=self.generator) for _ in range(2)]
        key, value = (((x * 16).round() / 16).to(self.dtype) for x in draw)
        held = rows.high_count + rows.low_count
        exact = (rows.length - rows.window_start).clamp(min=0) + torch.minimum(rows.length, rows.sink_end)
        past = int((held + exact[:, None]).max())
        # average attention received from each later query, times a random number
        later = torch.cat([torch.full((past,), tokens), tokens - 1 - torch.arange(tokens)])
        received = torch.rand(batch, heads, past + tokens, generator=self.generator) * 2 * share
        received *= later / (rows.length.max() + tokens)
        count = torch.full((batch,), tokens)
        rank = torch.arange(tokens, dtype=torch.int32).repeat(batch, 1)
        if padded:
            rank[1] = torch.where(rank[1] < padded, -1, rank[1] - padded)
            count[1] -= padded
        matrix = rotation_matrix(self.dim, torch.float32, CPU) if self.rotates else None
        whole = (rows.window_start == rows.sink_end) & (rows.length + count - rows.window_start > WINDOW)
        new = PromptTokens(key, value, rank if padded else None, count if padded else None)
        placement = Placement(WINDOW, 1e4, Rotation(matrix, matrix), self.rotates and bool(whole.any()), feedback)
        return new, placement, received

    def tokens(self, tier: int) -> set[tuple[int, int]]:
        """Row and position of each token in a tier."""
        tokens = stored_tokens(self.rows, tier)
        view = segments(self.rows.pages, self.rows.tiers[tier])
        position = view.positions(tokens.page, tokens.slot)
        return set(zip(tokens.row.tolist(), position.tolist()))

    def page_count(self, tier: int) -> Tensor:
        return -(-self.rows.counts[tier] // self.rows.tiers[tier].capacity)


def assert_alike(got: State, want: State, exact: bool = True) -> None:
    """Compares bytes, or codes within a tolerance if offsets were summed in another order."""
    near = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-5}
    rows = want.rows
    held = held_tokens(rows.window_start, rows.length, rows.sink_end, rows.sink_slots, rows.slots) >= 0
    for name, expected in vars(rows).items():
        if isinstance(expected, Tensor):
            mine = getattr(got.rows, name)
            if name.startswith("window_") and expected.dim() > 2:
                mine, expected = (each.transpose(1, 2)[held] for each in (mine, expected))
            torch.testing.assert_close(mine, expected, **near, msg=lambda m, name=name: f"{name}: {m}")
    assert torch.equal(got.rows.free_list.ids(), want.rows.free_list.ids())
    if exact:
        assert torch.equal(got.rows.pages, want.rows.pages)


TURNS = ((5, 3, 1.0), (40, 7, 1.0), (35, 0, 0.1), (30, 4, 0.0), (1, 0, 0.0))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes rows several blocks long, with more blocks than are counted at a time."""
    monkeypatch.setattr("hf_diffkv.ops.store_prompt.launch.BLOCK", 32)
    monkeypatch.setattr("hf_diffkv.ops.store_prompt.launch.CHUNK", 2)


def compare_turns(state: State, turns: tuple, exact: bool = True, **options: object) -> dict[str, int]:
    """Compares after each turn, and counts what happened."""
    seen = {"demoted": 0, "pruned": 0, "given": 0}
    for tokens, padded, share in turns:
        before = [state.tokens(tier) for tier in (HIGH, LOW)]
        held = [state.page_count(tier) for tier in (HIGH, LOW)]
        want = copy.deepcopy(state)
        new, placement, received = state.turn(tokens, padded, share, **options)
        past = received.shape[-1] - tokens
        store_prompt(state.rows, new, placement, past, received)
        thresholds_oracle.store_prompt(want.rows, new, placement, past, received)
        assert_alike(state, want, exact)
        state.rows.pages.copy_(want.rows.pages)
        after = [state.tokens(tier) for tier in (HIGH, LOW)]
        seen["demoted"] += len(before[HIGH] & after[LOW])
        seen["pruned"] += len((before[HIGH] | before[LOW]) - after[HIGH] - after[LOW])
        seen["given"] += sum(int((state.page_count(tier) < held[tier]).sum()) for tier in (HIGH, LOW))
        assert not before[LOW] & after[HIGH]
    owned = state.rows.page_table[state.rows.page_table > 0].tolist()
    assert sorted(owned + state.rows.free_list.ids().tolist()) == list(range(1, PAGES))
    return seen


@pytest.mark.parametrize(
    "high, low, dtype, fields",
    [
        (K8V4, K4V2, torch.bfloat16, {"bits": 16}),
        (Precision(16, 8), Precision(3, 5), torch.float16, {"sinks": 0}),
        (K8V4, Precision(4, 2, 2, 4), torch.float32, {"rotates": True, "heads": 2}),
    ],
    ids=str,
)
@pytest.mark.slow
def test_turns(high: Precision, low: Precision, dtype: torch.dtype, fields: dict) -> None:
    """Padding, prompts that stay in their windows, rows that grow, drop a level, shrink by whole pages, start over."""
    state = State(high, low, dtype, **fields)
    # products with a constant are summed in a different order from the interpreter's
    seen = compare_turns(state, TURNS, exact=not state.rotates)
    assert all(seen.values()), seen
    assert not state.rows.invalid


@pytest.mark.slow
def test_rounded() -> None:
    state = State(K8V4, Precision(4, 3, 2, 1), torch.float32, heads=1)
    matrix = torch.eye(16) + torch.rand(2, 16, 16, generator=state.generator).triu(1) / 4
    compare_turns(state, ((30, 5, 1.0), (20, 0, 0.5), (60, 0, 0.0)), feedback=matrix)
    assert state.tokens(LOW)


def test_what_does_not_fit_is_refused() -> None:
    state = State(K8V4, K4V2, torch.float32)
    new, placement, received = state.turn(5)
    with pytest.raises(ValueError, match="received must be"):
        store_prompt(state.rows, new, placement, 0, received[:, :, 1:])
    with pytest.raises(ValueError, match="value must be"):
        store_prompt(state.rows, replace(new, value=new.value[:, :, 1:]), placement, 0, received)
    assert not state.rows.length.any()
