"""A Transformers that is too old for the cache."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

from hf_diffkv.running.models import CHECKOUT


def test_too_old_a_transformers_is_told(tmp_path: Path) -> None:
    """Importing the package and models goes on; using the cache says what to do."""
    folder = tmp_path / "transformers"
    (folder / "generation").mkdir(parents=True)
    (folder / "__init__.py").write_text("__version__ = '5.2.0'\n")
    for name in ("modeling_utils", "generation/__init__", "generation/utils"):
        (folder / f"{name}.py").write_text("")
    (folder / "generation" / "configuration_utils.py").write_text("ALL_CACHE_IMPLEMENTATIONS = ('dynamic',)\n")
    program = """
        import warnings
        warnings.simplefilter("error")
        import hf_diffkv, transformers
        import transformers.generation.configuration_utils as configuration
        if unregistered:
            hf_diffkv.unregister()
        try:
            import transformers.modeling_utils, transformers.generation.utils
        except UserWarning as warning:
            print(warning)
        print(configuration.ALL_CACHE_IMPLEMENTATIONS)
        try:
            hf_diffkv.DiffKVCache
        except ImportError as error:
            print(error)
    """

    def said(unregistered: bool) -> list[str]:
        code = f"unregistered = {unregistered}\n" + textwrap.dedent(program)
        environment = {"PYTHONPATH": f"{tmp_path}:{CHECKOUT}", "PATH": ""}
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
        assert result.returncode == 0, result.stderr
        return result.stdout.splitlines()

    remedy = "hf_diffkv needs transformers>=5.17, but this is 5.2.0; pip install 'transformers>=5.17'."
    assert said(False) == [f'"diffkv" is not registered: {remedy}', "('dynamic',)", remedy]
    assert said(True) == ["('dynamic',)", remedy]
