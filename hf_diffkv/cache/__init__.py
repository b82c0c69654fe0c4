"""The parts that depend on Transformers: cache, layers, attention and mask functions, registration."""

import transformers

from ..import_hook import complaint

if complaint() is not None:
    raise ImportError(complaint())

# Registration runs as soon as these two are imported and needs the modules here, which must be fully imported by then.
import transformers.generation.utils
import transformers.modeling_utils  # noqa: E402, F401
