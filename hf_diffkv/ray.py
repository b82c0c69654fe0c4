"""Alias of `hf_diffkv_serving.ray`."""

import sys

from .extras import import_extra

sys.modules[__name__] = import_extra("hf_diffkv_serving.ray", "ray")
