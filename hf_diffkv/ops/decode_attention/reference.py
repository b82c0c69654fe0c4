"""Decode attention over pages and window in plain PyTorch, split along the sequence and merged at the end.

Codes are converted to floats but never scaled individually. With key = scale * code + zero,
    logit = scale * (query . code) + zero * sum(query),   output = sum(p * scale * code) + sum(p * zero).
Each tier is read in two passes, first keys, then values, a few tiles at a time, through buffers that stay in the
processor's cache. Work between the passes covers the logits of all tiles at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...pages import HIGH, LOW, NULL_PAGE, LayerRows, column, fields
from ...pages.rows import compute_dtype, held_tokens
from ...pages.segments import scale_and_zero, score_noise, score_of, score_segment, segment, stored_score
from ..rotation import Rotation
from ..softmax import SharedAttention, Softmax
from ..table import Ops
from ..tiles import Bounds, Tiles

CHUNK_ELEMENTS = 1 << 18
WORD_DTYPES = (torch.int64, torch.int32, torch.int16, torch.uint8)
# exp(-40) of the largest weight is lost in rounding; smaller weights would give subnormal products, which are slow
LOWEST_EXPONENT = -40.0


def decode_attention(
    query: Tensor,
    rows: LayerRows,
    softmax: Softmax,
    *,
    bounds: Bounds,
    valid: Tensor | None = None,
    scratch: None = None,
    held: SharedAttention | None = None,
) -> Tensor:
    """Attends from the newest token of every request, which is already in the window, and updates the sums.

    The sum of each attended token except the newest grows by the maximum of its probabilities over the group. With
    `held`, the last layer adds the maximum over all layers. If pages have no scores, no sums change, not even those of
    the window, and `held` is left unchanged.

    Args:
        query: query states, [batch, query_heads, key_dim]; or absorbed ones (store/latent.py), [batch, query_heads,
            key_dim + value_dim], whose logits are products with key and value.
        rows: rows to attend to.
        bounds: the host's upper bounds on the rows' lengths, with tiles.
        valid: False where the newest token is padding, bool [batch]; the output is then zero and no sums grow. None if
            all are real.
        scratch: buffers from `allocate_scratch`, which only the kernels use.
        held: accumulator that joins the attention of several layers to the same tokens; None for one layer.

    Returns:
        Attention output, [batch, query_heads, value_dim] in the query's dtype.
    """
    batch, kv_heads, length = rows.batch, rows.heads, rows.length
    dtype = compute_dtype(query.dtype)
    group = query.shape[1] // kv_heads
    scaled = (query.to(dtype) * softmax.scaling).view(rows.count, group, -1)
    if valid is None:
        valid = length > 0
    scoring = valid.repeat_interleave(kv_heads)
    # padding may hold any value, and zero times infinity is NaN
    scaled = torch.where(scoring[:, None, None], scaled, 0.0)
    tokens = held_tokens(rows.window_start, length, rows.sink_end, rows.sink_slots, rows.slots)
    absorbed = query.shape[-1] != rows.window_key.shape[-1]
    window_key = torch.cat([rows.window_key, rows.window_value], dim=-1) if absorbed else rows.window_key
    window = _window_logits(scaled, window_key, tokens, softmax.softcap)
    merged = _window_partials(window, rows.window_value, softmax.sinks, group)
    pieces = []
    for tier in (HIGH, LOW):
        if bounds.tiles[tier].row.numel():
            piece = TierAttention(rows, tier, bounds.tiles[tier])
            piece.attend(scaled, merged, softmax.softcap)
            pieces.append(piece)
    total = torch.where(merged.total == 0, 1.0, merged.total)
    output = torch.where(scoring[:, None, None], merged.output / total[..., None], 0.0)
    output = output.view(batch, kv_heads * group, -1).to(query.dtype)
    if not rows.layout.selects:
        return output
    log_total = merged.peak + torch.log(total)
    received = [piece.received(log_total, scoring) for piece in pieces]
    received.append(_window_received(window, log_total, tokens == length[:, None] - 1, scoring, kv_heads))
    if held is not None:
        before = received if held.received is None else held.received
        received = held.received = [torch.maximum(*pair) for pair in zip(received, before)]
    if held is None or held.last:
        for piece, gained in zip(pieces, received):
            piece.add_scores(gained, length.repeat_interleave(kv_heads))
        rows.window_score.add_(received[-1].view_as(rows.window_score))
    return output


def _window_logits(query: Tensor, key: Tensor, tokens: Tensor, softcap: float | None) -> Tensor:
    """Returns the window's logits, [rows, group, slots], -inf in empty slots."""
    batch, kv_heads, slots = key.shape[:3]
    logits = torch.bmm(query, key.reshape(batch * kv_heads, slots, -1).to(query.dtype).mT)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    present = (tokens >= 0).repeat_interleave(kv_heads, dim=0)
    return logits.masked_fill(~present[:, None], -torch.inf)


