# SPDX-License-Identifier: Apache-2.0
"""The reader of assembly: resources, blocks, loops, kinds of instructions."""

import pytest

from tests.amd import isa

HEADER = """
	.amdgcn_target "amdgcn-amd-amdhsa--gfx942"
kernel:                                 ; @kernel
.Lfunc_begin0:
	.file	1 "/home/me" "kernel.py"
	.loc	1 3 5                           ; kernel.py:3:5
; %bb.0:
"""
FOOTER = """
	.section	.rodata,"a",@progbits
	.amdhsa_kernel kernel
	v_not_an_instruction_of_the_kernel
    .agpr_count:     4
    .private_segment_fixed_size: 12
    .sgpr_count:     20
    .sgpr_spill_count: 1
    .vgpr_count:     40
    .vgpr_spill_count: 3
"""

# An outer loop of two inner ones; the first inner one has a branch past its middle, the second the matrix instruction.
NEST = """
	s_load_dwordx2 s[0:1], s[0:1], 0x0
.LBB0_1:                                ; =>This Loop Header: Depth=1
	v_mov_b32_e32 v0, 0
.LBB0_2:                                ; =>  This Inner Loop Header: Depth=2
	buffer_load_dwordx4 v[4:7], v1, s[4:7], 0 offen
	s_cbranch_execz .LBB0_4
; %bb.3:
	v_add_f32_e32 v0, v0, v4              ; a comment with v_mfma in it
.LBB0_4:
	s_cbranch_scc1 .LBB0_2
.LBB0_5:
	.loc	1 9 7
	buffer_load_ubyte v4, v1, s[4:7], 0 offen
	v_accvgpr_write_b32 a0, v4
	v_mfma_f32_16x16x16_f16 a[0:3], v[4:5], v[6:7], a[0:3]
	ds_read_b64 v[2:3], v1
	s_waitcnt vmcnt(0)
	s_barrier
	s_cbranch_scc1 .LBB0_5
; %bb.6:
	s_cbranch_vccnz .LBB0_1
; %bb.7:
	scratch_store_dword off, v0, s32
	s_endpgm
"""


def read(body: str) -> isa.Assembly:
    return isa.read(HEADER + body + FOOTER)


def test_resources() -> None:
    assert read(NEST).resources == {
        "vgpr_count": 40, "agpr_count": 4, "sgpr_count": 20, "vgpr_spill_count": 3, "sgpr_spill_count": 1,
        "private_segment_fixed_size": 12,
    }  # fmt: skip


def test_text_without_a_count_or_a_kernel_is_an_error() -> None:
    with pytest.raises(ValueError, match="does not say agpr_count"):
        isa.read(HEADER + NEST + FOOTER.replace(".agpr_count", ".other"))
    with pytest.raises(ValueError, match="defines no kernel"):
        isa.read(HEADER + NEST + FOOTER.replace(".amdhsa_kernel", ".other"))


def test_instructions_have_lines_and_sources() -> None:
    text = HEADER + NEST + FOOTER
    found = isa.read(text).instructions
    assert [i.text for i in found] == [text.splitlines()[i.line - 1].split(";")[0].strip() for i in found]
    assert (found[0].source, found[-1].source) == ("kernel.py:3", "kernel.py:9")
    assert found[-1].text == "s_endpgm"


def test_loops_are_found_inner_ones_first() -> None:
    loops = read(NEST).loops
    assert [(loop.blocks[0].label, loop.depth) for loop in loops] == [(".LBB0_5", 1), (".LBB0_2", 1), (".LBB0_1", 0)]
    assert [len(loop.instructions) for loop in loops] == [7, 4, 13]


def test_the_hot_loop_has_the_matrix_instructions_even_if_another_is_longer() -> None:
    loop = read(NEST).hot_loop
    assert loop and loop.blocks[0].label == ".LBB0_5"
    longer = NEST.replace("	s_cbranch_execz .LBB0_4", "	v_nop\n" * 20 + "	s_cbranch_execz .LBB0_4")
    loop = read(longer).hot_loop
    assert loop and loop.blocks[0].label == ".LBB0_5"


def test_code_without_a_branch_back_has_no_loop() -> None:
    found = read("	s_cbranch_scc1 .LBB0_1\n	v_nop\n.LBB0_1:\n	s_endpgm\n")
    assert found.loops == [] and found.hot_loop is None


