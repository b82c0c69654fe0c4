"""Models whose weights bitsandbytes quantises while they are loaded, and the memory that this takes."""

from __future__ import annotations

import ctypes
import logging
import sys
from typing import Any

import torch
from torch import nn


def quantization_config(weights: str, dtype: torch.dtype, device: str) -> Any:
    """Returns Transformers' configuration for `from_pretrained`.

    Products with 4-bit weights are computed in the model's dtype. In float32, which is Transformers' choice, they take
    longer, except on CPUs that lack instructions for the dtype.
    """
    from bitsandbytes.functional import has_avx512bf16
    from transformers import BitsAndBytesConfig

    # it reports for each product with 8-bit weights that inputs are cast to float16
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    if weights == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    fast = torch.device(device).type != "cpu" or (dtype is torch.bfloat16 and has_avx512bf16())
    compute_dtype = dtype if fast else torch.float32
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute_dtype)


def settle(model: Any) -> None:
    """Brings a model on a CPU into its final form, and gives back the memory that quantising took.

    - Weights left in 16 bits are copied, as they are parts of a mapped file and keep all that was read from it in
      memory.
    - With AVX512-BF16, bitsandbytes rearranges 4-bit weights at their first product, which takes several times their
      size, and a large output head gets 4 bits as well (output_head.py).
    """
    from bitsandbytes.functional import has_avx512bf16
    from bitsandbytes.nn import Linear4bit

    from .output_head import arrange, quantize_head

    if model.device.type == "cpu":
        for parameter in model.parameters():
            if type(parameter) is nn.Parameter:
                parameter.data = parameter.data.clone()
        layers = [module for module in model.modules() if isinstance(module, Linear4bit)]
        if layers and has_avx512bf16():
            quantize_head(model)
            for layer in layers:
                arrange(layer, model.dtype)
    give_back_memory()


def give_back_memory() -> None:
    """Gives freed memory back to the system, if the C library can."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
