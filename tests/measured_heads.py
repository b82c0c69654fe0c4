"""Made-up losses of a model's heads."""

from __future__ import annotations

from transformers import PreTrainedModel

from hf_diffkv.heads.recognition import mark_of
from hf_diffkv.heads.sensitivity import Sensitivity
from hf_diffkv.heads.weights import model_digest

ERRORS = {2: 5.5, 3: 1.0, 4: 0.22, 5: 0.051, 6: 0.012, 8: 0.001}


def measured(model: PreTrainedModel) -> Sensitivity:
    """Returns losses of which the first head of each layer has a hundred times the others'."""
    config = model.config
    losses = ((1e-2, *[1e-4] * (config.num_key_value_heads - 1)),) * config.num_hidden_layers
    shapes = ((config.num_key_value_heads, config.head_dim, config.head_dim),) * config.num_hidden_layers
    return Sensitivity(
        *(config.model_type, model_digest(model), 2, shapes, losses, losses),
        *({bits: error for bits, error in ERRORS.items()}, {bits: error / 5.5 for bits, error in ERRORS.items()}),
        *(1, "0" * 16, mark_of(model)),
    )
