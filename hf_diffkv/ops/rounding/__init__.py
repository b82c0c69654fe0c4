"""Rounds keys for the queries that will read them, before they are quantised into pages."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from ...pages import TierLayout
from ..backend import KERNELS, NATIVE, choose, use_kernels, without_autocast
from . import native, reference
from .model_feedback import ModelFeedback
from .reference import LARGEST_BITS

__all__ = ["LARGEST_BITS", "ModelFeedback", "feedback_of", "round_keys", "second_moment"]


@without_autocast
def second_moment(query: Tensor, heads: int, valid: Tensor | None = None) -> Tensor:
    """Arguments and result as in `reference.second_moment`."""
    return _matrices(query).second_moment(query, heads, valid)


@without_autocast
def feedback_of(moment: Tensor, matrix: Tensor | None = None) -> Tensor:
    """Arguments and result as in `reference.feedback_of`."""
    return _matrices(moment).feedback_of(moment, matrix)


def _matrices(tensor: Tensor) -> ModuleType:
    if use_kernels(tensor.device, tensor.dtype) and tensor.dtype != torch.float64:
        from . import launch

        if tensor.shape[-1] <= launch.LARGEST_DIM:
            return launch
    return reference


@without_autocast
def round_keys(key: Tensor, row: Tensor, feedback: Tensor, tier: TierLayout) -> Tensor:
    """Arguments and result as in `reference.round_keys`; keys of a tier with more bits come back as they are."""
    if tier.k_bits > LARGEST_BITS or key.shape[0] == 0:
        return key
    backend = choose(key.device, key.dtype, tier)
    if backend == KERNELS:
        from . import launch

        return launch.round_keys(key, row, feedback, tier)
    return (native if backend == NATIVE else reference).round_keys(key, row, feedback, tier)
