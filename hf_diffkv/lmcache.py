"""Alias of `hf_diffkv_serving.lmcache`, also for `python -m hf_diffkv.lmcache`."""

import sys

from .extras import import_extra

module = import_extra("hf_diffkv_serving.lmcache", "serve")
if __name__ == "__main__":
    module.main()
else:
    sys.modules[__name__] = module
