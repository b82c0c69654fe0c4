"""Importing the package before Transformers has loaded anything: it registers once the models are loaded, not before.

Every case needs a process in which nothing has been imported yet.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from programs import run_program

CHECKS = """
import importlib
import sys
import hf_diffkv

def hooks():
    return [finder for finder in sys.meta_path if type(finder).__module__.startswith("hf_diffkv")]

def registered():
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.generation import configuration_utils
    from transformers.generation.utils import GenerationMixin

    return [
        "diffkv" in AttentionInterface().valid_keys(),
        "diffkv" in AttentionMaskInterface().valid_keys(),
        "diffkv" in configuration_utils.ALL_CACHE_IMPLEMENTATIONS,
        hasattr(GenerationMixin._prepare_cache_for_generation, "__wrapped__"),
    ]

assert "torch" not in sys.modules and "transformers" not in sys.modules
assert len(hooks()) == 1
"""


def run(program: str) -> None:
    run_program(CHECKS + program)


@pytest.mark.oldest
@pytest.mark.parametrize(
    "first",
    [
        "transformers.generation.utils",
        "transformers.modeling_utils",
        "transformers.models.llama.modeling_llama",
        "hf_diffkv.cache.diffkv_cache",
        "hf_diffkv.training",
    ],
)
@pytest.mark.slow
def test_registered_whatever_is_imported_first(first: str) -> None:
    run(f"import {first}\nassert registered() == [True] * 4\nassert not hooks()")


CIRCULAR = """
import types
sys.path.insert(0, {folder!r})
calls = []
def register():
    models, generation = sys.modules["transformers.modeling_utils"], sys.modules["transformers.generation.utils"]
    calls.append((models.PreTrainedModel, generation.GenerationMixin))
for name in hf_diffkv.import_hook.REGISTRATIONS:
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].register = register
import transformers.{first}
import transformers.modeling_utils
assert len(calls) == 2 and not hooks()
"""


@pytest.mark.parametrize("first", ["modeling_utils", "generation.utils"])
@pytest.mark.parametrize("outer", ["modeling_utils", "generation/utils", None])
def test_neither_module_is_half_loaded_when_registering(tmp_path: Path, outer: str | None, first: str) -> None:
    """Stand-ins for Transformers' modules, of which `outer` imports the other before it is complete."""
    inner = {"modeling_utils": "generation.utils", "generation/utils": "modeling_utils"}
    content = {"modeling_utils": "PreTrainedModel = 1", "generation/utils": "GenerationMixin = 2"}
    (tmp_path / "transformers/generation").mkdir(parents=True)
    (tmp_path / "transformers/__init__.py").touch()
    (tmp_path / "transformers/generation/__init__.py").touch()
    for name, line in content.items():
        before = f"import transformers.{inner[name]}\n" if name == outer else ""
        (tmp_path / f"transformers/{name}.py").write_text(before + line)
    run(CIRCULAR.format(folder=str(tmp_path), first=first))


@pytest.mark.oldest
@pytest.mark.slow
def test_a_model_without_generate_can_be_left_on_diffkv() -> None:
    run(
        "from transformers import ViTConfig, ViTModel\n"
        "config = ViTConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)\n"
        "assert ViTModel._from_config(config, attn_implementation='diffkv').config._attn_implementation == 'diffkv'"
    )


@pytest.mark.oldest
def test_name_is_known_before_pytorch_is_loaded() -> None:
    run(
        "from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS\n"
        "assert 'diffkv' in ALL_CACHE_IMPLEMENTATIONS\n"
        "hf_diffkv.unregister()\n"
        "assert 'diffkv' not in sys.modules['transformers.generation.configuration_utils'].ALL_CACHE_IMPLEMENTATIONS\n"
    )


@pytest.mark.slow
def test_unregistered_before_anything_was_loaded() -> None:
    run(
        "hf_diffkv.unregister()\n"
        "assert not hooks()\n"
        "assert registered() == [False] * 4\n"
        "assert hf_diffkv.DiffKVCache and registered() == [False] * 4\n"
        "hf_diffkv.register()\n"
        "assert registered() == [True] * 4 and not hooks()"
    )


@pytest.mark.slow
def test_reloading_keeps_one_hook() -> None:
    run("importlib.reload(hf_diffkv)\nassert len(hooks()) == 1\nassert registered() == [True] * 4 and not hooks()")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.slow
def test_a_forked_child_registers_for_itself() -> None:
    run(
        "import os\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(0 if registered() == [True] * 4 and not hooks() else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert len(hooks()) == 1 and 'torch' not in sys.modules\n"
        "assert registered() == [True] * 4"
    )


def test_an_unknown_name_is_an_attribute_error() -> None:
    run("try:\n    hf_diffkv.Nothing\nexcept AttributeError as error:\n    assert 'Nothing' in str(error)")


@pytest.mark.slow
def test_every_public_name_can_be_had() -> None:
    run("assert set(hf_diffkv.__all__) <= set(dir(hf_diffkv))\nfor name in hf_diffkv.__all__: getattr(hf_diffkv, name)")
