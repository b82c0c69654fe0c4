"""Compilation options of decode attention, its splits, and the buffers between its kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...pages import LayerRows, PageLayout
from ..backend import device_of
from ..dequant import PORTABLE, PTX, fields
from ..quantize.launch import TRITON_DTYPES
from .rows import STEP, columns
from .splits import backend_of, choose_splits, warps_at_once

MOST_REGISTERS = 255
# registers per thread of a one-warp program; with 169 to 255, a multiprocessor runs eight, but loops are scheduled
# differently
ONE_WARP_REGISTERS = 200
# a multiprocessor runs twelve with this number, which takes 3 to 7 % less time on an H200 if nothing spills
TWELVE_WARPS_REGISTERS = 168
# registers for padded rows and two tiers, which would spill otherwise
PADDED_REGISTERS = 224
# gfx942: a compute unit has four parts, each with registers for one wave of this kernel
HIP_WAVES = 4
# the interpreter runs programs one by one; this number makes tests use splits
INTERPRETER_PROGRAMS = 20
# query heads per program of `latent_kernel`
LATENT_HEADS = 16


def is_absorbed(query: Tensor, layout: PageLayout) -> bool:
    """Returns whether queries [..., dim] form logits with both keys and values (store/latent.py)."""
    return query.shape[-1] != layout.high.key_dim


@dataclass(frozen=True)
class KernelConfig:
    """Compilation options of `attend_kernel` or `latent_kernel`.

    Attributes:
        heads: query heads of a group, padded; of a program for `latent_kernel`.
        block: tokens per step in the paged tiers, a multiple of the window's step.
        num_warps: warps per program.
        num_stages: stages of software pipelining.
        mode: method of unpacking codes (`ops/dequant.py`).
        operand: Triton dtype in which codes are multiplied.
        raw: Triton dtype in which rows in the model's dtype are multiplied.
        options: further compiler options.
    """

    heads: int
    block: int
    num_warps: int
    num_stages: int
    mode: int
    operand: tl.dtype
    raw: tl.dtype
    options: tuple[tuple[str, int], ...] = ()

    @classmethod
    def choose(cls, layout: PageLayout, group: int, dtype: torch.dtype, backend: str) -> KernelConfig:
        """Chooses the default options.

        Args:
            layout: layout of the pages.
            group: number of query heads per KV head.
            dtype: dtype of the model.
            backend: "cuda", "hip", or "cpu" for Triton's interpreter.
        """
        heads = max(8, triton.next_power_of_2(group))
        tiers = (layout.high, layout.low)
        uncompressed = any(16 in (tier.k_bits, tier.v_bits) for tier in tiers)
        widest = max(layout.high.key_dim, layout.high.value_dim)
        # a warp holds 128 elements of every head
        wide = max(1, triton.next_power_of_2(widest) // 128)
        if backend == "cpu":
            return cls(heads, 128, 1, 1, PORTABLE, tl.float32, tl.float32)
        if dtype == torch.float32:
            return cls(max(16, heads), 16, 4, 1, PORTABLE, tl.float32, tl.float32)
        raw = TRITON_DTYPES[dtype]
        if backend == "hip":
            # 16 columns, because 8 columns and one wave use no matrix instructions
            block = 64
            # prefetched tiles of keys and values must fit into a program's 64 KiB of shared memory
            while block * max(tier.key_row + tier.value_row for tier in tiers) >= 1 << 16:
                block //= 2
            return cls(max(16, heads), block, wide, 2, PORTABLE, tl.float16, raw)
        warps = wide
        if uncompressed:
            block = 16
        elif heads >= 16 and wide <= 2:
            block, warps = 64, 2
        else:
            block = 64 if widest <= 64 else 32
        # padding 8-bit values of 80 or 96 elements leaves no registers for prefetching
        padded = widest & (widest - 1) > 0
        crowded = padded and any(tier.v_bits == 8 for tier in tiers)
        in_fields = any(len(fields(bits)) > 1 for tier in tiers for bits in (tier.k_bits, tier.v_bits))
        # two loops unpack fields, and for some precisions they need too many registers together
        pair = warps == 1 and in_fields and not (uncompressed or padded or layout.one_tier or layout.selects)
        # prefetch one block instead of two; rows with 2-bit values are read too fast for that
        stages = 1 if crowded else 2 if pair and widest <= 64 and layout.low.v_bits > 2 else 3
        apart = layout.high.k_bits >= 2 * layout.low.k_bits and len(fields(layout.high.v_bits)) > 1
        bounded = warps == 1 and (widest > 64 or layout.one_tier or not in_fields) and not (pair and apart)
        # unbounded, the assembler spills in some kernels to reach a round number of registers; bounded, in others
        options = ()
        if uncompressed or crowded or wide > 2:
            options = (("maxnreg", MOST_REGISTERS),)
        elif bounded and not (padded or layout.selects) and _fits_twelve_warps(layout, group):
            options = (("maxnreg", TWELVE_WARPS_REGISTERS),)
        elif bounded:
            options = (("maxnreg", ONE_WARP_REGISTERS if layout.one_tier or not padded else PADDED_REGISTERS),)
        return cls(heads, block, warps, stages, PTX, tl.float16, raw, options)

    @classmethod
    def for_latents(cls, dtype: torch.dtype, backend: str) -> KernelConfig:
        """Chooses the options of `latent_kernel`; arguments as in `choose`."""
        if backend == "cpu":
            return cls(LATENT_HEADS, 64, 1, 1, PORTABLE, tl.float32, tl.float32)
        if dtype == torch.float32:
            return cls(LATENT_HEADS, 16, 4, 1, PORTABLE, tl.float32, tl.float32)
        raw = TRITON_DTYPES[dtype]
        if backend == "hip":
            return cls(LATENT_HEADS, 32, 4, 1, PORTABLE, tl.float16, raw)
        # with eight warps, each holds an eighth of the accumulators; four, or blocks of 64 tokens, spill on sm_90
        return cls(LATENT_HEADS, 32, 8, 2, PTX, tl.float16, raw)

    def programs_per_processor(self, layout: PageLayout, device: torch.device) -> int:
        """Returns the number of programs that fit in the registers and shared memory of a multiprocessor."""
        backend = backend_of(device)
        if backend == "cpu":
            return INTERPRETER_PROGRAMS
        if backend == "hip":
            return max(1, HIP_WAVES // self.num_warps)
        limits = device_of(device)
        registers = dict(self.options).get("maxnreg", MOST_REGISTERS)
        row = max(tier.key_row + tier.value_row for tier in (layout.high, layout.low))
        # prefetched rows, and 3 KiB for everything else, including 1 KiB for the system
        shared = max(self.num_stages - 1, 1) * self.block * row + 3072
        by_registers = warps_at_once(registers, limits.registers) // self.num_warps
        return max(1, min(by_registers, limits.shared // shared))


def _fits_twelve_warps(layout: PageLayout, group: int) -> bool:
    """Returns whether unpadded loops without scores compile to `TWELVE_WARPS_REGISTERS` without spilling."""
    high = layout.high
    if layout.one_tier:
        return len(fields(high.v_bits)) == 1 and (group > 1 or len(fields(high.k_bits)) == 1)
    return high.key_dim > 64 and high.k_bits == 4


@dataclass(frozen=True)
class Scratch:
    """Buffers between the two kernels, reusable by any launch of the same shape (every layer, every graph replay).

    Attributes:
        config: compilation options that the buffers are made for.
        output: partial outputs, float32 [rows, splits, group, value_dim].
        peak, total: softmax state of the splits, float32 [rows, splits, group].
        logits: logits relative to `block_peak`, fp16 [rows, positions, heads of a token]; None if pages have no scores.
        block_peak: running peaks, float32 [rows, blocks, heads of a token]; None if pages have no scores.
        max_tokens: largest number of tokens of a row, window included.
        slots: largest number of window slots.
    """

    config: KernelConfig
    output: Tensor
    peak: Tensor
    total: Tensor
    logits: Tensor | None
    block_peak: Tensor | None
    max_tokens: int
    slots: int

    @property
    def splits(self) -> int:
        return self.output.shape[1]

    @classmethod
    def allocate(
        cls,
        query: Tensor,
        rows: LayerRows,
        max_tokens: int,
        *,
        splits: int | None = None,
        config: KernelConfig | None = None,
        planned: int | None = None,
    ) -> Scratch:
        """Allocates buffers for rows of at most `max_tokens` tokens.

        Args:
            query: query states, [batch, query_heads, dim]; only the shape, dtype and device matter.
            rows: rows to attend to.
            max_tokens: upper bound on the tokens of any row, window included.
            splits: number of splits per row; None takes the default.
            config: compilation options; None takes the default.
            planned: number of requests, overriding that of `rows`; the buffers are then on the `meta` device.
        """
        layout, slots, device, group = rows.layout, rows.slots, query.device, query.shape[1] // rows.heads
        count, place = (rows.count, device) if planned is None else (planned * rows.heads, torch.device("meta"))
        if config is None:
            backend = backend_of(device)
            if is_absorbed(query, layout):
                config = KernelConfig.for_latents(query.dtype, backend)
            else:
                config = KernelConfig.choose(layout, group, query.dtype, backend)
        if splits is None:
            programs = device_of(device).processors * config.programs_per_processor(layout, device)
            splits = choose_splits(count * -(-group // config.heads), max_tokens, config.block, programs)
        step = STEP.value
        steps = -(-min(slots, max_tokens) // step)
        # each tier may end in a partial block
        positions = max_tokens + 2 * config.block
        blocks = max_tokens // config.block + 2 + steps

        def buffer(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(*shape, dtype=dtype, device=place)

        return cls(
            config=config,
            output=buffer(count, splits, group, layout.high.value_dim),
            peak=buffer(count, splits, group),
            total=buffer(count, splits, group),
            logits=buffer(count, positions, columns(group), dtype=torch.float16) if layout.selects else None,
            block_peak=buffer(count, blocks, columns(group)) if layout.selects else None,
            max_tokens=max_tokens,
            slots=slots,
        )

    def tensors(self) -> list[Tensor]:
        """Returns all allocated buffers."""
        return [tensor for tensor in vars(self).values() if isinstance(tensor, Tensor)]

    def check(self, rows: LayerRows, group: int, max_tokens: int) -> None:
        """Raises `ValueError` unless the buffers fit these rows, with `group` query heads each."""
        made, needed = self.output.shape, (rows.count, group, rows.layout.high.value_dim)
        if (made[0], *made[2:]) != needed:
            raise ValueError(
                f"scratch was made for {made[0]} rows of {made[2]} heads of {made[3]}, not for {needed[0]} rows of "
                f"{needed[1]} heads of {needed[2]}."
            )
        if max_tokens > self.max_tokens or rows.slots > self.slots:
            raise ValueError(
                f"scratch holds {self.max_tokens} tokens and {self.slots} window slots per row, not {max_tokens} and "
                f"{rows.slots}."
            )
