"""Configuration: `DiffKVConfig`, its precisions and files, and presets."""

from ..precision import Precision
from .diffkv_config import DiffKVConfig, Threshold, ThresholdLike

__all__ = ["DiffKVConfig", "Precision", "Threshold", "ThresholdLike"]
