"""Alias of `hf_diffkv_serving.ray`."""

import sys

from .extras import beside

sys.modules[__name__] = beside("hf_diffkv_serving.ray", "ray")
