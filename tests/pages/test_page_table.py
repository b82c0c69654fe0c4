"""The bidirectional page table: both ends of a row, and rows that grow wider."""

from __future__ import annotations

import pytest
import torch

from hf_diffkv.pages import HIGH, LOW, NULL_PAGE, PageTable, column

CPU = torch.device("cpu")


def fill(table: PageTable, high: torch.Tensor, low: torch.Tensor) -> dict[tuple[int, int, int, int, int], int]:
    """Writes distinct ids into both ends of every row; returns what stands where, by (row, tier, page)."""
    entries = {}
    next_id = 1
    layers, batch, heads = high.shape
    for row in ((i, j, k) for i in range(layers) for j in range(batch) for k in range(heads)):
        for tier, count in ((HIGH, int(high[row])), (LOW, int(low[row]))):
            for page in range(count):
                table.table[row][page if tier == HIGH else table.width - 1 - page] = next_id
                entries[(*row, tier, page)] = next_id
                next_id += 1
    return entries


def test_columns_of_both_ends() -> None:
    pages = torch.arange(3)
    assert column(HIGH, pages, 10).tolist() == [0, 1, 2]
    assert column(LOW, pages, 10).tolist() == [9, 8, 7]


def test_a_new_table_points_to_the_null_page() -> None:
    table = PageTable(2, 3, 4, CPU)
    assert table.table.shape[:3] == (2, 3, 4)
    assert (table.table == NULL_PAGE).all()


@pytest.mark.parametrize("tokens, capacity", [(1, 16), (16, 16), (17, 16), (400, 16), (1000, 7)])
def test_a_row_holds_all_tokens_and_a_partial_page_of_each_tier(tokens: int, capacity: int) -> None:
    table = PageTable(1, 1, 1, CPU)
    table.ensure_width(tokens, capacity, torch.zeros(1, 1, 1, dtype=torch.int32))
    for high in range(tokens + 1):
        assert -(-high // capacity) + -(-(tokens - high) // capacity) <= table.width


def test_widening_keeps_the_entries_of_both_ends() -> None:
    table = PageTable(2, 2, 2, CPU)
    table.ensure_width(160, 16, torch.zeros(2, 2, 2, dtype=torch.int32))
    width = table.width
    high = torch.tensor([0, 1, 5, width, 3, 0, 2, 7]).view(2, 2, 2)
    low = torch.tensor([0, 2, 4, 0, width - 3, width, 1, width - 7]).view(2, 2, 2)
    entries = fill(table, high, low)
    for tokens in (161, 400, 5000):
        table.ensure_width(tokens, 16, high)
        assert table.width >= -(-tokens // 16) + 2
        for (*row, tier, page), expected in entries.items():
            assert int(table.table[tuple(row)][column(tier, page, table.width)]) == expected
        assert int((table.table != NULL_PAGE).sum()) == len(entries)


def test_a_wide_table_is_left_alone() -> None:
    table = PageTable(1, 1, 1, CPU)
    none = torch.zeros(1, 1, 1, dtype=torch.int32)
    table.ensure_width(100, 10, none)
    before = table.table
    table.ensure_width(100, 10, none)
    table.ensure_width(3, 10, none)
    assert table.table is before


def test_growth_is_geometric() -> None:
    """A token at a time, a table is rebuilt a number of times that grows with the logarithm of its width."""
    table = PageTable(1, 1, 1, CPU)
    none = torch.zeros(1, 1, 1, dtype=torch.int32)
    rebuilt, last = 0, table.table
    for tokens in range(1, 4001):
        table.ensure_width(tokens, 4, none)
        rebuilt += table.table is not last
        last = table.table
    assert table.width <= 1.2 * (4000 // 4 + 2)
    assert rebuilt < 80
