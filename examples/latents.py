"""Generates with a model that caches latents, and reports what its cache holds (docs/latent.md).

    python examples/latents.py [--model zai-org/GLM-4.7-Flash] [--precision K8V8]

Without --model, a tiny random one shows the calls and the bytes; its text is meaningless.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, Glm4MoeLiteConfig, PreTrainedModel

from hf_diffkv import DiffKVCache
from hf_diffkv.compat import passing

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "eos_token_id": None,
}


def tiny_model() -> PreTrainedModel:
    """A random model with GLM-4.7-Flash's architecture."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(Glm4MoeLiteConfig(**SIZES)).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or name of a model that caches latents")
    parser.add_argument("--precision", default="K8V8", help="of rotary keys, 8 bits or more, and of latents")
    parser.add_argument("--prompt", default="A latent stands for the keys and values of all heads, because")
    args = parser.parse_args()
    if args.model is None:
        model, ids = tiny_model(), torch.randint(3, 128, (1, 200), generator=torch.Generator().manual_seed(0))
    else:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto", device_map="auto")
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        ids = tokenizer(args.prompt, return_tensors="pt").input_ids.to(model.device)
    options = {"max_new_tokens": 32, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    exact = model.generate(ids, **options, **passing(DynamicCache(config=model.config)))
    cache = DiffKVCache(model, high=args.precision)
    text = model.generate(ids, **options, **passing(cache))
    # either text may end early
    written = [output[0, ids.shape[1] :].tolist() for output in (exact, text)]
    same = sum(a == b for a, b in zip(*written))
    print(f"{same} of {max(map(len, written))} tokens as with DynamicCache")
    print(cache.memory())
    if args.model is not None:
        print(tokenizer.decode(text[0]))


if __name__ == "__main__":
    main()
