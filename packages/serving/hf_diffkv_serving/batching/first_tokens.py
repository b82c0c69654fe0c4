"""First tokens of the requests in flight, so that another request may share their pages."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

# tokens by which prompts are found; with fewer in common, there is nothing to share
KEY_TOKENS = 16

Key = tuple[int, ...]


class FirstTokens:
    """Prompts by the names of their requests."""

    def __init__(self) -> None:
        self._prompts: dict[Key, dict[str, Tensor]] = {}
        self._keys: dict[str, Key] = {}

    def add(self, name: str, input_ids: Tensor) -> None:
        """Adds a request with the prompt `input_ids`, int64 [tokens]."""
        key = self._keys[name] = _key(input_ids)
        self._prompts.setdefault(key, {})[name] = input_ids

    def copy(self, name: str, to: str) -> None:
        """Adds the request `to` with the prompt of another one, if that is known."""
        if name in self._keys:
            self.add(to, self._prompts[self._keys[name]][name])

    def remove(self, name: str) -> None:
        """Removes a request, if it is known."""
        key = self._keys.pop(name, None)
        if key is not None:
            del self._prompts[key][name]
            if not self._prompts[key]:
                del self._prompts[key]

    def alike(self, input_ids: Tensor, seen: Callable[[str], int]) -> tuple[str | None, int]:
        """Returns the request that shares the most leading tokens with `input_ids`, and their number, or None and 0.

        Args:
            seen: function from a request's name to the number of its tokens at this moment.
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
