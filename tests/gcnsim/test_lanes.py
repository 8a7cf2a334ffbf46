# SPDX-License-Identifier: Apache-2.0
"""Values that move between lanes (DPP, permutes, swaps), and parts of registers (SDWA)."""

import numpy as np
import pytest

from tests.gcnsim.harness import ARCHS, execute, random_bits, same_floats

LANE = np.arange(64)
COUNT = 256  # four waves
A, B, OLD = (random_bits(COUNT, np.uint32, seed) for seed in (1, 2, 3))
EVERY = -1


def by_wave(values):
    return values.reshape(-1, 64)


# --- DPP: the lane each lane reads, written out from the manual; None is no lane

SHIFTS = {
    "quad_perm:[1,2,3,0]": lambda n: n // 4 * 4 + (n + 1) % 4,
    "quad_perm:[0,0,0,0]": lambda n: n // 4 * 4,
    "row_shl:1": lambda n: n + 1 if n % 16 < 15 else None,
    "row_shl:15": lambda n: n + 15 if n % 16 == 0 else None,
    "row_shr:1": lambda n: n - 1 if n % 16 else None,
    "row_shr:8": lambda n: n - 8 if n % 16 >= 8 else None,
    "row_ror:4": lambda n: n // 16 * 16 + (n - 4) % 16,
    "wave_shl:1": lambda n: n + 1 if n < 63 else None,
    "wave_shr:1": lambda n: n - 1 if n else None,
    "wave_rol:1": lambda n: (n + 1) % 64,
    "wave_ror:1": lambda n: (n - 1) % 64,
    "row_mirror": lambda n: n // 16 * 16 + 15 - n % 16,
    "row_half_mirror": lambda n: n // 8 * 8 + 7 - n % 8,
    "row_bcast:15": lambda n: n // 16 * 16 - 1 if n >= 16 else None,
    "row_bcast:31": lambda n: 31 if n >= 32 else None,
    "row_newbcast:3": lambda n: n // 16 * 16 + 3,
}


def moved(pattern, rows=15, banks=15, bound_ctrl=False, active=EVERY):
    """What v_mov_b32_dpp leaves of A over OLD."""
    result = by_wave(OLD).copy()
    for lane in range(64):
        if not active >> lane & 1 or not rows >> lane // 16 & 1 or not banks >> lane % 16 // 4 & 1:
            continue
        source = SHIFTS[pattern](lane)
        if source is not None and active >> source & 1:
            result[:, lane] = by_wave(A)[:, source]
        elif bound_ctrl:
            result[:, lane] = 0
    return result.ravel()


@pytest.mark.parametrize("pattern", SHIFTS)
def test_dpp_patterns(pattern):
    for mask, text in ((False, ""), (True, " bound_ctrl:1")):
        code = f"v_mov_b32_dpp v0, v1 {pattern} row_mask:0xf bank_mask:0xf{text}"
        result = execute("gfx90a", code, {"v0": OLD, "v1": A}, "v0")
        assert np.array_equal(result, moved(pattern, bound_ctrl=mask))


@pytest.mark.parametrize("bound_ctrl", [False, True], ids=["keeps", "zeroes"])
def test_dpp_masks_and_inactive_sources(bound_ctrl):
    active = 0x0F0F00FFF0F0FF3C
    text = " bound_ctrl:1" if bound_ctrl else ""
    code = f"v_mov_b32_dpp v0, v1 row_shr:1 row_mask:0xa bank_mask:0xe{text}"
    result = execute("gfx90a", code, {"v0": OLD, "v1": A}, "v0", active)
    assert np.array_equal(result, moved("row_shr:1", 0xA, 0xE, bound_ctrl, active))


def test_dpp_in_arithmetic():
    """Source 0 comes from another lane; without a source the destination is not written."""
    shifted, valid = np.roll(by_wave(A), 1, axis=1), LANE % 16 > 0
    result = execute(
        "gfx942", "v_add_u32_dpp v0, v1, v2 row_shr:1 row_mask:0xf bank_mask:0xf", {"v0": OLD, "v1": A, "v2": B}, "v0"
    )
    assert np.array_equal(by_wave(result), np.where(valid, shifted + by_wave(B), by_wave(OLD)))
    x, y = A.view(np.float32), B.view(np.float32)
    result = execute(
        "gfx942",
        "v_add_f32_dpp v0, -v1, |v2| row_shr:1 row_mask:0xf bank_mask:0xf bound_ctrl:1",
        {"v0": OLD, "v1": x, "v2": y},
        "v0",
    )
    with np.errstate(all="ignore"):
        expected = -np.where(valid, np.roll(by_wave(x), 1, axis=1), np.float32(0)) + np.abs(by_wave(y))
    same_floats(result, expected.ravel())


