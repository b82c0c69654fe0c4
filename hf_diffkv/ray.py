"""`hf_diffkv_serving.ray`: importing this module gives that one."""

import sys

from .extras import beside

sys.modules[__name__] = beside("hf_diffkv_serving.ray", "ray")
