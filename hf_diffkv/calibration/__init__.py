"""Measures a model to choose its precisions and thresholds: `hf-diffkv calibrate` (docs/calibration.md)."""