def test_code_that_nothing_reaches_is_in_no_loop() -> None:
    found = read("	s_branch .LBB0_2\n.LBB0_1:\n	v_nop\n	s_branch .LBB0_1\n.LBB0_2:\n	s_endpgm\n")
    assert found.loops == []


def test_counts_by_kind_and_opcode() -> None:
    loop = read(NEST).hot_loop
    assert loop
    assert isa.count(loop.instructions) == {
        "memory": 1, "memory buffer_load_ubyte": 1, "move": 1, "move v_accvgpr_write_b32": 1,
        "matrix": 1, "matrix v_mfma_f32_16x16x16_f16": 1, "lds": 1, "lds ds_read_b64": 1,
        "wait": 1, "wait s_waitcnt": 1, "barrier": 1, "barrier s_barrier": 1, "scalar": 1, "scalar s_cbranch_scc1": 1,
    }  # fmt: skip
    assert isa.count(read(NEST).instructions)["scratch"] == 1


def test_vector_instructions_for_8_weights() -> None:
    loop = isa.Loop(
        (isa.Block("", "", [isa.Instruction("v_nop", 1, "")] * 40 + [isa.Instruction("s_nop 0", 1, "")], []),), 0
    )
    assert isa.vector_per_8_weights(loop, weights=64 * 128, warps=4) == 40 * 8 / 32


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("buffer_load_dwordx4 v[0:3], v4, s[0:3], 0 offen", 16),
        ("global_load_dwordx2 v[0:1], v4, s[0:1]", 8),
        ("global_load_dword v0, v4, s[0:1]", 4),
        ("buffer_load_ushort v0, v4, s[0:3], 0 offen", 2),
        ("global_load_short_d16_hi v0, v4, s[0:1]", 2),
        ("buffer_load_ubyte v0, v4, s[0:3], 0 offen", 1),
        ("flat_load_sbyte v0, v[4:5]", 1),
        ("global_load_lds_dwordx4 v4, s[0:1]", 16),
        ("buffer_load_dwordx3 v[0:2], v4, s[0:3], 0 offen", 12),
        ("buffer_load_dword v4, s[0:3], 0 offen lds", 4),
        ("global_store_dwordx4 v4, v[0:3], s[0:1]", 0),
        ("ds_read_b128 v[0:3], v4", 0),
        ("s_load_dwordx4 s[0:3], s[0:1], 0x0", 0),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)
def test_loaded_bytes(text: str, size: int) -> None:
    assert isa.Instruction(text, 1, "").loaded_bytes == size


@pytest.mark.parametrize("suffix", ["", "_e32", "_e64", "_sdwa", "_dpp", "_e64_dpp"])
def test_the_opcode_is_without_its_encoding(suffix: str) -> None:
    assert isa.Instruction(f"v_add_f32{suffix} v0, v1, v2", 1, "").opcode == "v_add_f32"


def test_inline_assembly() -> None:
    body = "\tv_nop\n\t;;#ASMSTART\n\n\tv_mov_b32 v1, v[2:3]\n\ts_nop 0\n\t;;#ASMEND\n\tv_nop\n"
    assert [instruction.inline for instruction in read(body).instructions] == [False, True, True, False]


@pytest.mark.parametrize(
    ("text", "operands"),
    [
        ("v_cvt_scalef32_pk_fp4_f32 v3, v1, -v2, 1.0 op_sel:[0,0,0,1]", [{"v3"}, {"v1"}, {"v2"}, set()]),
        ("v_mfma_f32_16x16x16_f16 a[0:1], v[4:5], |v6|, 0 cbsz:1 abid:1", [{"a0", "a1"}, {"v4", "v5"}, {"v6"}, set()]),
        ("v_addc_co_u32_e32 v5, vcc, 0, v3, vcc", [{"v5"}, set(), set(), {"v3"}, set()]),
        ("v_mov_b32_dpp v1, v2 quad_perm:[0,0,0,0] row_mask:0xf", [{"v1"}, {"v2"}]),
        ("s_barrier", [set()]),
    ],
)
def test_registers_of_operands(text: str, operands: list[set[str]]) -> None:
    assert [isa.registers(operand) for operand in isa.Instruction(text, 1, "").operands] == operands
