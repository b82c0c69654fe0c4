"""A model for `lighteval custom`: lighteval's Transformers model, generating with a DiffKV cache.

The cache's arguments are below; docs/evaluation-harnesses.md has the command.
"""

# lighteval uses the first model class among this file's names, so the base class itself is not imported
from lighteval.models.transformers import transformers_model

import hf_diffkv  # noqa: F401 (registers the cache)

CACHE_CONFIG = {"alpha_high": 3.0, "alpha_low": 0.0}
# lighteval reuses answers from here, whatever the cache, so use one folder per configuration
ANSWERS = "lighteval-answers/diffkv-3-0"


class DiffKVModel(transformers_model.TransformersModel):
    """lighteval's Transformers model; requests in a batch are padded on the left."""

    def __init__(self, config) -> None:
        super().__init__(
            transformers_model.TransformersModelConfig(model_name=config.model_name, batch_size=8, cache_dir=ANSWERS)
        )
        self.model.generation_config.cache_implementation = "diffkv"
        self.model.generation_config.cache_config = CACHE_CONFIG

    def loglikelihood(self, docs):
        raise ValueError("log-likelihoods read nothing from a cache; use tasks that generate.")

    loglikelihood_rolling = loglikelihood
