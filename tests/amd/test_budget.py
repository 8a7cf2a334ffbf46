# SPDX-License-Identifier: Apache-2.0
"""Kernels that miss their budget are found, each for its own reason, and the message shows the loop."""

import pytest
import torch

from tests.amd import budget, isa, kernels, tritons
from tests.amd.budget import FP8_MATRIX, Budget
from tests.amd.launcher import compile_on, run_on

TRITONS = pytest.mark.parametrize("triton", tritons.VERSIONS)
ARCHS = pytest.mark.parametrize("arch", list(budget.LDS))

GOOD_LOOP = """
	buffer_load_dwordx4 v[4:7], v1, s[4:7], 0 offen
	ds_write_b128 v2, v[4:7]
	s_barrier
	ds_read_b128 v[8:11], v2
	v_mfma_f32_32x32x16_fp8_fp8 a[0:15], v[8:9], v[10:11], a[0:15]
"""


def assembly(
    loop: str, vgpr_spills: int = 0, sgpr_spills: int = 0, scratch: int = 0, comment: str = "",
    before: str = "\ts_mov_b32 s0, 0", after: str = "",
) -> isa.Assembly:  # fmt: skip
    """A kernel of one loop."""
    return isa.read(f"""
kernel:
	.file	1 "/somewhere" "kernel.py"
{before}
.LBB0_1:{comment}
	.loc	1 7 3
{loop}
	s_cbranch_scc1 .LBB0_1
; %bb.2:
{after}
	s_endpgm
	.section	.rodata
	.amdhsa_kernel kernel
	.agpr_count: 16
	.private_segment_fixed_size: {scratch}
	.sgpr_count: 20
	.sgpr_spill_count: {sgpr_spills}
	.vgpr_count: 40
	.vgpr_spill_count: {vgpr_spills}
""")


def violations(loop: str = GOOD_LOOP, limits: Budget | None = None, lds: int = 65536, **planted: object) -> list[str]:
    limits = limits or Budget(matrix=FP8_MATRIX)
    return budget.violations(assembly(loop, **planted), "gfx942", lds, limits)  # type: ignore[arg-type]


def test_a_good_kernel_has_nothing_wrong() -> None:
    assert violations() == []


