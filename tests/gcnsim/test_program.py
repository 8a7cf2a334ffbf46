# SPDX-License-Identifier: Apache-2.0
"""Parsing, what a launch hands to a kernel, and errors that name their instruction."""

import itertools

import gcnsim
import numpy as np
import pytest
from gcnsim.decode import VECTOR
from gcnsim.operands import Operand, parse_operand
from gcnsim.packed import PAIRS16, PAIRS32
from gcnsim.program import parse_instruction
from gcnsim.scalar import SCALAR

from tests.gcnsim.harness import ARCHS, assemble, assembles, execute

TEXT = """
	.amdgcn_target "amdgcn-amd-amdhsa--gfx942"
	.amdhsa_code_object_version 5
	.text
	.globl	kernel
kernel:                                 ; @kernel
.Lfunc_begin0:
	.file	1 "/folder" "file.py"
	.loc	1 27 9 prologue_end             ; file.py:27:9
	s_load_dword s3, s[0:1], 0x10           // a comment
	.loc	1 0 9                           ; file.py:0:9
	s_nop 0
	.loc	1 31 5                          ; file.py:31:5 @[ file.py:40:3 ]
.LBB0_1:                                ; %loop
	v_mov_b32_dpp v2, v3 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf
	v_mfma_f32_32x32x8_f16 a[0:15], v[0:1], v[2:3], a[0:15] ; kernel
	s_cbranch_scc1 .LBB0_1
; %bb.2:
	s_endpgm
	.section	.rodata,"a",@progbits
	.amdhsa_kernel kernel
		.amdhsa_user_sgpr_count 2
		.amdhsa_user_sgpr_kernarg_segment_ptr 1
		.amdhsa_system_sgpr_workgroup_id_x 1
	.end_amdhsa_kernel
	.text
	.amdgpu_metadata
---
amdhsa.kernels:
  - .agpr_count:     16
    .args:
      - .address_space:  global
        .offset:         0
        .size:           8
        .value_kind:     global_buffer
      - .offset:         8
        .size:           4
        .value_kind:     by_value
      - .offset:         12
        .size:           4
        .value_kind:     hidden_block_count_x
    .group_segment_fixed_size: 512
    .kernarg_segment_size: 16
    .max_flat_workgroup_size: 256
    .private_segment_fixed_size: 24
    .sgpr_count:     11
    .sgpr_spill_count: 1
    .vgpr_count:     20
    .vgpr_spill_count: 6
    .wavefront_size: 64
...
"""


def test_program():
    program = gcnsim.parse(TEXT)
    assert (program.arch, program.kernel) == ("gfx942", "kernel")
    assert [instruction.op for instruction in program.instructions] == [
        "s_load_dword",
        "s_nop",
        "v_mov_b32",
        "v_mfma_f32_32x32x8_f16",
        "s_cbranch_scc1",
        "s_endpgm",
    ]
    assert program.labels[".LBB0_1"] == 2
    lines = TEXT.splitlines()
    assert all(i.op in lines[i.line - 1] for i in program.instructions)
    # A line of the compiler's own (0) is told by the one before it.
    assert [i.source for i in program.instructions[:3]] == ["file.py:27:9"] * 2 + ["file.py:31:5 @[ file.py:40:3 ]"]
    move = program.instructions[2]
    assert (move.encoding, move.modifiers["quad_perm"], move.integer("row_mask")) == ("dpp", "[1,0,3,2]", 15)
    assert move.integers("quad_perm", ()) == (1, 0, 3, 2)
    # AGPRs follow the VGPRs, of which v3 is the last.
    assert program.agpr_base == 4
    assert program.instructions[3].operands[0] == Operand("v", 4, 16)
    assert program.vector_registers == 20


def test_metadata():
    metadata = gcnsim.parse(TEXT).metadata
    assert (metadata.vgprs, metadata.agprs, metadata.sgprs) == (20, 16, 11)
    assert (metadata.vgpr_spills, metadata.sgpr_spills, metadata.scratch, metadata.lds) == (6, 1, 24, 512)
    assert (metadata.wave_size, metadata.max_workgroup, metadata.kernarg_size) == (64, 256, 16)
    assert [(a.offset, a.size, a.kind) for a in metadata.arguments] == [
        (0, 8, "global_buffer"),
        (8, 4, "by_value"),
        (12, 4, "hidden_block_count_x"),
    ]


