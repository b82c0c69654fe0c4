"""Modules of a model that keep a state per request, such as linear attention and short convolutions.

Transformers' engine packs the tokens of all requests into one row, where such a module would carry the state of one
request into the next. Its forward is therefore replaced: each request's tokens run with the request's own state.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from hf_diffkv.compat import CACHE_NAMES

# what such a module calls on a cache
UPDATES = {"update_conv_state", "update_recurrent_state"}
# scans that begin without a state even if there is one
STATELESS_SCANS = {"mamba_selective_scan"}
CACHE_ARGUMENTS = ("cache_params", *CACHE_NAMES)


class LinearModule:
    """One such module, which runs its own forward or the one from `take_over`.

    Attributes:
        layer: index of its layer.
        goes_on: whether several tokens at once may continue from a state; if not, they run one by one.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.layer = module, module.layer_idx
        original = _original(module)
        self.goes_on = not STATELESS_SCANS & set(original.__code__.co_names)
        self._cache_argument = next(name for name in CACHE_ARGUMENTS if name in inspect.signature(original).parameters)
        # what replaced the class's forward before, and whether ours does now
        self._forward: Callable[..., Tensor] | None = None
        self._taken = False

    def take_over(self, run: Callable[[LinearModule, Tensor], Tensor]) -> None:
        """Replaces the module's forward with `run`, called with this object and hidden states [1, tokens, hidden]."""
        self.give_back()
        self._forward = self.module.__dict__.get("forward")

        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return run(self, hidden_states)

        self.module.forward = forward  # type: ignore[method-assign]
        self._taken = True

    def give_back(self) -> None:
        """Restores the module's own forward."""
        if not self._taken:
            return
        self._taken = False
        del self.module.__dict__["forward"]
        if self._forward is not None:
            self.module.forward = self._forward  # type: ignore[method-assign]
            self._forward = None

    def run(self, hidden_states: Tensor, states: LinearAttentionLayer) -> Tensor:
        """Runs the module's own forward on rows that each have a state, which it updates.

        Args:
            hidden_states: [rows, tokens, hidden].
            states: states of the same rows, or empty.

        Returns:
            [rows, tokens, hidden].
        """
        cache = Cache(layers=[states] * (self.layer + 1))
        forward = self._forward or type(self.module).forward.__get__(self.module)
        return forward(hidden_states, **{self._cache_argument: cache})


def find_modules(decoder: nn.Module) -> list[LinearModule]:
    """Returns all modules of a model that keep states, in the order of layers.

    Raises:
        ValueError: a module keeps states other than in a forward of hidden states, or a layer has several.
    """
    found: list[LinearModule] = []
    for module in decoder.modules():
        forward = _original(module)
        if not UPDATES & _names(forward, type(module)):
            continue
        parameters = list(inspect.signature(forward).parameters)
        hidden_only = UPDATES & set(forward.__code__.co_names) and parameters[1:2] == ["hidden_states"]
        if not hidden_only or not isinstance(getattr(module, "layer_idx", None), int):
            raise ValueError(type(module).__name__)
        found.append(LinearModule(module))
    if len({each.layer for each in found}) != len(found):
        raise ValueError(type(found[0].module).__name__)
    return sorted(found, key=lambda each: each.layer)


def _original(module: nn.Module) -> Any:
    return inspect.unwrap(type(module).forward)


def _names(forward: Any, owner: type) -> set[str]:
    """Returns the names that a class's forward, or any of its own methods, uses."""
    own = (inspect.unwrap(member) for member in vars(owner).values() if inspect.isfunction(member))
    return {name for function in (forward, *own) for name in getattr(function, "__code__", _names).co_names}
