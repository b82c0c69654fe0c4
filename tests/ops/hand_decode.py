"""What the pages of a decode kernel's case hold, read straight from the page format's definition."""

import numpy as np
import torch
from hand_pages import unpack_row

from hf_diffkv.pages import HIGH, LOW


def decode_by_hand(data, metadata, bits, groups):
    """Elements of one packed row (numpy uint8) straight from the page format's definition, float32."""
    codes = np.array(unpack_row(data.tobytes(), bits))
    scale, zero = metadata.view(np.float16).astype(np.float32).reshape(groups, 2).repeat(len(codes) // groups, 0).T
    return codes * scale + zero


def stored_by_hand(rows, row):
    """Dense keys and values of a row's pages, high tokens then low ones."""
    keys, values = [], []
    width = rows.width
    pages = rows.pages.numpy()
    for tier, layout in ((HIGH, rows.layout.high), (LOW, rows.layout.low)):
        for token in range(int(rows.counts[tier].view(-1)[row])):
            entry, slot = divmod(token, layout.capacity)
            page = pages[int(rows.page_table.view(-1, width)[row, entry if tier == HIGH else width - 1 - entry])]

            def part(offset, size, page=page, slot=slot):
                return page[offset + slot * size : offset + (slot + 1) * size]

            keys.append(
                decode_by_hand(
                    part(layout.key_offset, layout.key_row),
                    part(layout.key_metadata_offset, 4 * layout.k_groups), layout.k_bits, layout.k_groups,
                )
            )  # fmt: skip
            values.append(
                decode_by_hand(
                    part(layout.value_offset, layout.value_row),
                    part(layout.value_metadata_offset, 4 * layout.v_groups), layout.v_bits, layout.v_groups,
                )
            )  # fmt: skip
    return torch.from_numpy(np.array(keys, np.float32)), torch.from_numpy(np.array(values, np.float32))
