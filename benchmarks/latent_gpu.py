"""A decode step's attention over latents (docs/latent.md) on a GPU, one layer with random weights.

Each variant goes from the model's queries to the heads' outputs: DynamicCache, which expands all latents and attends
with PyTorch's fastest attention; an absorbed step in PyTorch on exact latents; DiffKV's kernels. All are first compared
with float32, then replayed in turns with a cold L2 cache.

    python benchmarks/latent_gpu.py [--shapes glm deepseek] [--cases 1x4096 32x4096] [--precisions K8V8 K8V4]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from measure import Session, free_memory, parser, relative_error
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import DeepseekV3Config, Glm4MoeLiteConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import Glm4MoeLiteAttention

from hf_diffkv import DiffKVCache
from hf_diffkv.cache.latent_weights import Projection
from hf_diffkv.ops.softmax import Softmax
from hf_diffkv.store import settle
from hf_diffkv.store.decode import prepare_scratch
from hf_diffkv.store.step import refresh
from hf_diffkv.store.transform import model_form, query_form

SHAPES: dict[str, tuple[Any, Any]] = {
    "glm": (Glm4MoeLiteConfig, Glm4MoeLiteAttention),
    "deepseek": (DeepseekV3Config, DeepseekV3Attention),
}
TINY = {"num_attention_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
CASES = ("1x4096", "1x32768", "32x4096", "32x8192")
# relative to float32; K8V4 suits random latents less than a model's
LIMIT = 0.2
KERNELS = ("latent_kernel", "finish_kernel")


class Layer:
    """An attention layer, and the latents of some requests.

    Attributes:
        rope, latent: rotary keys and latents, [batch, 1, tokens, dim].
        query: queries of one new token, [batch, heads, 1, nope_dim + rope_dim].
    """

    def __init__(self, session: Session, shape: str, batch: int, tokens: int, tiny: bool) -> None:
        configuration, attention = SHAPES[shape]
        self.config = configuration(num_hidden_layers=1, **(TINY if tiny else {}))
        self.config._attn_implementation = "sdpa"
        torch.manual_seed(0)
        with session.device:
            self.module = attention(self.config, 0).to(session.dtype).eval()
            weight = self.module.kv_b_proj.weight
            weight.data.normal_(std=weight.shape[1] ** -0.5)
            sizes = {"dtype": session.dtype}
            self.rope = torch.randn(batch, 1, tokens, self.config.qk_rope_head_dim, **sizes)
            self.latent = torch.randn(batch, 1, tokens, self.config.kv_lora_rank, **sizes)
            dim = self.config.qk_nope_head_dim + self.config.qk_rope_head_dim
            self.query = torch.randn(batch, self.config.num_attention_heads, 1, dim, **sizes)
        self.scaling = self.module.scaling

    def expanded(self) -> Tensor:
        """Attends as with a DynamicCache."""
        key, value = self.module.expand_kv(self.latent, self.rope)
        return scaled_dot_product_attention(self.query, key, value, scale=self.scaling)

    def absorbed(self) -> Tensor:
        """Attends to exact latents with absorbed queries, in PyTorch."""
        projection = Projection.of(self.module, self.latent)
        rope, latent = projection.absorb(self.query)[:, :, 0].split([self.rope.shape[-1], self.latent.shape[-1]], -1)
        logits = torch.bmm(rope, self.rope[:, 0].mT).baddbmm_(latent, self.latent[:, 0].mT).float() * self.scaling
        weights = logits.softmax(-1).to(self.latent.dtype)
        return projection.values(torch.bmm(weights, self.latent[:, 0])[:, :, None])

    def exact(self) -> Tensor:
        """The output in float32, of the first request."""
        key, value = (part[:1].float() for part in (self.rope, self.latent))
        projection = Projection(Projection.of(self.module, self.latent).weight.float(), self.config.qk_nope_head_dim)
        logits = projection.absorb(self.query[:1].float()) @ torch.cat([key, value], -1).mT * self.scaling
        return projection.values(logits.softmax(-1) @ value)

    def compressed(self, precision: str) -> Callable[[], Tensor]:
        """Attends from the pages of a cache, which receive the latents as those of a prompt."""
        cache = DiffKVCache(self.config, high=precision)
        layer, batch = cache.layers[0], self.query.shape[0]
        with torch.no_grad():
            layer.update(self.latent[:1], self.rope[:1])
            layer.expand = self.module.expand_kv
            query = self.query[:1].expand(-1, -1, self.latent.shape[2], -1).contiguous()
            layer.attend(query, Softmax(self.scaling))
        cache.batch_repeat_interleave(batch)
        settle(layer.store)
        refresh(layer.store)
        store, projection = layer.store, Projection.of(self.module, self.latent)
        absorbed = projection.absorb(self.query)
        bounds = store.layer_bounds[0]
        options = {"bounds": bounds, "scratch": prepare_scratch(store, absorbed[:, :, 0], bounds.max_tokens)}

        def call() -> Tensor:
            # heads are rotated as if they were tokens, as in a model's step
            query = query_form(store, projection.absorb(self.query)[None, :, :, 0])[0]
            output = store.ops.decode_attention(query, store.rows(0), Softmax(self.scaling), **options)
            return projection.values(model_form(store, output[None])[0][:, :, None])

        return call


@torch.no_grad()
def measure(session: Session, shape: str, batch: int, tokens: int, args: argparse.Namespace) -> None:
    """Measures all variants at one size."""
    layer = Layer(session, shape, batch, tokens, args.tiny)
    # the compressed caches hold copies of the first request
    layer.rope, layer.latent = (part[:1].expand(batch, -1, -1, -1).contiguous() for part in (layer.rope, layer.latent))
    case = {"kind": "latent step", "shape": shape, "batch": batch, "context": tokens}
    exact, calls = layer.exact(), {"DynamicCache": layer.expanded, "absorbed, exact latents": layer.absorbed}
    for precision in args.precisions:
        try:
            calls[f"DiffKV {precision}"] = layer.compressed(precision)
        except Exception as failure:
            session.failed({**case, "cache": precision}, failure)
    errors = {}
    for name, call in list(calls.items()):
        try:
            errors[name] = relative_error(call()[:1], exact)
        except RuntimeError as failure:
            session.failed({**case, "cache": name}, failure)
            del calls[name]
            continue
        if not errors[name] < LIMIT:
            raise SystemExit(f"{name} is wrong by {errors[name]:.3f}; nothing timed.")
    for (name, call), timing in zip(calls.items(), session.time_all(list(calls.values()))):
        row = {**case, "cache": name, "error": round(errors[name], 5), **timing.row()}
        if name.startswith("DiffKV"):
            kernels = session.kernel_times(call)
            row |= {f"{key}_us": round(us, 2) for key, us in kernels.items() if key in KERNELS}
            row |= {"other_us": round(sum(kernels.values()) - sum(kernels.get(key, 0) for key in KERNELS), 2)}
        session.add(row)
        print(f"{shape} {batch} x {tokens} {name}: {row['us']} us, error {errors[name]:.4f}", flush=True)


def main(arguments: list[str] | None = None) -> Session:
    options = parser(__doc__, "latent_gpu")
    options.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    options.add_argument("--cases", nargs="+", default=list(CASES), help="requests x tokens")
    options.add_argument("--precisions", nargs="+", default=["K16V16", "K8V8", "K8V6", "K8V4"])
    args = options.parse_args(arguments)
    if args.tiny:
        args.cases = ["2x160"]
    session = Session(args)
    for case in args.cases:
        for shape in args.shapes:
            batch, tokens = map(int, case.split("x"))
            if session.has_time(f"{shape}, {case}"):
                measure(session, shape, batch, tokens, args)
            free_memory()
    return session


if __name__ == "__main__":
    main()
