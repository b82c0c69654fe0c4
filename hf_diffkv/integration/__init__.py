"""Everything that knows Transformers: the cache, its layers, the attention and mask functions, registration."""

# Registration happens as soon as these two are loaded, and needs the modules here: they must not be half loaded then.
import transformers.generation.utils
import transformers.modeling_utils  # noqa: F401
