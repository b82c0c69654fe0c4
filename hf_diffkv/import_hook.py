"""Registers "diffkv" once the Transformers modules to register it with have been imported.

`import transformers` imports neither them nor PyTorch. Importing them here would make `import hf_diffkv` take seconds.
"""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAME = "diffkv"
# attention of continuous batching, registered by hf_diffkv_serving
PAGED_NAME = "diffkv_paged"
CONFIGURATION = "transformers.generation.configuration_utils"
GENERATION = "transformers.generation.utils"
MODELS = "transformers.modeling_utils"
# our modules that register something
REGISTRATIONS = ("hf_diffkv.cache.registration", "hf_diffkv.cache.continuous_batching")
# first release of Transformers that the integration works with
OLDEST = (5, 17)


class _Finder(MetaPathFinder):
    """Finder that calls `after` with the name of each module in `awaited` once it has been imported."""

    def __init__(self, awaited: Sequence[str], after: Callable[[str], None]) -> None:
        self.awaited = awaited
        self.after = after

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.awaited:
            return None
        others = (finder for finder in list(sys.meta_path) if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = self._then(loader.exec_module)
        return spec

    def _then(self, exec_module: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
        @functools.wraps(exec_module)
        def load(module: ModuleType) -> None:
            exec_module(module)
            if module.__name__ in self.awaited:
                self.after(module.__name__)

        return load


def register() -> None:
    """Registers "diffkv" with Transformers, as soon as its models and `generate` are imported.

    A second call does nothing.
    """
    if MODELS in sys.modules and GENERATION in sys.modules:
        _register_now()
        return
    add_name()
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def unregister() -> None:
    """Restores Transformers to its state before `import hf_diffkv`. Models using "diffkv" must be switched back."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    for name in REGISTRATIONS:
        if name in sys.modules:
            sys.modules[name].unregister()
    remove_name()


def add_name() -> None:
    """Allows `GenerationConfig(cache_implementation="diffkv")` if its module has been imported."""
    if complaint() is None:
        _set_name(present=True)


def complaint() -> str | None:
    """Returns the problem with the imported Transformers; None if there is none or it has not been imported."""
    version = getattr(sys.modules.get("transformers"), "__version__", None)
    if version is None or tuple(int(part) for part in version.split(".")[:2]) >= OLDEST:
        return None
    oldest = ".".join(map(str, OLDEST))
    return f"hf_diffkv needs transformers>={oldest}, but this is {version}; pip install 'transformers>={oldest}'."


def remove_name() -> None:
    """Undoes `add_name`."""
    _set_name(present=False)


def _set_name(present: bool) -> None:
    configuration: Any = sys.modules.get(CONFIGURATION)
    names = getattr(configuration, "ALL_CACHE_IMPLEMENTATIONS", None)
    if names is not None and (NAME in names) != present:
        kept = [name for name in names if name != NAME]
        configuration.ALL_CACHE_IMPLEMENTATIONS = type(names)(kept + [NAME] * present)


def _register_now() -> None:
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    reason = complaint()
    if reason is not None:
        warnings.warn(f'"diffkv" is not registered: {reason}', stacklevel=2)
        return
    try:
        for name in REGISTRATIONS:
            importlib.import_module(name).register()
    except ImportError as error:
        # the release lacks a needed name, but the import of Transformers must still succeed
        warnings.warn(f'"diffkv" is not registered: {error}; please report it with the version number', stacklevel=2)


def _loaded(name: str) -> None:
    if _finder not in sys.meta_path:
        return
    _complete.add(name)
    if name == CONFIGURATION:
        add_name()
    elif name == MODELS and GENERATION not in sys.modules:
        # this import calls the function again
        importlib.import_module(GENERATION)
    elif all(_is_complete(needed) for needed in (MODELS, GENERATION)):
        _register_now()


def _is_complete(name: str) -> bool:
    """Returns whether a module is fully imported; it may still be importing if it imports the one just completed."""
    module = sys.modules.get(name)
    return module is not None and (name in _complete or not getattr(module.__spec__, "_initializing", False))


_complete: set[str] = set()
_finder = _Finder((CONFIGURATION, GENERATION, MODELS), _loaded)
