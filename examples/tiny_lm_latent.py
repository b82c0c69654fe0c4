"""A model of tiny-lm's size that caches latents (multi-head latent attention), made from tiny-lm's weights.

Everything but the attention is tiny-lm's. An attention begins with what the two forms share: half of the rotary pairs,
the faster ones, become the rotary part, the slower ones the part without positions, and the latent holds the principal
components of slower keys and values. One rotary key must serve both KV heads, so the attentions then learn to attend
like tiny-lm's (`attention_loss`), before the whole model learns the tasks.
"""

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, YoutuConfig

RANK = 128


def make_config(llama: Any) -> YoutuConfig:
    """The configuration of a latent model as wide and as deep as tiny-lm."""
    kept = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads hidden_act rms_norm_eps "
        "max_position_embeddings pad_token_id bos_token_id eos_token_id tie_word_embeddings"
    ).split()
    half = llama.head_dim // 2
    return YoutuConfig(
        **{name: getattr(llama, name) for name in kept},
        num_key_value_heads=llama.num_attention_heads,
        q_lora_rank=None,
        kv_lora_rank=RANK,
        qk_rope_head_dim=half,
        qk_nope_head_dim=half,
        v_head_dim=llama.head_dim,
        # so that half as many pairs turn as fast as the faster half of tiny-lm's
        rope_parameters={"rope_type": "default", "rope_theta": llama.rope_parameters["rope_theta"] ** 0.5},
    )


class Watch:
    """Inputs and outputs of a model's attentions in its last forward."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.seen: list[tuple[dict[str, Any], tuple[torch.Tensor, torch.Tensor]]] = []
        for layer in model.model.layers:
            layer.self_attn.register_forward_hook(self._note, with_kwargs=True)

    def _note(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        self.seen.append((kwargs, output))


class Pupil:
    """A latent model whose attentions learn from tiny-lm's."""

    def __init__(self, teacher: PreTrainedModel, ids: torch.Tensor) -> None:
        """Args:
        teacher: tiny-lm with eager attention.
        ids: text, [rows, tokens], of which the principal components are taken.
        """
        self.teacher = teacher.requires_grad_(False).eval()
        self.watch = Watch(teacher)
        config = make_config(teacher.config)
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
        own = {name: value for name, value in teacher.state_dict().items() if "_proj" not in name or "mlp" in name}
        self.model.load_state_dict(own, strict=False)
        for (inputs, _), ours, theirs in zip(self._watched(ids), self.model.model.layers, teacher.model.layers):
            convert(ours.self_attn, theirs.self_attn, inputs["hidden_states"].flatten(0, 1))

    def _watched(self, ids: torch.Tensor) -> list[Any]:
        self.watch.seen.clear()
        with torch.no_grad():
            self.teacher.model(input_ids=ids, use_cache=False)
        return self.watch.seen

    def attention_loss(self, model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
        """Mean over layers of how the probabilities of attention diverge, and of the outputs' relative error."""
        positions = torch.arange(ids.shape[1])[None]
        losses = []
        for (inputs, (output, probabilities)), layer in zip(self._watched(ids), model.model.layers):
            states = inputs["hidden_states"]
            turns = model.model.rotary_emb(states, position_ids=positions)
            ours, weights = layer.self_attn(states, turns, inputs["attention_mask"])
            shown = probabilities.clamp(min=1e-9)
            divergence = (shown * (shown.log() - weights.clamp(min=1e-9).log())).sum(-1).mean()
            losses.append(divergence + (ours - output).square().mean() / output.square().mean())
        return torch.stack(losses).mean()


@torch.no_grad()
def convert(ours: nn.Module, theirs: nn.Module, inputs: torch.Tensor) -> None:
    """Sets the weights of a latent attention from those of one with KV heads; `inputs` are its hidden states."""
    heads, dim, half = ours.num_heads, theirs.head_dim, theirs.head_dim // 2
    kv_heads = heads // theirs.num_key_value_groups
    # a rotary pair of a head of tiny-lm is (i, i + dim / 2), the fastest first
    fast = torch.stack([torch.arange(half // 2), torch.arange(half // 2) + half], dim=1).flatten()
    slow = torch.stack([torch.arange(half // 2, half), torch.arange(half // 2, half) + half], dim=1).flatten()
    query = theirs.q_proj.weight.view(heads, dim, -1)
    key, value = (part.weight.view(kv_heads, dim, -1) for part in (theirs.k_proj, theirs.v_proj))
    ours.q_proj.weight.copy_(torch.cat([query[:, slow], query[:, fast]], dim=1).flatten(0, 1))
    ours.o_proj.weight.copy_(theirs.o_proj.weight)

    expanded = torch.cat([key[:, slow], value], dim=1).flatten(0, 1)
    states = inputs @ expanded.T
    components = torch.linalg.eigh(states.T @ states)[1][:, -RANK:]
    rotary = key[:, fast].mean(dim=0)
    ours.kv_a_proj_with_mqa.weight.copy_(torch.cat([components.T @ expanded, rotary]))
    ours.kv_a_layernorm.weight.fill_((states @ components).square().mean(-1).sqrt().mean())
    rows = components.view(kv_heads, half + dim, RANK).repeat_interleave(heads // kv_heads, dim=0)
    ours.kv_b_proj.weight.copy_(rows.flatten(0, 1))
