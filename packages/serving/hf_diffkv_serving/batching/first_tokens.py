"""What the requests that are there began with, so that another one may share their pages."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

# tokens by which prompts are found: with fewer in common nothing is stored that could be shared
KEY_TOKENS = 16

Key = tuple[int, ...]


class FirstTokens:
    """Prompts by the names of their requests."""

    def __init__(self) -> None:
        self._prompts: dict[Key, dict[str, Tensor]] = {}
        self._keys: dict[str, Key] = {}

    def add(self, name: str, input_ids: Tensor) -> None:
        """A request has come whose prompt is `input_ids`, int64 [tokens]."""
        key = self._keys[name] = _key(input_ids)
        self._prompts.setdefault(key, {})[name] = input_ids

    def copy(self, name: str, to: str) -> None:
        """A request goes on as another one does, if that is known."""
        if name in self._keys:
            self.add(to, self._prompts[self._keys[name]][name])

    def remove(self, name: str) -> None:
        """A request is gone, if it was known."""
        key = self._keys.pop(name, None)
        if key is not None:
            del self._prompts[key][name]
            if not self._prompts[key]:
                del self._prompts[key]

    def alike(self, input_ids: Tensor, seen: Callable[[str], int]) -> tuple[str | None, int]:
        """The request that has most of its first tokens in common with `input_ids`, and how many; None where none has.

        Args:
            seen: how many tokens of a request there are at this moment.
        """
        found: tuple[str | None, int] = (None, 0)
        for name, prompt in self._prompts.get(_key(input_ids), {}).items():
            common = _common(prompt[: seen(name)], input_ids)
            if common > found[1]:
                found = (name, common)
            if common == input_ids.numel():
                break
        return found


def _key(input_ids: Tensor) -> Key:
    return tuple(input_ids[:KEY_TOKENS].tolist())


def _common(one: Tensor, other: Tensor) -> int:
    shortest = min(one.numel(), other.numel())
    differs = (one[:shortest] != other[:shortest]).nonzero()
    return int(differs[0]) if differs.numel() else shortest
