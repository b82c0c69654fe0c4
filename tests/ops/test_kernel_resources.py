import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import json
import re
import subprocess
import sys

import pytest

triton = pytest.importorskip("triton")

from hf_diffkv import kernel_report  # noqa: E402

# instructions per dequantised element of the decode loops at head_dim 128 on sm_90, as Triton 3.9 compiles them
CEILINGS = {"K8V4": 2.8, "K4V2": 2.6}
# what a program may use: sm_80 binaries also run on sm_86 and sm_89, which have the least
SHARED_LIMIT = {"sm_80": 99 * 1024, "sm_90": 227 * 1024}


def is_main_decode(variant):
    """K8V4 and K4V2 at head_dim 128 with four query heads per KV head."""
    constants = variant.constexprs
    if not {"HIGH", "LOW", "GROUP", "MODE"} <= set(constants):
        return False
    high, low = constants["HIGH"], constants["LOW"]
    bits = (high.k_bits, high.v_bits, low.k_bits, low.v_bits)
    groups = (high.k_groups, high.v_groups, low.k_groups, low.v_groups)
    dims = (high.key_dim, high.value_dim)
    return (bits, groups, dims, constants["GROUP"]) == ((8, 4, 4, 2), (1, 1, 1, 1), (128, 128), 4)


def names_of(op, select):
    """The first variant of each kernel of `op` that is shipped for sm_90 and selected."""
    found = {}
    for variant in kernel_report.collect_variants([op]):
        if "sm_90" in variant.targets and select(variant):
            found.setdefault(variant.kernel, variant.name)
    assert found, f"{op} ships no such variant"
    return list(found.values())


@pytest.fixture(scope="module")
def decode_names():
    return names_of("decode_attention", is_main_decode)


@pytest.fixture(scope="module")
def results(decode_names, tmp_path_factory):
    names = decode_names + names_of("prefill_attention", lambda variant: "d128" in variant.name)
    names += ["store_tokens-K8V4-g11-d128", "store_tokens-K4V2-g11-d128", "move_tokens-K8V4-K4V2-d128"]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    match = f"^({'|'.join(map(re.escape, names))})$"
    command = [sys.executable, "-m", "hf_diffkv.kernel_report", "--json", "--targets", "sm_80", "sm_90"]
    run = subprocess.run([*command, "--match", match], env=environment, capture_output=True, text=True)
    assert run.stdout, run.stderr
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert {r["name"] for r in found} == set(names)
    return found


def test_kernels_compile_without_spills(results):
    wrong = [r for r in results if r["error"] or r["spills"] or r["stack"] or r["shared"] > SHARED_LIMIT[r["target"]]]
    assert not wrong, wrong


@pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9), reason="older Triton needs about 15% more instructions"
)
def test_dequantisation_stays_below_its_instruction_ceiling(results, decode_names):
    found = [r for r in results if r["name"] in decode_names and r["target"] == "sm_90"]
    assert found
    for result in found:
        high, low = result["per_element"]
        assert high <= CEILINGS["K8V4"] and low <= CEILINGS["K4V2"], result


def test_every_variant_names_all_parameters_once():
    variants = kernel_report.collect_variants()
    names = [variant.name for variant in variants]
    assert len(names) == len(set(names))
    for variant in variants:
        given = [*variant.signature, *variant.constexprs]
        assert sorted(given) == sorted(variant.kernel.arg_names), variant.name


SASS = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   HMMA.16816.F32 R4, R4, R6, R8 ;
        /*0020*/               @P0 LDL.128 R4, [R1] ;
.L_x_0:
        /*0030*/                   IADD3 R0, R0, 0x1, RZ ;
        /*0040*/              @!P1 BRA `(.L_x_0) ;
        /*0050*/                   STL [R1], R2 ;
        /*0060*/               @P2 BRA `(.L_x_1) ;
        /*0070*/                   EXIT ;
"""


def test_disassembly_resolves_backward_branches():
    code = kernel_report.disassembly(SASS)
    assert [op for _, op, _ in code][:3] == ["MOV", "HMMA.16816.F32", "LDL.128"]
    assert [(address, target) for address, _, target in code if target is not None] == [(0x40, 0x30), (0x60, 0x10)]


def test_report_refuses_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SystemExit) as stop:
        kernel_report.main(["--ops", "compact"])
    assert stop.value.code == 2


def test_failures_are_shown_in_the_table():
    good = kernel_report.KernelResources("a", "sm_90", registers=40, per_element=(2.5, 2.25))
    bad = kernel_report.KernelResources("b", "sm_90", error="CompilationError: no such thing")
    spilled = kernel_report.KernelResources("c", "sm_90", spills=16)
    text = kernel_report.format_table([good, bad, spilled])
    assert "2.50 2.25" in text and "no such thing" in text
    assert [r.failed for r in (good, bad, spilled)] == [False, True, True]
