"""Choosing thresholds for a model by measuring: `hf-diffkv calibrate` (docs/calibration.md)."""