def _window_partials(logits: Tensor, value: Tensor, sinks: Tensor | None, group: int) -> Partials:
    batch, kv_heads, slots = value.shape[:3]
    peak = logits.amax(-1)
    if sinks is not None:
        sink = sinks.to(logits.dtype).view(1, kv_heads, group).expand(batch, -1, -1).reshape(-1, group)
        peak = torch.maximum(peak, sink)
    safe = torch.where(peak == -torch.inf, 0.0, peak)
    weights = torch.exp(logits - safe[..., None])
    total = weights.sum(-1)
    if sinks is not None:
        total = total + torch.exp(sink - safe)
    value = value.reshape(batch * kv_heads, slots, -1).to(logits.dtype)
    empty = (weights == 0).all(1)[..., None]
    return Partials(safe, total, torch.bmm(weights, value.masked_fill(empty, 0.0)))


def _window_received(logits: Tensor, log_total: Tensor, newest: Tensor, scoring: Tensor, kv_heads: int) -> Tensor:
    """Returns each slot's largest probability within the group, float32 [rows, slots]; 0 for the newest token."""
    received = torch.exp(logits - log_total[..., None]).amax(1)
    counted = scoring[:, None] & ~newest.repeat_interleave(kv_heads, dim=0)
    return torch.where(counted, received, 0.0).float()


