"""What a user can choose: `DiffKVConfig`, its precisions, its file, and configurations by name."""

from .diffkv_config import DiffKVConfig, Threshold, ThresholdLike
from .precision import Precision

__all__ = ["DiffKVConfig", "Precision", "Threshold", "ThresholdLike"]
