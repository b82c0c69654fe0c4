import dataclasses
import json
import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from tools.kernels import report as kernel_report  # noqa: E402

# Triton releases reject different code and count registers differently
pytestmark = pytest.mark.oldest

# instructions per dequantised element of the decode loops at head_dim 128 on sm_90
CEILINGS = {"K8V4-K4V2": (2.8, 2.6), "K6V4-K5V3": (3.0, 3.4), "K4V3-K3V2": (3.1, 2.8)}


def is_main_decode(variant, precisions):
    """Whether it has two precisions' decode loops at head_dim 128 with four query heads per KV head."""
    constants = variant.constexprs
    if not {"HIGH", "LOW", "GROUP", "MODE"} <= set(constants):
        return False
    tiers = constants["HIGH"], constants["LOW"]
    name = "-".join(f"K{tier.k_bits}V{tier.v_bits}" for tier in tiers)
    groups = {groups for tier in tiers for groups in (tier.k_groups, tier.v_groups)}
    dims = {dim for tier in tiers for dim in (tier.key_dim, tier.value_dim)}
    return (name, groups, dims, constants["GROUP"]) == (precisions, {1}, {128}, 4)


def names_of(op, select):
    """Names the first variant of each kernel of `op` that ships for sm_90 and is selected."""
    found = {}
    for variant in kernel_report.collect_variants([op]):
        if "sm_90" in variant.targets and select(variant):
            found.setdefault(variant.kernel, variant.name)
    assert found, f"{op} ships no such variant"
    return list(found.values())


@pytest.fixture(scope="module")
def decode_names():
    """Names of the main decode variants, by precisions."""
    return {
        name: names_of("decode_attention", lambda variant, name=name: is_main_decode(variant, name))
        for name in CEILINGS
    }


@pytest.fixture(scope="module")
def results(decode_names, tmp_path_factory):
    names = sum(decode_names.values(), []) + names_of("prefill_attention", lambda variant: "d128" in variant.name)
    names += [f"flash_forward-bf16-d128-padding-mask-{target}" for target in ("sm_80", "sm_90")]
    names += ["store_tokens-K8V4-g11-d128", "store_tokens-K4V2-g11-d128", "move_tokens-K8V4-K4V2-d128"]
    # heads with their own precisions, for which three blocks of rows or 200 registers were too much
    names += [f"decode_attend-{pair}_unscored-d64-g4-cuda" for pair in ("K6V5-K5V4", "K4V3-K3V3")]
    names += [f"decode_attend-{pair}_unscored-d128-g4-cuda" for pair in ("K6V5-K3V3", "K6V5-K3V2")]
    # for which Triton 3.6 refuses to overlap the loads of two blocks
    names += ["past_forward-K8V4-K4V2-bf16-d128-padding-sm_100"]
    names += [
        "past_forward-K6V4-K5V3-bf16-d128-padding-sm_90",
        "store_tokens-K5V3-g11-d64",
        "move_tokens-K6V4-K5V3-d64",
    ]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    match = f"^({'|'.join(map(re.escape, names))})$"
    command = [sys.executable, "-m", "tools.kernels.report", "--json", "--targets", "sm_80", "sm_90", "sm_100"]
    run = subprocess.run([*command, "--match", match], env=environment, capture_output=True, text=True)
    assert run.stdout, run.stderr
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert {r["name"] for r in found} == set(names)
    return found


@pytest.mark.slow
def test_kernels_compile_without_spills(results):
    limits = kernel_report.SHARED_LIMITS
    wrong = [r for r in results if r["error"] or r["spills"] or r["stack"] or r["shared"] > limits[r["target"]]]
    assert not wrong, wrong


@pytest.mark.slow
def test_dequantisation_stays_below_its_instruction_ceiling(results, decode_names):
    for name, ceilings in CEILINGS.items():
        found = [r for r in results if r["name"] in decode_names[name] and r["target"] == "sm_90"]
        assert found
        for result in found:
            assert all(need <= most for need, most in zip(result["per_element"], ceilings, strict=True)), result


def test_every_variant_is_listed_once_and_in_its_general_form():
    variants = kernel_report.collect_variants()
    names = [variant.name for variant in variants]
    assert len(names) == len(set(names))
    for variant in variants:
        given = [*variant.signature, *variant.constexprs]
        assert sorted(given) == sorted(variant.kernel.arg_names), variant.name
        # Triton would make a constant of a number that is 1
        folded = [name for name, value in variant.constexprs.items() if name.islower() and value is not None]
        assert not folded, (variant.name, folded)


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
    large = [kernel_report.KernelResources("d", "gfx942", shared=1024 * kib) for kib in (64, 65)]
    text = kernel_report.format_table([good, bad, spilled])
    assert "2.50 2.25" in text and "no such thing" in text
    assert [r.failed for r in (good, bad, spilled, *large)] == [False, True, True, False, True]


def test_variants_that_compile_to_the_same_are_compiled_once(monkeypatch):
    variants = kernel_report.collect_variants(["append"])
    twin = dataclasses.replace(variants[0], name="twin")
    monkeypatch.setattr(kernel_report, "collect_variants", lambda: [*variants, twin])
    compiled = []

    def measure(variant, target):
        compiled.append((variant.name, target))
        return kernel_report.KernelResources(variant.name, target, registers=len(compiled))

    monkeypatch.setattr(kernel_report, "measure", measure)
    jobs = [(variants[0].name, "sm_80"), (variants[1].name, "sm_80"), ("twin", "sm_80"), ("twin", "sm_90")]
    results = list(kernel_report.measure_all(jobs, 1))
    assert [(r.name, r.target) for r in results] == jobs
    assert [r.registers for r in results] == [1, 2, 1, 3]
    assert compiled == [jobs[0], jobs[1], jobs[3]]


def test_no_two_shipped_variants_of_different_code_count_as_the_same():
    variants = kernel_report.collect_variants(["decode_attention", "quantize"])
    seen = {}
    for variant in variants:
        identity = kernel_report._identity(variant, "sm_90")
        other = seen.setdefault(identity, variant)
        assert (other.kernel, other.signature, other.constexprs) == (
            variant.kernel,
            variant.signature,
            variant.constexprs,
        )


def test_the_quick_selection_has_every_kernel_for_every_target():
    variants = kernel_report.collect_variants()
    quick = [variant for variant in variants if re.search(kernel_report.QUICK, variant.name)]
    for target in kernel_report.TARGETS:
        # row_extents has no head dimension
        every = {variant.kernel.fn.__name__ for variant in variants if target in variant.targets}
        assert every - {v.kernel.fn.__name__ for v in quick if target in v.targets} <= {"row_extents"}


def test_the_report_as_markdown():
    good = kernel_report.KernelResources("a", "sm_90", registers=40, instructions=7, per_element=(2.5, 2.25))
    bad = kernel_report.KernelResources("b", "gfx942", error="CompilationError: no such thing")
    lines = kernel_report.format_markdown([good, bad]).splitlines()
    assert lines[2] == "| a | sm_90 | 40 | 0 | 0 | 7 | 2.50 / 2.25 |"
    assert lines[3].endswith("CompilationError: no such thing")
