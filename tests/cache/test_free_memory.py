"""Free memory of a CPU in a container or service, whose limit is not visible in the machine's free memory."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from hf_diffkv.cache import free_memory

CPU = torch.device("cpu")
NAMES = {
    "2": ("memory.max", "memory.current", "inactive_file"),
    "1": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def write_group(folder: Path, version: str, limit: int | str, used: int, cached: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    most, now, files = NAMES[version]
    (folder / most).write_text(f"{limit}\n")
    (folder / now).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{files} {cached}\n")


@pytest.mark.parametrize(("version", "root"), [("2", ""), ("1", "memory")])
@pytest.mark.parametrize("inside", [True, False], ids=["container", "service"])
def test_a_limit_of_the_group_counts(
    version: str, root: str, inside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, own = tmp_path / "groups", tmp_path / "own"
    monkeypatch.setattr(free_memory, "CONTROL_GROUPS", groups)
    monkeypatch.setattr(free_memory, "OWN_GROUPS", own)
    own.write_text("9:cpu,cpuacct:/other\n0::/a/b\n" if version == "2" else "4:pids:/other\n3:memory:/a/b\n0::/x\n")
    assert free_memory.free_bytes(CPU) == pytest.approx(psutil.virtual_memory().available, rel=0.2)
    # a container sees its own group as the root, under its path on the outside
    write_group(groups / root / ("" if inside else "a"), version, 9_000_000, 4_000_000, 1_000_000)
    assert free_memory.free_bytes(CPU) == 6_000_000
    assert free_memory.budget_of("50%", CPU) == 3_000_000
    write_group(groups / root / "a" / "b", version, "max" if version == "2" else 2**63 - 4096, 4_000_000, 0)
    assert free_memory.free_bytes(CPU) == 6_000_000
    write_group(groups / root / "a" / "b", version, 1_000_000, 2_000_000, 0)
    assert free_memory.free_bytes(CPU) == 0