def append_and_attend(
    ops: Ops,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: LayerRows,
    softmax: Softmax,
    *,
    rotation: Rotation,
    limit: float,
    valid: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Appends the newest token of every request and attends from it.

    Args:
        ops: ops of the backend that runs the parts.
        query, key, value: states of the model, [batch, query_heads or heads, 1, dim]; the query may be absorbed.
        rows: rows to append to and attend to.
        softmax: softmax parameters of the layer.
        rotation: rotations of keys and values.
        limit: largest magnitude that can be stored.
        valid, **options: arguments of `decode_attention`.

    Returns:
        Attention output in the model's form, [batch, query_heads, 1, value_dim] in the query's dtype.
    """
    query, key, value = query[:, :, 0], key[:, :, 0], value[:, :, 0]
    given = {"limit": limit, "valid": valid, "rotation": rotation}
    absorbed = query.shape[-1] != key.shape[-1]
    entered = ops.append_token(rows, key, value, query=None if absorbed else query, **given)
    if not absorbed:
        query = entered
    elif rotation.key is not None:
        parts = zip(query[None].split([key.shape[-1], value.shape[-1]], dim=-1), (rotation.key, rotation.value))
        query = torch.cat([ops.rotate(part, matrix)[0] for part, matrix in parts], dim=-1)
    output = ops.decode_attention(query, rows, softmax, valid=valid, **options)
    # heads are passed as tokens: tiles of one token each would read the matrix once per tile
    return (output if rotation.value is None else ops.rotate(output[None], rotation.value.mT)[0])[:, :, None]


@dataclass
class Partials:
    """Partial softmax state of each row.

    Attributes:
        peak, total: largest logit and sum of the weights, [rows, group].
        output: sum of the weighted values, [rows, group, value_dim].
    """

    peak: Tensor
    total: Tensor
    output: Tensor


@dataclass
class BitPlane:
    """One bit field of every byte of packed rows, unpacked a word at a time.

    Attributes:
        words: packed rows.
        shift: left shift that moves the bits to their place in the codes; negative for a right shift.
        mask: mask of the bits after the shift.
        codes: unpacked codes, in the shape of `words`.
        add: whether to keep the bits already in `codes`, the lower bits of the same codes.
    """

    words: Tensor
    shift: int
    mask: int
    codes: Tensor
    add: bool

    def unpack(self) -> None:
        if self.shift == 0:
            bits = self.words
        else:
            bits = self.words << self.shift if self.shift > 0 else self.words >> -self.shift
        if self.add:
            self.codes.bitwise_or_(bits & self.mask)
        else:
            torch.bitwise_and(bits, self.mask, out=self.codes)


class TierAttention:
    """Attention to the tokens of one tier.

    Args:
        rows: rows to attend to.
        tier: `HIGH` or `LOW`.
        tiles: tiles that cover all pages of the tier.
    """

    def __init__(self, rows: LayerRows, tier: int, tiles: Tiles) -> None:
        self.tier, self.layout = tier, (rows.layout.high, rows.layout.low)[tier]
        self.tiles, self.pages, self.dtype = tiles, rows.pages, rows.dtype
        capacity, width = self.layout.capacity, rows.width
        counts, tables = rows.counts[tier].view(-1), rows.page_table.view(-1, width)
        page = tiles.first[:, None] + torch.arange(tiles.pages, device=tables.device)
        entry = tables[tiles.row[:, None], column(tier, page.clamp(max=width - 1), width)]
        self.ids = torch.where(page * capacity < counts[tiles.row, None], entry, NULL_PAGE).flatten().long()
        token = page[tiles.full :, :, None] * capacity + torch.arange(capacity, device=tables.device)
        self.absent = (token >= counts[tiles.row[tiles.full :], None, None]).flatten(1)

    def attend(self, query: Tensor, merged: Partials, softcap: float | None) -> None:
        """Adds this tier's tokens to `merged`; keeps the softmax weights for `received`.

        Args:
            query: scaled query states, [rows, group, key_dim].
            merged: softmax state of the rows, updated in place.
            softcap: softcap of the logits, or None.
        """
        row, absent = self.tiles.row, self.absent[:, None]
        weights = self._logits(query[row])
        if softcap is not None:
            weights.div_(softcap).tanh_().mul_(softcap)
        partial = weights[self.tiles.full :]
        partial.masked_fill_(absent, -torch.inf)
        peak = weights.amax(-1)
        highest = merged.peak.scatter_reduce(0, row[:, None].expand_as(peak), peak, "amax")
        # a tile without tokens must not raise the row's peak
        peak = torch.where(peak == -torch.inf, highest[row], peak)
        weights.sub_(peak[..., None]).clamp_(min=LOWEST_EXPONENT).exp_()
        partial.masked_fill_(absent, 0.0)
        total, output = weights.sum(-1), self._output(weights)

        self.peak, self.weights = peak, weights
        before = torch.exp(merged.peak - highest)
        share = torch.exp(peak - highest[row])
        merged.total = (merged.total * before).index_add_(0, row, total * share)
        merged.output = (merged.output * before[..., None]).index_add_(0, row, output * share[..., None])
        merged.peak = highest

    def received(self, log_total: Tensor, scoring: Tensor) -> Tensor:
        """Returns each token's largest probability within the group, float32 [tiles, tokens].

        May be called only once, after `attend`.

        Args:
            log_total: logarithm of the softmax denominator, [rows, group].
            scoring: True for rows whose newest token is real, bool [rows].
        """
        row = self.tiles.row
        share = self.peak - log_total[row]
        share = torch.where(scoring[row, None] & (share > LOWEST_EXPONENT), torch.exp(share), 0.0)
        return self.weights.mul_(share[..., None]).amax(1).float()

    def add_scores(self, received: Tensor, length: Tensor) -> None:
        """Adds received attention, float32 [tiles, tokens], to the sums; `length` is int64 [rows]."""
        score = score_segment(self.pages, self.layout)
        held, received = score.index_select(0, self.ids), received.view(self.ids.numel(), -1)
        if self.layout.score_bytes == 4:
            score.index_copy_(0, self.ids, held.add_(received))
            return
        index = self.tiles.first[:, None] * self.layout.capacity + torch.arange(
            self.tiles.pages * self.layout.capacity, device=received.device
        )
        noise = score_noise(index, length[self.tiles.row, None], self.tier)
        score.index_copy_(0, self.ids, stored_score(score_of(held) + received, noise.view_as(received)))

    def _logits(self, query: Tensor) -> Tensor:
        """Returns logits [tiles, group, tokens] for queries [tiles, group, key_dim], or absorbed ones."""
        layout = self.layout
        key = (layout.key_dim, layout.k_bits, layout.k_groups)
        value = (layout.value_dim, layout.v_bits, layout.v_groups)
        key_place = (layout.key_offset, layout.key_row, layout.key_metadata_offset, layout.key_metadata)
        logits = self._products(query[..., : layout.key_dim], *key, *key_place)
        if query.shape[-1] > layout.key_dim:
            value_place = (layout.value_offset, layout.value_row, layout.value_metadata_offset, layout.value_metadata)
            logits.add_(self._products(query[..., layout.key_dim :], *value, *value_place))
        return logits

    def _products(
        self, query: Tensor, dim: int, bits: int, groups: int, offset: int, row: int, metadata_offset: int, size: int
    ) -> Tensor:
        """Returns products with keys or values, [tiles, group, tokens], for queries [tiles, group, dim]."""
        numbers = self._numbers(offset, row, bits, dim, query.dtype)
        metadata = self._metadata(metadata_offset, size, bits, groups, query.dtype)
        logits = query.new_empty(*query.shape[:2], self.tiles.pages * self.layout.capacity)
        scaled = query * _factors(dim, bits, query)
        for chunk, keys in numbers:
            if metadata is None:
                torch.bmm(scaled[chunk], keys.mT, out=logits[chunk])
                continue
            for group, dims in enumerate(_groups(dim, groups)):
                out = logits[chunk] if group == 0 else torch.empty_like(logits[chunk])
                torch.bmm(scaled[chunk, :, dims], keys[..., dims].mT, out=out).mul_(metadata[0][chunk, group, None])
                if group:
                    logits[chunk].add_(out)
        if metadata is not None:
            logits.baddbmm_(query.unflatten(-1, (groups, -1)).sum(-1), metadata[1])
        return logits

    def _output(self, weights: Tensor) -> Tensor:
        """Returns weighted values [tiles, group, value_dim] for weights [tiles, group, tokens]."""
        layout, full = self.layout, self.tiles.full
        numbers = self._numbers(layout.value_offset, layout.value_row, layout.v_bits, layout.value_dim, weights.dtype)
        metadata = self._metadata(
            layout.value_metadata_offset, layout.value_metadata, layout.v_bits, layout.v_groups, weights.dtype
        )
        output = weights.new_empty(*weights.shape[:2], layout.value_dim)
        for chunk, values in numbers:
            if metadata is None:
                # zero times unwritten memory need not be zero
                absent = self.absent[max(chunk.start - full, 0) : max(chunk.stop - full, 0), :, None]
                values[values.shape[0] - absent.shape[0] :].masked_fill_(absent, 0.0)
                torch.bmm(weights[chunk], values, out=output[chunk])
                continue
            for group, dims in enumerate(_groups(layout.value_dim, layout.v_groups)):
                scaled = weights[chunk] * metadata[0][chunk, group, None]
                torch.bmm(scaled, values[..., dims], out=output[chunk, :, dims])
        output.mul_(_factors(layout.value_dim, layout.v_bits, weights))
        if metadata is not None:
            output.unflatten(-1, (layout.v_groups, -1)).add_(torch.bmm(weights, metadata[1].mT)[..., None])
        return output

    def _metadata(self, offset: int, size: int, bits: int, groups: int, dtype: torch.dtype) -> Tensor | None:
        """Returns (scale, zero) as [2, tiles, groups, tokens], zero for absent tokens; None at 16 bits."""
        if bits == 16:
            return None
        stored = torch.int16 if size == 2 else torch.float16
        held = segment(self.pages, self.layout, offset, size * groups, stored).index_select(0, self.ids)
        held = held.view(self.tiles.row.numel(), -1, groups, size // 2)
        if size == 2:
            held = torch.cat(scale_and_zero(held, bits), dim=-1)
        metadata = held.permute(3, 0, 2, 1).to(dtype, memory_format=torch.contiguous_format)
        metadata[:, self.tiles.full :].masked_fill_(self.absent[:, None], 0.0)
        return metadata

    def _numbers(
        self, offset: int, row_bytes: int, bits: int, dim: int, dtype: torch.dtype
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yields the slice of a few tiles at a time, and their keys or values as [tiles, tokens, dim].

        The numbers are codes divided by `_factors` or, at 16 bits, the keys or values themselves. Each iteration
        overwrites them.
        """
        count, pages, tokens = self.tiles.row.numel(), self.tiles.pages, self.tiles.pages * self.layout.capacity
        stored = segment(self.pages, self.layout, offset, row_bytes, torch.uint8)
        step = min(count, max(1, CHUNK_ELEMENTS // (tokens * dim)))
        packed = stored.new_empty(step * pages, stored.shape[1])
        numbers = torch.empty(step, tokens, dim, dtype=dtype, device=stored.device)
        codes = packed.view(step, tokens, row_bytes)
        planes: list[BitPlane] = []
        if bits < 8:
            codes = packed.new_empty(step, tokens, dim)
            planes = _bit_planes(packed.view(step, tokens, row_bytes), codes, bits)
        source = codes.view(self.dtype) if bits == 16 else codes
        for start in range(0, count, step):
            size = min(step, count - start)
            rows = packed[: size * pages]
            torch.index_select(stored, 0, self.ids[start * pages : (start + size) * pages], out=rows)
            for plane in planes:
                plane.unpack()
            numbers.copy_(source)
            yield slice(start, start + size), numbers[:size]


def _bit_planes(rows: Tensor, codes: Tensor, bits: int) -> list[BitPlane]:
    """Returns the planes of packed rows [.., row bytes], in the order of unpacking into `codes` [.., dim]."""
    planes, start, done = [], 0, 0
    for field in fields(bits):
        size = codes.shape[-1] * field // 8
        common = math.gcd(rows.shape[-1], start, size)
        word = next(word for word in WORD_DTYPES if common % word.itemsize == 0)
        words = rows[..., start : start + size].view(word)
        # concatenating the planes gives the elements in order
        for plane, part in enumerate(codes.view(word).chunk(8 // field, -1)):
            # codes of a single field are not shifted, see `_factors`
            shift = 0 if field == bits else done - field * plane
            mask = bytes([(2**field - 1) << (field * plane + shift)]) * word.itemsize
            planes.append(BitPlane(words, shift, int.from_bytes(mask, "little", signed=word.is_signed), part, done > 0))
        start, done = start + size, done + field
    return planes


def _factors(dim: int, bits: int, like: Tensor) -> Tensor:
    """Returns the factors that turn the numbers of `_numbers` into codes, [dim]."""
    planes = max(1, 8 // bits) if len(fields(bits)) == 1 else 1
    return like.new_tensor([2.0 ** (-bits * plane) for plane in range(planes)]).repeat_interleave(dim // planes)


def _groups(dim: int, groups: int) -> list[slice]:
    """Returns the slice of elements of each quantisation group."""
    size = dim // groups
    return [slice(start, start + size) for start in range(0, dim, size)]
