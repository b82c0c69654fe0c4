"""What a user can choose: `DiffKVConfig`, its precisions, its file, and configurations by name."""

from ..precision import Precision
from .diffkv_config import DiffKVConfig, Threshold, ThresholdLike

__all__ = ["DiffKVConfig", "Precision", "Threshold", "ThresholdLike"]
