"""Everything that knows Transformers: the cache, its layers, the attention and mask functions, registration."""

import transformers

from ..import_hook import complaint

if complaint() is not None:
    raise ImportError(complaint())

# Registration happens as soon as these two are loaded, and needs the modules here: they must not be half loaded then.
import transformers.generation.utils
import transformers.modeling_utils  # noqa: E402, F401