OPERANDS = {
    "v5": Operand("v", 5),
    "v[4:7]": Operand("v", 4, 4),
    "a[2]": Operand("v", 102),
    "s[8:9]": Operand("s", 8, 2),
    "-v5": Operand("v", 5, negate=True),
    "|v5|": Operand("v", 5, absolute=True),
    "-|v5|": Operand("v", 5, negate=True, absolute=True),
    "sext(v5)": Operand("v", 5, sign_extend=True),
    "0x10": Operand("int", value=16),
    "-16": Operand("int", value=-16),
    "-0.5": Operand("float", value=-0.5),
    "vcc": Operand("s", 106, 2),
    "exec_hi": Operand("s", 127),
    "m0": Operand("s", 124),
    "off": Operand("off"),
    ".LBB0_3": Operand("name", name=".LBB0_3"),
}


@pytest.mark.parametrize("text", OPERANDS)
def test_operand(text):
    assert parse_operand(text, agpr_base=100) == OPERANDS[text]


def test_instruction_with_many_modifiers():
    text = "buffer_load_dwordx4 v[0:3], v4, s[8:11], s12 offen offset:16 sc0 nt"
    instruction = parse_instruction(text, 7, None, 0)
    assert len(instruction.operands) == 4
    assert instruction.flags == {"offen", "sc0", "nt"}
    assert instruction.integer("offset") == 16
    assert instruction.text == text
    instruction = parse_instruction('ds_swizzle_b32 v0, v1 offset:swizzle(BITMASK_PERM,"0p1ip")', 7, None, 0)
    assert instruction.modifiers["offset"] == 'swizzle(BITMASK_PERM,"0p1ip")'


@pytest.mark.parametrize("text", ["", "kernel:\n s_endpgm\n"])
def test_what_is_no_kernel(text):
    with pytest.raises(gcnsim.AssemblyError, match="this is not the assembly"):
        gcnsim.parse(text)


def launch(body, **descriptor):
    program = assemble("gfx942", body, 0)
    program.descriptor.update(descriptor)
    return gcnsim.Launch(program, (1, 1, 1), 1, [])


REFUSED = {
    "v_frobnicate_b32 v0, v1": "the opcode v_frobnicate_b32 is not implemented",
    "v_add_u32 v0, v1, v2 op_sel:[1,0,0] frob:1": "v_add_u32 with frob is not implemented",
    "v_readfirstlane_b32 s4, v1 clamp": "v_readfirstlane_b32 with clamp",
    "ds_swizzle_b32 v0, v1 offset:swizzle(FFT,5)": "swizzle FFT",
    "ds_swizzle_b32 v0, v1 offset:0xc020": "rotation",
    "v_mov_b32_dpp v0, v1 row_xmask:1 row_mask:0xf bank_mask:0xf": "no DPP pattern",
    "s_getpc_b64 s[4:5]": "s_getpc_b64",
    "buffer_load_dword v0, v1, s[4:7], 0 idxen": "idxen",
    "v_add_f32 v0, v1, ttmp3": "cannot read the operand 'ttmp3'",
    "v_mad_u64_u32 v[0:1], v2, v3, 0": "expected 5 operands, found 4",
}


@pytest.mark.parametrize("code", REFUSED)
def test_unknown_instructions_are_found_before_anything_runs(code):
    with pytest.raises(gcnsim.UnknownInstruction, match=REFUSED[code]) as caught:
        launch("  s_nop 0\n.loc 1 27 9 ; file.py:27:9\n  " + code + "\n")
    error = caught.value
    assert error.instruction == code
    assert error.source == "file.py:27:9"
    assert f"at assembly line {error.line}: {code}" in str(error)
    assert "compiled from file.py:27:9" in str(error)


def test_other_chips_and_modes_are_refused():
    with pytest.raises(gcnsim.AssemblyError, match="gfx1100 is not simulated"):
        gcnsim.Launch(assemble("gfx1100", "", 0), (1, 1, 1), 1, [])
    with pytest.raises(gcnsim.AssemblyError, match="float_denorm_mode_32 is 0; 3 is simulated"):
        launch("", float_denorm_mode_32=0)
    with pytest.raises(gcnsim.AssemblyError, match="no label nowhere"):
        launch("s_branch nowhere\n")


def test_trap():
    with pytest.raises(gcnsim.Trap, match="assertion") as caught:
        execute("gfx942", "s_trap 2", {}, "scc")
    assert caught.value.instruction == "s_trap 2"


# --- the tables hold what exists, and nothing else

