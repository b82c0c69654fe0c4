"""Moves all tokens of whole rows from the high to the low precision, and stores from stage to stage.

Besides the pages, it uses the memory of `TOKENS_AT_ONCE` dense tokens or of the longest dense row. It needs no further
pages, as each row gives up its pages before it takes fewer.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ..pages import HIGH, LOW, NULL_PAGE, column
from ..pages.inset import FULL_RANGE, Inset
from ..pages.segments import Contents
from .prompt_kernels import pages_of
from .state import Store

# tokens that are lowered at once, unless a single row has more
TOKENS_AT_ONCE = 1 << 16
# with three bits fewer, the error of the earlier codes hardly matters
MOST_MERGED = 2


def lower_to(store: Store, rungs: np.ndarray) -> None:
    """Lowers each row to its precision, stage by stage.

    Args:
        rungs: index of each row's precision among `Store.precisions` from the store's high one on, int64 [layers,
            batch, heads]; 0 leaves a row at the high precision. If any is above 1, no two differ by more than 1.
    """
    rungs = rungs.copy()
    while rungs.max() > 1:
        lower_rows(store, ~store.low_heads)
        _begin_next_stage(store)
        rungs -= 1
    lower_rows(store, torch.from_numpy(rungs == 1).to(store.device) & ~store.low_heads)


def _begin_next_stage(store: Store) -> None:
    """Makes the low tier, which holds all tokens by now, the high one."""
    # all in place, as in `lower_rows`
    table = store.table.table
    table.copy_(table.flip(-1))
    store.high_count.copy_(store.low_count)
    store.low_count.zero_()
    store.alpha_high.zero_()
    store.begin_stage(store.stage + 1)


def lower_rows(store: Store, chosen: Tensor) -> None:
    """Moves all tokens of some rows to the low tier, and makes them stay there.

    Args:
        chosen: rows at the high precision, bool [layers, batch, heads].
    """
    row = chosen.view(-1).nonzero()[:, 0]
    count = store.high_count.view(-1)[row].long()
    parts, first, total = [], 0, 0
    for index, tokens in enumerate(count.tolist()):
        if total + tokens > TOKENS_AT_ONCE and index > first:
            parts.append(slice(first, index))
            first, total = index, 0
        total += tokens
    for part in (*parts, slice(first, row.numel())):
        _lower(store, row[part], count[part])
        # in place, because captured steps read them there
        store.alpha_high.view(-1)[row[part]] = math.inf
    store.forget_bounds()


def _lower(store: Store, row: Tensor, count: Tensor) -> None:
    """Moves all tokens of the rows `row`, int64 [n], with `count` tokens each, to the low tier."""
    high, low = store.layout.high, store.layout.low
    table = store.table.table.view(-1, store.table.width)
    if not int(count.sum()):
        return
    place = torch.repeat_interleave(torch.arange(row.numel(), device=row.device), count)
    index = torch.arange(place.numel(), device=row.device) - (count.cumsum(0) - count)[place]
    page = table[row[place], column(HIGH, index // high.capacity, table.shape[1])].long()
    key, value = store.ops.load_tokens(store.pool.pages, high, page, index % high.capacity, store.dtype)
    key = _fewer_bits(key, high.k_bits, low.k_bits, high.k_groups, low.k_groups)
    value = _fewer_bits(value, high.v_bits, low.v_bits, high.v_groups, low.v_groups, low.value_inset)
    key = _rounded(store, row, place, key)
    old = page[index % high.capacity == 0]
    is_high = torch.arange(table.shape[1], device=row.device) < pages_of(count, high.capacity)[:, None]
    table[row] = table[row].masked_fill(is_high, NULL_PAGE)
    store.pool.free_list.give(old)
    need = pages_of(count, low.capacity)
    owner, fresh = store.pool.free_list.take(need)
    ordinal = torch.arange(owner.numel(), device=row.device) - (need.cumsum(0) - need)[owner]
    table[row[owner], column(LOW, ordinal, table.shape[1])] = fresh.to(table.dtype)
    page = table[row[place], column(LOW, index // low.capacity, table.shape[1])].long()
    nothing = torch.zeros(place.numel(), dtype=torch.float32, device=row.device)
    contents = Contents(key, value, nothing, nothing.long())
    store.ops.store_tokens(store.pool.pages, low, page, index % low.capacity, contents, store.dtype)
    store.low_count.view(-1)[row] = count.to(store.low_count.dtype)
    store.high_count.view(-1)[row] = 0


def _fewer_bits(x: Tensor, bits: int, fewer: int, groups: int, groups_after: int, inset: Inset = FULL_RANGE) -> Tensor:
    """Returns decoded keys or values, prepared for quantisation with fewer bits, or as many.

    Args:
        x: decoded elements, [n, dim]; here and below.
        bits, fewer: bits of the codes before and after.
        groups, groups_after: quantisation groups before and after.
        inset: inset of the codes after.
    """
    if not 0 <= bits - fewer <= MOST_MERGED or groups != groups_after:
        return x
    return _within_cells(x, bits, fewer, groups) if inset == FULL_RANGE else _merged(x, bits, fewer, groups, inset)


def _within_cells(x: Tensor, bits: int, fewer: int, groups: int) -> Tensor:
    """Moves the ends of decoded rows inwards, so that each of the fewer codes stands for equally many codes of `x`.

    With one bit fewer, each code then stands for a pair of neighbours, which adds no error beyond that of the fewer
    bits. Over the full range, new codes would lie between old ones instead, and both errors would add up.
    """
    parts, first, last = _cells(x, bits, fewer, groups)
    return parts.clamp(first, last).flatten(-2)


def _merged(x: Tensor, bits: int, fewer: int, groups: int, inset: Inset) -> Tensor:
    """Returns elements whose inset codes each stand for a whole number of earlier codes, as in `_within_cells`.

    They are scaled so that what is stored is on average as large as `x`; with as many bits, it stays the same.
    """
    parts, first, last = _cells(x, bits, fewer, groups)
    top, width = 2**fewer - 1, last - first
    step = width / top
    code = ((parts - first) / torch.where(step == 0, 1.0, step)).round().clamp(0, top)
    found = first + code * step
    product = (found * parts).sum((-2, -1), keepdim=True)
    scale = (parts * parts).sum((-2, -1), keepdim=True) / torch.where(product == 0, 1.0, product)
    # the outermost codes cover what is beyond the others' range
    beyond = width / (inset.parts - 2)
    found = found + torch.where(code == 0, -beyond, torch.where(code == top, beyond, 0.0))
    return (found * (scale * inset.shrinkage)).flatten(-2)


def _cells(x: Tensor, bits: int, fewer: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns elements by group, [n, groups, size], and the positions of the first and last of the fewer codes.

    Each is in the middle of the earlier codes that it stands for.
    """
    parts = x.unflatten(-1, (groups, -1))
    low, high = parts.amin(-1, keepdim=True), parts.amax(-1, keepdim=True)
    inwards = (high - low) * ((2 ** (bits - fewer) - 1) / 2 / (2**bits - 1))
    return parts, low + inwards, high - inwards


def _rounded(store: Store, row: Tensor, place: Tensor, key: Tensor) -> Tensor:
    """Rounds keys, [n, key_dim], for the model's queries if their moments are known, else for its prompts' queries.

    Args:
        row: rows of the keys, int64 [rows].
        place: index into `row` of each key, int64 [n].
    """
    feedback = store.model_feedback
    if feedback is not None:
        matrices = feedback.matrices[feedback.of_rows(store.high_count.numel())[row]]
    elif store.lowering.moments is not None:
        head = row // (store.batch_size * store.num_heads) * store.num_heads + row % store.num_heads
        matrices = store.ops.feedback_of(store.lowering.moments.flatten(0, 1)[head], store.key_rotation)
    else:
        return key
    return store.ops.round_keys(key, place, matrices, store.layout.low)
