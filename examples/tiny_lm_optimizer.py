"""The optimizer of tiny-lm: Muon for the matrices inside the blocks, AdamW for the rest.

torch.optim.Muon computes in bfloat16, which is about twenty times slower on processors without bfloat16 instructions.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

# Higher rates saturate attention before it has learnt to look things up.
MUON_LR = 5e-3
ADAMW_LR = 5e-4
# The quintic that drives singular values to 1 in few iterations (https://kellerjordan.github.io/posts/muon).
QUINTIC = (3.4445, -4.775, 2.0315)


def has_bfloat16() -> bool:
    """Whether this processor has instructions that multiply bfloat16 matrices."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))


def orthogonal(matrix: torch.Tensor, dtype: torch.dtype, iterations: int = 5) -> torch.Tensor:
    """The matrix with all singular values moved close to 1, computed in `dtype`."""
    a, b, c = QUINTIC
    x = matrix.to(dtype)
    tall = x.size(0) > x.size(1)
    x = x.T if tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(iterations):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if tall else x).to(matrix.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum whose updates are orthogonal matrices, in bfloat16 if the processor supports it, else in float32."""

    def __init__(
        self, params: list[torch.nn.Parameter], lr: float, weight_decay: float = 0.0, momentum: float = 0.95
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.compute_dtype = torch.bfloat16 if has_bfloat16() else torch.float32

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)
        return loss

    def _update(self, param: torch.nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(param.grad)
        buffer = state["momentum_buffer"].lerp_(param.grad, 1 - group["momentum"])
        update = orthogonal(param.grad.lerp(buffer, group["momentum"]), self.compute_dtype)
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.add_(update, alpha=-group["lr"] * max(1.0, param.size(0) / param.size(1)) ** 0.5)


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the matrices inside the blocks, AdamW for the embedding and the norms, as one optimizer."""

    def __init__(self, model: PreTrainedModel) -> None:
        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
        super().__init__([*matrices, *others], {})
        self.parts = (
            Muon(matrices, lr=MUON_LR, weight_decay=0.01),
            torch.optim.AdamW(others, lr=ADAMW_LR, betas=(0.9, 0.95), weight_decay=0.0),
        )
        self._share_groups()

    def _share_groups(self) -> None:
        # The same dictionaries as in the parts, so that a scheduler can reach them.
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._share_groups()
