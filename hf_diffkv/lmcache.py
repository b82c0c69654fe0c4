"""`hf_diffkv_serving.lmcache`: importing this module gives that one, and `python -m hf_diffkv.lmcache` runs it."""

import sys

from .extras import beside

module = beside("hf_diffkv_serving.lmcache", "serve")
if __name__ == "__main__":
    module.main()
else:
    sys.modules[__name__] = module