def test_dpp_of_half():
    x = (A & 0xFFFF).astype(np.uint16).view(np.float16)
    y = (B & 0xFFFF).astype(np.uint16).view(np.float16)
    code = "v_add_f16_dpp v0, v1, v2 row_ror:8 row_mask:0xf bank_mask:0xf bound_ctrl:1"
    result = execute("gfx942", code, {"v0": OLD, "v1": x, "v2": y}, "v0")
    turned = by_wave(x)[:, LANE // 16 * 16 + (LANE - 8) % 16].ravel()
    with np.errstate(all="ignore"):
        same_floats(result.astype(np.uint16), turned + y)
    assert (result >> 16 == 0).all()


def test_dpp_reduction():
    """The six steps by which LLVM sums a wave."""
    steps = [
        "row_shr:1",
        "row_shr:2",
        "row_shr:4",
        "row_shr:8",
        "row_bcast:15 row_mask:0xa",
        "row_bcast:31 row_mask:0xc",
    ]
    full = [step if "row_mask" in step else f"{step} row_mask:0xf" for step in steps]
    code = "\n".join(f"v_add_u32_dpp v1, v1, v1 {step} bank_mask:0xf" for step in full)
    # v1 + v1 with source 0 from another lane: each step adds the other lane's sum.
    result = execute("gfx90a", code + "\nv_readlane_b32 s4, v1, 63", {"v1": A}, "s4")
    assert np.array_equal(result, by_wave(A).sum(axis=1, dtype=np.uint32))


# --- swizzles and permutes


@pytest.mark.parametrize("arch", ARCHS)
def test_gather_from_lanes(arch):
    lanes = np.random.default_rng(1).integers(0, 256, COUNT).astype(np.uint32)  # beyond 63 they wrap
    expected = np.take_along_axis(by_wave(A), by_wave(lanes).astype(int) % 64, axis=1).ravel()
    inputs = {"v0": OLD, "v1": lanes * 4, "v2": A}
    assert np.array_equal(execute(arch, "ds_bpermute_b32 v0, v1, v2", inputs, "v0"), expected)
    shifted = np.take_along_axis(by_wave(A), (by_wave(lanes).astype(int) + 2) % 64, axis=1).ravel()
    assert np.array_equal(execute(arch, "ds_bpermute_b32 v0, v1, v2 offset:8", inputs, "v0"), shifted)


def test_gather_from_inactive_lanes_is_zero():
    inputs = {"v0": OLD, "v1": np.resize(np.arange(64, dtype=np.uint32)[::-1] * 4, COUNT), "v2": A}
    result = by_wave(execute("gfx942", "ds_bpermute_b32 v0, v1, v2", inputs, "v0", 0xFFFF))
    assert (result[:, :16] == 0).all()
    assert np.array_equal(result[:, 16:], by_wave(OLD)[:, 16:])


def test_scatter_to_lanes():
    """The highest lane wins, and who gets nothing gets 0."""
    targets = np.resize((LANE // 2 * 3) % 64, COUNT).astype(np.uint32)
    result = by_wave(execute("gfx942", "ds_permute_b32 v0, v1, v2", {"v0": OLD, "v1": targets * 4, "v2": A}, "v0"))
    expected = np.zeros_like(result)
    for lane in range(64):
        expected[:, targets[lane]] = by_wave(A)[:, lane]
    assert np.array_equal(result, expected)


SWIZZLES = {
    "swizzle(QUAD_PERM,1,0,3,2)": LANE ^ 1,
    "0x80b1": LANE ^ 1,
    "swizzle(SWAP,16)": LANE ^ 16,
    "0x401f": LANE ^ 16,
    "swizzle(SWAP,1)": LANE ^ 1,
    "swizzle(REVERSE,8)": LANE ^ 7,
    "swizzle(BROADCAST,8,3)": LANE // 8 * 8 + 3,
    'swizzle(BITMASK_PERM,"0p1ip")': (LANE & 32) | (LANE & 0b01001) | 0b00100 | (LANE & 0b00010 ^ 0b00010),
}


@pytest.mark.parametrize("pattern", SWIZZLES)
def test_swizzle(pattern):
    result = execute("gfx942", f"ds_swizzle_b32 v0, v1 offset:{pattern}", {"v1": A}, "v0")
    assert np.array_equal(by_wave(result), by_wave(A)[:, SWIZZLES[pattern]])


def test_first_lane_and_single_lanes():
    masks = [-1, 0x8000000000000000, 0x10, 0]
    first = [0, 63, 4, 0]
    for mask, lane in zip(masks, first, strict=True):
        assert np.array_equal(
            execute("gfx942", "v_readfirstlane_b32 s4, v1", {"v1": A}, "s4", mask), by_wave(A)[:, lane]
        )
    # These two reach lanes that are not active.
    read = execute("gfx942", "v_readlane_b32 s4, v1, s5", {"v1": A, "s5": 70}, "s4", 1)
    assert np.array_equal(read, by_wave(A)[:, 6])
    written = by_wave(execute("gfx942", "v_writelane_b32 v1, s4, 9", {"v1": A, "s4": 77}, "v1", 1))
    assert (written[:, 9] == 77).all()
    assert np.array_equal(np.delete(written, 9, axis=1), np.delete(by_wave(A), 9, axis=1))


@pytest.mark.parametrize("rows", [16, 32])
def test_swap_of_rows(rows):
    """The odd rows of the first register change places with the even rows of the second."""
    first, second = execute("gfx950", f"v_permlane{rows}_swap_b32 v0, v1", {"v0": A, "v1": B}, "v0 v1")
    a, b = (by_wave(x).reshape(-1, 32 // rows, 2, rows) for x in (A, B))
    assert np.array_equal(first.reshape(a.shape), np.stack([a[:, :, 0], b[:, :, 0]], axis=2))
    assert np.array_equal(second.reshape(a.shape), np.stack([a[:, :, 1], b[:, :, 1]], axis=2))


def test_count_of_lanes_below():
    mask = 0xF0F0_1234_5678_9ABC
    code = "v_mbcnt_lo_u32_b32 v0, s4, 5\nv_mbcnt_hi_u32_b32 v0, s5, v0"
    result = execute("gfx942", code, {"s[4:5]": mask, "v1": A}, "v0")
    assert by_wave(result)[0].tolist() == [5 + (mask & (1 << lane) - 1).bit_count() for lane in range(64)]


# --- SDWA: bytes and words of sources and destinations

PARTS = {"DWORD": (32, 0), **{f"BYTE_{n}": (8, 8 * n) for n in range(4)}, "WORD_0": (16, 0), "WORD_1": (16, 16)}


def part(x, name, sign=False):
    width, shift = PARTS[name]
    value = x >> np.uint32(shift) & np.uint32((1 << width) - 1)
    return (
        np.where(value >> np.uint32(width - 1) == 1, value | ~np.uint32((1 << width) - 1), value)
        if sign and width < 32
        else value
    )


@pytest.mark.parametrize("select", PARTS)
@pytest.mark.parametrize("sign", [False, True], ids=["plain", "sext"])
def test_sdwa_sources(select, sign):
    first = "sext(v1)" if sign else "v1"
    code = f"v_add_u32_sdwa v0, {first}, v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:{select} src1_sel:BYTE_1"
    result = execute("gfx90a", code, {"v1": A, "v2": B}, "v0")
    assert np.array_equal(result, part(A, select, sign) + part(B, "BYTE_1"))


@pytest.mark.parametrize("select", PARTS)
@pytest.mark.parametrize("unused", ["UNUSED_PAD", "UNUSED_PRESERVE"])
def test_sdwa_destinations(select, unused):
    code = f"v_add_u32_sdwa v0, v1, v2 dst_sel:{select} dst_unused:{unused} src0_sel:DWORD src1_sel:DWORD"
    width, shift = PARTS[select]
    place = np.uint32(((1 << width) - 1) << shift)
    kept = OLD & ~place if unused == "UNUSED_PRESERVE" else np.uint32(0)
    result = execute("gfx942", code, {"v0": OLD, "v1": A, "v2": B}, "v0", EVERY)
    assert np.array_equal(result, (A + B) << np.uint32(shift) & place | kept)


def test_sdwa_of_half_and_in_compares():
    x = A.view(np.float16)
    code = "v_mul_f16_sdwa v0, v1, v2 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:WORD_1 src1_sel:WORD_0"
    result = execute("gfx942", code, {"v0": OLD, "v1": A, "v2": B}, "v0")
    assert np.array_equal(result & 0xFFFF, OLD & 0xFFFF)
    with np.errstate(all="ignore"):
        same_floats((result >> 16).astype(np.uint16), x[1::2] * B.view(np.float16)[::2])
    vcc = execute("gfx942", "v_cmp_lt_u32_sdwa vcc, v1, v2 src0_sel:BYTE_3 src1_sel:BYTE_0", {"v1": A, "v2": B}, "vcc")
    assert np.array_equal(np.unpackbits(vcc.view(np.uint8), bitorder="little"), part(A, "BYTE_3") < part(B, "BYTE_0"))
