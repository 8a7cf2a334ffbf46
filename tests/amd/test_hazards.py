# SPDX-License-Identifier: Apache-2.0
"""What is seen around inline assembly, on assembly as LLVM writes it."""

import pytest

from tests.amd import hazards
from tests.amd.test_isa import read

INLINE = "\t;;#ASMSTART\n{}\n\t;;#ASMEND\n"
CODES = "\tv_cvt_scalef32_pk_fp4_f32 v3, v{}, v2, 1.0{}\n"


def found(assembly: str, arch: str = "gfx950") -> int:
    return len(hazards.around_inline(read(assembly).instructions, arch))


def test_parts_of_a_register() -> None:
    """Who writes the third part reads the second; the first is the lowest, and nothing is shifted."""
    selected = ("", " op_sel:[0,0,1,0]", " op_sel:[0,0,0,1]", " op_sel:[0,0,1,1]")
    chain = [CODES.format(number, bits) for number, bits in enumerate(selected)]
    assert found(INLINE.format("".join(chain))) == 2
    assert found(INLINE.format("".join(chain)), "gfx90a") == 0
    assert found("".join(chain)) == 0  # LLVM's own
    apart = INLINE.format(chain[0] + chain[1] + "\ts_nop 0\n" + chain[2] + "\ts_nop 0\n" + chain[3])
    assert found(apart) == 0
    assert found(apart + "\tv_xor_b32_e32 v1, 0x12, v3\n") == 1
    assert found(apart + "\ts_nop 0\n\tv_xor_b32_e32 v1, 0x12, v3\n") == 0
    assert found(apart + "\tglobal_store_dword v0, v3, s[0:1]\n") == 0


@pytest.mark.parametrize(
    ("before", "after", "hazard"),
    [
        ("v_rcp_f32_e32 v1, v2", "v_pk_max_i16 v3, v1, v0", True),
        ("v_rcp_f32_e32 v1, v2", "v_pk_max_i16 v3, v2, v0", False),
        ("v_rcp_f32_e32 v1, v2", "v_rsq_f32_e32 v3, v1", False),
        ("v_sqrt_f32_e32 v5, v2", "v_pk_mul_f32 v[6:7], v[4:5], v[0:1] op_sel_hi:[1,0]", True),
        ("v_mul_f32_e32 v1, v2, v2", "v_pk_max_i16 v3, v1, v0", False),
        ("v_add_f16_sdwa v1, v2, v2 dst_sel:WORD_1 dst_unused:UNUSED_PAD", "v_pk_max_i16 v3, v1, v0", True),
        ("v_add_f16_sdwa v1, v2, v2 dst_sel:DWORD dst_unused:UNUSED_PAD", "v_pk_max_i16 v3, v1, v0", False),
        ("v_fma_f16 v1, v2, v2, v2 op_sel:[0,0,0,1]", "v_pk_max_i16 v3, v1, v0", True),
        ("v_fma_mix_f32 v1, v2, v2, 0 op_sel:[1,0,1] op_sel_hi:[1,0,0]", "v_pk_max_i16 v3, v1, v0", False),
        ("v_cvt_pk_fp8_f32 v1, v2, v2 op_sel:[0,0,1]", "v_pk_max_i16 v3, v1, v0", True),
    ],
)
def test_neighbours(before: str, after: str, hazard: bool) -> None:
    assert found(f"\t{before}\n" + INLINE.format(f"\t{after}")) == hazard
    assert found(f"\t{before}\n\ts_nop 0\n" + INLINE.format(f"\t{after}")) == 0
    assert found(f"\t{before}\n\t{after}\n") == 0