EXAMPLES = {"16": "v1", "32": "v1", "64": "v[2:3]", "ask": "vcc"}  # by the end of a type's name
FORMS = {
    "v_accvgpr_read_b32": "v_accvgpr_read_b32 v1, a1",
    "v_accvgpr_write_b32": "v_accvgpr_write_b32 a1, v1",
    "v_accvgpr_mov_b32": "v_accvgpr_mov_b32 a1, a2",
    "v_fmaak_f32": "v_fmaak_f32 v1, v1, v1, 0x12345678",
    "v_fmamk_f32": "v_fmamk_f32 v1, v1, 0x12345678, v1",
    "v_madak_f32": "v_madak_f32 v1, v1, v1, 0x12345678",
    "v_madmk_f32": "v_madmk_f32 v1, v1, 0x12345678, v1",
    "v_cvt_f32_bf16": "v_cvt_f32_bf16_sdwa v1, v1 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_0",
}


def example(op, entry):
    """The instruction with registers of its types."""
    named = [kind for kind in (*entry.results, *entry.sources) if kind not in ("accumulate", "vcc")]
    return FORMS.get(op) or f"{op} {', '.join(EXAMPLES[kind[1:]] for kind in named)}"


def test_every_vector_instruction_exists():
    unknown = [op for op, entry in VECTOR.items() if not any(assembles(arch, example(op, entry)) for arch in ARCHS)]
    assert not unknown


@pytest.mark.parametrize("table", [SCALAR, PAIRS16, PAIRS32], ids=["scalar", "pairs of 16 bits", "pairs of 32 bits"])
def test_every_other_instruction_exists(table):
    operands = ["s4", "s[4:5]", "v1", "v[2:3]"]
    forms = [[first, *rest] for n in (1, 2, 3) for first in operands for rest in itertools.product(operands, repeat=n)]
    for op in table:
        assert any(assembles(arch, f"{op} {', '.join(form)}") for form in forms for arch in ARCHS), op


# --- what a launch hands to a kernel


def arguments_of(program, values, grid=(1, 1, 1), waves=1):
    segment = gcnsim.launch.pack_arguments(gcnsim.Launch(program, grid, waves, values))
    return segment[: program.metadata.kernarg_size]


def test_arguments():
    program = gcnsim.parse(TEXT)
    packed = arguments_of(program, [0x7F0000000100, -2], grid=(3, 1, 1))
    assert packed == (0x7F0000000100).to_bytes(8, "little") + b"\xfe\xff\xff\xff" + b"\x03\0\0\0"
    assert arguments_of(program, [0, 1.5])[8:12] == np.float32(1.5).tobytes()
    assert arguments_of(program, [0, np.float32(2.5)])[8:12] == np.float32(2.5).tobytes()
    assert arguments_of(program, [0])[8:12] == bytes(4)
    assert arguments_of(program, [0, b"abcd"])[8:12] == b"abcd"
    with pytest.raises(ValueError, match="4 bytes was given 8"):
        arguments_of(program, [0, np.float64(1)])
    with pytest.raises(ValueError, match="has 3 arguments, 4 were given"):
        arguments_of(program, [0, 1, 2, 3])


def test_arguments_that_the_runtime_fills_in():
    program = assemble("gfx942", "", 0)
    hidden = gcnsim.launch.hidden_arguments(gcnsim.Launch(program, (5, 6, 1), 4, []))
    assert [hidden[f"hidden_block_count_{axis}"] for axis in "xyz"] == [5, 6, 1]
    assert [hidden[f"hidden_group_size_{axis}"] for axis in "xyz"] == [256, 1, 1]
    assert hidden["hidden_grid_dims"] == 2


def test_registers_are_undefined_at_first():
    """NaN in every format, so that a kernel that reads what it never wrote does not come out right by luck."""
    word, scalar = execute("gfx942", "v_mov_b32 v9, v8\nv_mov_b32 v10, s9", {}, "v9 v10")
    assert np.isnan(word.view(np.float32)).all() and np.isnan(word.view(np.float16)).all()
    assert np.array_equal(word, scalar)


def test_arguments_in_registers():
    """Kernels for gfx942 may ask for their first arguments in the registers behind the pointer to them."""
    body = """
      v_mov_b32 v1, s2
      v_mov_b32 v2, s3
      v_lshlrev_b32 v4, 2, v0
      v_mov_b32 v3, s4
      global_store_dword v4, v3, s[2:3]
    """
    program = assemble("gfx942", body, 2)
    program.descriptor.update(user_sgpr_kernarg_preload_length=3, user_sgpr_count=5)
    memory = gcnsim.Memory()
    place = memory.allocate_empty(256)
    gcnsim.run([gcnsim.Launch(program, (1, 1, 1), 1, [place, 77])], memory)
    assert (memory.read(place, np.uint32, 64) == 77).all()
