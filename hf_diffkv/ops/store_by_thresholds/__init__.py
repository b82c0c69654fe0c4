"""Many new tokens enter rows whose tokens are chosen by thresholds: all that a row holds is levelled anew."""
