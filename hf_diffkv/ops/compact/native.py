"""Compaction in native code: one call for the rows of all layers."""

from __future__ import annotations

import torch
from torch import Tensor

from ...native.library import address, call
from ...native.structs import Compaction, format_of
from ...pages import FreeList, PageLayout


def compact_step(
    pages: Tensor,
    layout: PageLayout,
    free_list: FreeList,
    page_table: Tensor,
    high_count: Tensor,
    low_count: Tensor,
    key: Tensor,
    value: Tensor,
    score: Tensor,
    position: Tensor,
    leaving: Tensor,
    length: Tensor,
    high_threshold: Tensor | None,
    low_threshold: Tensor | None,
    *,
    flag: Tensor,
) -> None:
    """Arguments as in the reference, except for:

    Args:
        flag: int32 [1]. Bit 1 is set where fewer pages are free than needed, bit 2 where the two ends of a row of the
            table would have met. The round is called off then: the candidates are not stored and nothing else changes.

    Raises:
        CorruptMemoryError: a table entry that is no page, or counts that do not fit the table; nothing has changed.
    """
    rows = page_table.shape[0]
    check_rows(page_table, high_count, low_count)
    key, value, score, position = (x.contiguous() for x in (key, value, score, position))
    leaving, length = leaving.contiguous(), length.contiguous()
    block = round_block(layout, free_list, page_table, high_count, low_count, key, value, score, position, length, flag)
    block.row_count, block.heads, block.slots = rows, 1, 1
    block.leaving = address(leaving)
    run(block, address(pages), pages.shape[0], high_threshold, low_threshold)


def check_rows(page_table: Tensor, *counts: Tensor) -> None:
    """Raises `ValueError` unless the tensors can be written in place."""
    for name, tensor in (("page_table", page_table), *(("counts", count) for count in counts)):
        if tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous int32, as it is written in place, not {tensor.dtype}.")


def round_block(
    layout: PageLayout,
    free_list: FreeList,
    page_table: Tensor,
    high_count: Tensor,
    low_count: Tensor,
    key: Tensor,
    value: Tensor,
    score: Tensor,
    position: Tensor,
    length: Tensor,
    flag: Tensor,
) -> Compaction:
    """What a round needs to know of all rows, while these contiguous tensors stay where they are."""
    block = Compaction(format=format_of(layout, key.dtype))
    block.rows.table, block.rows.width = address(page_table), page_table.shape[-1]
    block.rows.count[0], block.rows.count[1] = address(high_count), address(low_count)
    block.key, block.value, block.score = address(key), address(value), address(score)
    block.position, block.length, block.flag = address(position), address(length), address(flag)
    block.ring, block.state = address(free_list.ring), address(free_list.state)
    return block


def run(
    block: Compaction, pages: int, page_count: int, high_threshold: Tensor | None, low_threshold: Tensor | None
) -> None:
    """Runs a round; `page_count` pages from the address `pages` on may be used, thresholds are as in the reference."""
    block.rows.pages, block.rows.page_count = pages, page_count
    thresholds = [None if each is None else each.contiguous() for each in (high_threshold, low_threshold)]
    block.high_threshold, block.low_threshold = map(address, thresholds)
    block.threads = torch.get_num_threads()
    call("compact", block)