@pytest.mark.parametrize(
    ("planted", "message"),
    [
        ({"vgpr_spills": 2}, "vgpr_spill_count is 2"),
        ({"sgpr_spills": 3}, "sgpr_spill_count is 3"),
        ({"scratch": 16}, "private_segment_fixed_size is 16"),
        ({"lds": 65537}, "it takes 65537 bytes of LDS, gfx942 has 65536"),
        ({"comment": " ; %irr.guard"}, "it has a loop with two entries (irr.guard)"),
        (
            {"loop": GOOD_LOOP.replace("x16_fp8_fp8", "x8f16")},
            "its matrix instructions are ['v_mfma_f32_32x32x8f16'], ",
        ),
        ({"loop": GOOD_LOOP.replace("v_mfma_f32_32x32x16_fp8_fp8", "v_add_u32")}, "its matrix instructions are none, "),
        ({"limits": Budget()}, "its matrix instructions are ['v_mfma_f32_32x32x16_fp8_fp8'], none was meant"),
        ({"limits": Budget(matrix=FP8_MATRIX, uses={"gfx942": "v_perm_b32"})}, "it has no v_perm_b32"),
        (
            {"loop": GOOD_LOOP.replace("load_dwordx4", "load_dword")},
            "its loads bring [4] bytes a lane, not 16 at a time",
        ),
        ({"loop": GOOD_LOOP.replace("read_b128", "read_u16")}, "values go through the LDS one at a time: ds_read_u16"),
        ({"limits": Budget(matrix=FP8_MATRIX, more=lambda a, arch, constants: [arch])}, "gfx942"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value.split(",")[0].replace(" ", "_"),
)
def test_a_miss(planted: dict[str, object], message: str) -> None:
    (found,) = violations(**planted)  # type: ignore[arg-type]
    assert found.startswith(message)


def test_the_message_shows_the_loop_with_its_source_lines() -> None:
    text = budget.explain(assembly(GOOD_LOOP), ["something"])
    assert text.startswith("- something\nThe loop where the time goes:\n.LBB0_1:\n")
    assert "ds_read_b128 v[8:11], v2" in text and "kernel.py:7" in text and "s_endpgm" not in text


def compiled(arch: str, triton: str, kernel: object, *args: object, **options: object) -> isa.Assembly:
    return isa.read(compile_on(arch, kernel, *args, triton=triton, **options).assembly)


@TRITONS
@ARCHS
def test_a_planted_spill_is_found_and_runs_all_the_same(arch: str, triton: str) -> None:
    """128 values a lane, all alive between the sum and the quotients, in the registers that 8 waves a SIMD leave."""
    x, y = torch.zeros(2, 8192), torch.zeros(2, 8192)
    options = {"BLOCK": 8192, "num_warps": 1, "triton": triton}
    launch = run_on(arch, kernels.softmax, (2,), x, y, 8192, 8192, **options, waves_per_eu=8)
    found = budget.resources(isa.read(launch.assembly), arch, launch.lds)
    assert any(text.startswith("vgpr_spill_count is") for text in found)
    assert any(text.startswith("private_segment_fixed_size is") for text in found)
    assert torch.equal(y, torch.full_like(y, 1 / 8192))
    launch = compile_on(arch, kernels.softmax, x, y, 8192, 8192, **options)
    assert not budget.resources(isa.read(launch.assembly), arch, launch.lds)


def flags(count: int) -> list[torch.Tensor]:
    return [torch.zeros(1, dtype=torch.int32) for _ in range(count)]


@TRITONS
@ARCHS
def test_flags_of_peers_are_ordered(arch: str, triton: str) -> None:
    blocks = [torch.zeros(256, dtype=torch.int32) for _ in range(3)]
    args = (blocks[0], blocks[1], *flags(2), blocks[2])
    assert budget.peer_flags(compiled(arch, triton, kernels.exchange, *args, WAIT=True, BLOCK=256), arch) == []


@TRITONS
@ARCHS
def test_flags_that_no_rank_awaits_are_found(arch: str, triton: str) -> None:
    """The missing barrier of test_launcher.py, in the machine code."""
    blocks = [torch.zeros(256, dtype=torch.int32) for _ in range(3)]
    args = (blocks[0], blocks[1], *flags(2), blocks[2])
    found = budget.peer_flags(compiled(arch, triton, kernels.exchange, *args, WAIT=False, BLOCK=256), arch)
    assert found == ["it awaits no flag (a loop that reads and does not write)"]


@TRITONS
@ARCHS
def test_flags_of_too_narrow_a_scope_are_found(arch: str, triton: str) -> None:
    found = "\n".join(budget.peer_flags(compiled(arch, triton, kernels.exchange_on_one_gpu, *flags(2)), arch))
    assert f"no {budget.RELEASE[arch]} before the flag is set" in found
    assert f"no {budget.ACQUIRE[arch]} after a flag is read" in found
    assert arch == "gfx90a" or "a flag is read without sc0 sc1" in found


@ARCHS
def test_flags_are_released_together(arch: str) -> None:
    """A release is that of all flags behind it, up to a store, and to where others might come from."""
    release, flag = [budget.RELEASE[arch], "s_waitcnt vmcnt(0)"], ["s_add_u32 s4, s8, s4", "global_atomic_swap_x2 v1"]
    assert budget.released(release, arch) and budget.released([*release, *flag, *flag], arch)
    assert not budget.released(release[:1], arch) and not budget.released(release[1:], arch)
    for other in ("buffer_store_dword v1", "global_store_dwordx2 v1", "s_cbranch_execz .LBB0_1", "s_barrier"):
        assert not budget.released([*release, other, *flag], arch)


def test_a_kernel_without_flags_is_found() -> None:
    assert violations(limits=Budget(matrix=FP8_MATRIX, peer_flags=True)) == [
        "it sets no flag (global_atomic_swap)",
        "it awaits no flag (a loop that reads and does not write)",
    ]


@ARCHS
def test_a_loop_with_two_entries_is_found(arch: str) -> None:
    """What Triton 3.6.0 makes of a spin on a variable; test_launcher.py has what comes of it."""
    found = compiled(arch, tritons.OLDEST, kernels.spin_on_a_variable, *flags(1), 1)
    assert budget.irreducible(found) == ["it has a loop with two entries (irr.guard)"]
