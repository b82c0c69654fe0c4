"""A model as wide and deep as tiny-lm that caches latents (multi-head latent attention), built from tiny-lm's weights.

Everything but the attention comes from tiny-lm. An attention takes over what the two forms share, by principal
components: the faster half of the rotary pairs becomes the rotary part, whose key must serve both KV heads; the slower
half becomes the part without positions; the latent holds slower keys and values. Then they learn to match tiny-lm.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel, YoutuConfig

RANK = 128


def make_config(llama: Any) -> YoutuConfig:
    """The configuration of the latent model."""
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
        # half as many pairs then rotate as fast as the faster half of tiny-lm's
        rope_parameters={"rope_type": "default", "rope_theta": llama.rope_parameters["rope_theta"] ** 0.5},
    )


class Pupil:
    """A latent model whose attention layers learn from tiny-lm; nothing else in it is trained."""

    def __init__(self, teacher: PreTrainedModel, ids: torch.Tensor) -> None:
        """Args:
        teacher: tiny-lm.
        ids: text, [rows, tokens], whose hidden states decide the principal components.
        """
        self.teacher = teacher.requires_grad_(False).eval()
        config = make_config(teacher.config)
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
        own = {name: value for name, value in teacher.state_dict().items() if "self_attn" not in name}
        self.model.load_state_dict(own, strict=False)
        for ours, theirs, states in zip(self._attentions(self.model), self._attentions(teacher), self._inputs(ids)):
            convert(ours, theirs, states)
        self.model.requires_grad_(False)
        for attention in self._attentions(self.model):
            attention.requires_grad_(True)

    @staticmethod
    def _attentions(model: PreTrainedModel) -> list[nn.Module]:
        return [layer.self_attn for layer in model.model.layers]

    def _inputs(self, ids: torch.Tensor) -> list[torch.Tensor]:
        """Hidden states that enter the teacher's attention layers, each [tokens, hidden size]."""
        found: list[torch.Tensor] = []

        def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            found.append(kwargs["hidden_states"].flatten(0, 1))

        handles = [each.register_forward_pre_hook(note, with_kwargs=True) for each in self._attentions(self.teacher)]
        self.teacher(input_ids=ids, use_cache=False)
        for handle in handles:
            handle.remove()
        return found

    def loss(self, logits: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Mean divergence from the teacher's predictions of the next characters, by weight."""
        expected = self.teacher(input_ids=ids, use_cache=False).logits[:, :-1].log_softmax(-1)
        divergence = F.kl_div(logits[:, :-1].float().log_softmax(-1), expected, reduction="none", log_target=True)
        return (divergence.sum(-1) * weights[:, 1:]).sum() / weights[:, 1:].sum()


@torch.no_grad()
def convert(ours: nn.Module, theirs: nn.Module, states: torch.Tensor) -> None:
    """Sets the weights of a latent attention from one with KV heads; `states` are the latter's hidden states."""
    heads, dim, half = ours.num_heads, theirs.head_dim, theirs.head_dim // 2
    shared = theirs.num_key_value_groups
    groups = heads // shared
    query = theirs.q_proj.weight.view(heads, dim, -1)
    key, value = (part.weight.view(groups, dim, -1) for part in (theirs.k_proj, theirs.v_proj))
    # a rotary pair of tiny-lm is (i, i + dim / 2), fastest first; a pair stands for a complex number
    fast = [torch.arange(half // 2), torch.arange(half // 2) + half]
    slow = torch.cat([torch.arange(half // 2, half), torch.arange(half // 2, half) + half])

    fast_query, fast_key = (torch.complex(part[:, fast[0]], part[:, fast[1]]) for part in (query, key))
    complex_states = states.to(fast_key.dtype)
    asked = (complex_states @ fast_query.mT).abs().square().mean(1).view(groups, shared, -1).sum(1).sqrt()
    asked_keys = (complex_states @ fast_key.mT) * asked[:, None]
    # [pairs, groups, groups]; the first component of the groups' keys, rotated alike at every position
    covariance = torch.einsum("gtp,htp->pgh", asked_keys, asked_keys.conj())
    first = torch.linalg.eigh(covariance)[1][..., -1].mT
    rotary_key = (first.conj() * asked)[..., None] * fast_key
    # the conjugate of a query meets a key that represents `first / asked` times this key
    turned = (first / asked).conj().repeat_interleave(shared, dim=0)[..., None] * fast_query

    slow_states = states @ query[:, slow].mT
    sizes = slow_states.square().mean(1).view(groups, shared, -1).sum(1).sqrt()
    outputs = theirs.o_proj.weight.view(-1, groups, shared, dim).square().sum((0, 2)).sqrt()
    sizes = torch.cat([sizes / dim**0.5, outputs], dim=1).flatten()[:, None]
    expanded = torch.cat([key[:, slow], value], dim=1).flatten(0, 1)
    weighted = states @ (sizes * expanded).T
    components = torch.linalg.eigh(weighted.T @ weighted)[1][:, -RANK:]
    rows = (components / sizes).view(groups, half + dim, RANK).repeat_interleave(shared, dim=0)

    ours.q_proj.weight.copy_(torch.cat([query[:, slow], _interleaved(turned)], dim=1).flatten(0, 1))
    rotary = _interleaved(rotary_key.sum(0))
    ours.kv_a_proj_with_mqa.weight.copy_(torch.cat([components.T @ (sizes * expanded), rotary]))
    ours.kv_a_layernorm.weight.fill_((weighted @ components).square().mean().sqrt())
    ours.kv_b_proj.weight.copy_(rows.flatten(0, 1))
    ours.o_proj.weight.copy_(theirs.o_proj.weight)


def _interleaved(pairs: torch.Tensor) -> torch.Tensor:
    """Interleaves rows of real and imaginary parts."""
    return torch.view_as_real(pairs).transpose(-1, -2).flatten(-3, -2)
