# SPDX-License-Identifier: Apache-2.0
"""Global, buffer, flat and scratch memory, and what may go wrong there."""

import gcnsim
import numpy as np
import pytest

from tests.gcnsim.harness import ARCHS, LANES, execute, random_bits

LANE = np.arange(LANES)
A, B, C, D = (random_bits(LANES, np.uint32, seed) for seed in range(4))
# The harness passes the arrays of vector inputs in order; the first one's address is the first argument.
FIRST = "s_load_dwordx2 s[4:5], s[60:61], 0x0\n"
BUFFER = FIRST + "s_mov_b32 s6, {size}\ns_mov_b32 s7, 0x27000\n"
OFFSET = {"v1": (LANE * 4).astype(np.uint32)}
BYTES = A.view(np.uint8)


def signed(x, bits):
    return (x.astype(np.int64) ^ 1 << bits - 1) - (1 << bits - 1) & 0xFFFFFFFF


WIDTHS = {
    "ubyte": lambda at: BYTES[at].astype(np.int64),
    "sbyte": lambda at: signed(BYTES[at], 8),
    "ushort": lambda at: BYTES[at] + 256 * BYTES[at + 1].astype(np.int64),
    "sshort": lambda at: signed(BYTES[at] + 256 * BYTES[at + 1].astype(np.int64), 16),
    "dword": lambda at: A[at // 4].astype(np.int64),
    "ubyte_d16": lambda at: B.astype(np.int64) & 0xFFFF0000 | BYTES[at],
    "ubyte_d16_hi": lambda at: B.astype(np.int64) & 0xFFFF | BYTES[at].astype(np.int64) << 16,
    "sbyte_d16_hi": lambda at: B.astype(np.int64) & 0xFFFF | (signed(BYTES[at], 8) & 0xFFFF) << 16,
    "short_d16": lambda at: B.astype(np.int64) & 0xFFFF0000 | BYTES[at] + 256 * BYTES[at + 1].astype(np.int64),
    "short_d16_hi": lambda at: B.astype(np.int64) & 0xFFFF | BYTES[at] + 256 * BYTES[at + 1].astype(np.int64) << 16,
}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("family", ["global", "buffer", "flat"])
def test_loads(family, width):
    """Every width, from an offset of a scalar base, a buffer, and a 64-bit address."""
    at = (LANE[::-1] * 4 + (2 if "short" in width else 1 if "byte" in width else 0)) % 256
    address = "v_add_co_u32 v4, vcc, s4, v1\nv_mov_b32 v5, s5\nv_addc_co_u32 v5, vcc, 0, v5, vcc\n"
    code = {
        "global": FIRST + f"global_load_{width} v2, v1, s[4:5]",
        "buffer": BUFFER.format(size=256) + f"buffer_load_{width} v2, v1, s[4:7], 0 offen",
        "flat": FIRST + address + f"flat_load_{width} v2, v[4:5]",
    }[family]
    result = execute("gfx942", code, {"v0": A, "v1": at.astype(np.uint32), "v2": B}, "v2")
    assert np.array_equal(result, WIDTHS[width](at))


@pytest.mark.parametrize("arch", ARCHS)
def test_wide_loads_and_offsets(arch):
    code = (
        FIRST
        + """
      v_lshlrev_b32 v1, 2, v1
      global_load_dwordx2 v[8:9], v1, s[4:5] offset:-16
      global_load_dwordx3 v[12:14], v1, s[4:5] offset:4
      global_load_dwordx4 v[16:19], v1, s[4:5]
    """
    )
    at = 4 + LANE % 50
    pair, three, four = execute(arch, code, {"v0": A, "v1": at.astype(np.uint32)}, "v[8:9] v[12:14] v[16:19]")
    assert np.array_equal(pair, A[at - 4] | A[at - 3].astype(np.uint64) << np.uint64(32))
    assert np.array_equal(three, [A[at + 1], A[at + 2], A[at + 3]])
    assert np.array_equal(four, [A[at], A[at + 1], A[at + 2], A[at + 3]])


def test_a_load_may_overwrite_its_address():
    code = FIRST + "v_mov_b32 v2, s4\nv_mov_b32 v3, s5\nglobal_load_dwordx2 v[2:3], v[2:3], off offset:8"
    result = execute("gfx942", code, {"v0": A}, "v[2:3]")
    assert (result == A[2] | A[3].astype(np.uint64) << np.uint64(32)).all()


def test_buffer_range():
    """Lanes beyond the buffer read 0 and write nothing; offsets in VGPR, SGPR and instruction add up."""
    code = (
        BUFFER.format(size=100)
        + """
      s_mov_b32 s8, 8
      buffer_load_dword v2, v1, s[4:7], s8 offen offset:4
      s_mov_b32 s6, 64
      buffer_store_dword v3, v1, s[4:7], 0 offen
      s_mov_b32 s6, 256
      buffer_load_dword v4, v1, s[4:7], 0 offen
    """
    )
    loaded, after = execute("gfx942", code, {"v0": A, "v3": B} | OFFSET, "v2 v4")
    # The range check takes the offset of lane and instruction, not that of the scalar register.
    assert np.array_equal(loaded, np.where(LANE * 4 + 4 + 4 <= 100, A[np.minimum(LANE + 3, 63)], 0))
    assert np.array_equal(after, np.where(LANE < 16, B, A))


def test_stores_of_every_width():
    code = FIRST
    code += "v_lshlrev_b32 v1, 2, v1\n"
    code += "global_store_dwordx4 v1, v[8:11], s[4:5]\nglobal_store_byte v1, v12, s[4:5] offset:1\n"
    code += "global_store_byte_d16_hi v1, v12, s[4:5] offset:2\nglobal_store_short v1, v12, s[4:5] offset:4\n"
    code += "global_store_short_d16_hi v1, v12, s[4:5] offset:10\nglobal_load_dwordx4 v[16:19], v1, s[4:5]\n"
    code += "global_store_dwordx2 v1, v[8:9], s[4:5] offset:8\nglobal_store_dwordx3 v1, v[8:10], s[4:5]\n"
    code += "global_load_dwordx4 v[20:23], v1, s[4:5]"
    room = np.zeros(LANES, np.uint32)  # sixteen lanes of 16 bytes
    inputs = {"v0": room, "v1": (LANE * 4).astype(np.uint32), "v8": A, "v9": B, "v10": C, "v11": D, "v12": D}
    first, second = execute("gfx942", code, inputs, "v[16:19] v[20:23]", exec_mask=0xFFFF)
    expected = np.stack([A, B, C, D], 1)[:16].copy().view(np.uint8)
    data = D[:16, None].copy().view(np.uint8)
    expected[:, 1], expected[:, 2] = data[:, 0], data[:, 2]
    expected[:, 4:6], expected[:, 10:12] = data[:, 0:2], data[:, 2:4]
    assert np.array_equal(first[:, :16].T.copy().view(np.uint8), expected)
    assert np.array_equal(second[:, :16], np.stack([A, B, C, B])[:, :16])


SCRATCH = {
    "gfx90a": "buffer_store_dword v2, off, s[0:3], 0 offset:4\nbuffer_store_dword v3, v1, s[0:3], 0 offen\n"
    "buffer_load_dword v4, off, s[0:3], 0 offset:4\nbuffer_load_dword v5, v1, s[0:3], 0 offen",
    "gfx942": "scratch_store_dword off, v2, off offset:4\nscratch_store_dword v1, v3, off\n"
    "scratch_load_dword v4, off, off offset:4\nscratch_load_dword v5, v1, off",
    "gfx950": "s_mov_b32 s8, 4\nscratch_store_dword off, v2, s8\nscratch_store_dwordx2 v1, v[3:4], off\n"
    "scratch_load_dword v4, off, s8\nscratch_load_dword v5, v1, off",
}


@pytest.mark.parametrize("arch", SCRATCH)
def test_scratch_belongs_to_a_lane(arch):
    code = SCRATCH[arch]
    if arch == "gfx90a":  # the resource a kernel of gfx90a gets in its first registers
        code = "s_mov_b32 s0, 0\ns_mov_b32 s1, 0x80000000\ns_mov_b32 s2, -1\ns_mov_b32 s3, 0\n" + code
    inputs = {
        "v1": np.full(128, 8, np.uint32),
        "v2": np.arange(128, dtype=np.uint32),
        "v3": random_bits(128, np.uint32),
    }
    first, second = execute(arch, code, inputs, "v4 v5", scratch=16, check=arch != "gfx950")
    assert np.array_equal(first, inputs["v2"])
    assert np.array_equal(second, inputs["v3"])


# --- Memory itself


def test_memory_keeps_copies_and_reads_them_back():
    memory = gcnsim.Memory()
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    place = memory.allocate(values.T, "transposed")
    other = memory.allocate(np.uint8([7]), "byte")
    values[:] = 0
    assert memory.read(place, np.float32, (3, 2)).tolist() == [[0, 3], [1, 4], [2, 5]]
    assert memory.read(other, np.uint8, 1).tolist() == [7]
    assert place % 256 == other % 256 == 0


def test_memory_may_be_written_between_launches():
    memory = gcnsim.Memory()
    place = memory.allocate_empty(16, "room")
    memory.write(place + 4, np.uint32([5, 6]))
    assert memory.read(place + 4, np.uint32, 2, require_written=True).tolist() == [5, 6]
    with pytest.raises(gcnsim.UninitializedRead, match="byte 0 of 'room'"):
        memory.read(place, np.uint32, 3, require_written=True)
    with pytest.raises(gcnsim.MemoryFault, match="write out of bounds .* 0 bytes behind the end of 'room'"):
        memory.write(place + 12, np.uint32([1, 2]))


def test_memory_read_may_insist_on_written_bytes():
    memory = gcnsim.Memory()
    place = memory.allocate_empty(8, "room")
    assert memory.read(place, np.uint32, 2).tolist() == [0, 0]
    with pytest.raises(gcnsim.UninitializedRead, match="byte 0 of 'room'"):
        memory.read(place, np.uint32, 2, require_written=True)
    with pytest.raises(gcnsim.MemoryFault, match="behind the end of 'room'"):
        memory.read(place, np.uint32, 3)


# --- faults


@pytest.mark.parametrize(
    "code, message",
    [
        (
            FIRST + "global_load_dword v2, v1, s[4:5] offset:4",
            "read of 4 bytes out of bounds .* 0 bytes behind the end of",
        ),
        (FIRST + "global_load_dword v2, v1, s[4:5] offset:-4", "out of bounds .* 4 bytes before"),
        (FIRST + "global_store_dword v1, v1, s[4:5] offset:4", "write of 4 bytes out of bounds"),
        (FIRST + "global_load_ushort v2, v1, s[4:5] offset:3", "out of bounds"),
        (BUFFER.format(size=0x7FFFFFFE) + "buffer_load_dwordx4 v[4:7], v1, s[4:7], 0 offen", "out of bounds"),
        ("v_mov_b32 v2, 0\nv_mov_b32 v3, 0\nglobal_load_dword v2, v[2:3], off", "out of bounds at 0x0"),
        (FIRST + "s_load_dwordx8 s[8:15], s[4:5], 0x100", "out of bounds"),
    ],
    ids=["behind", "before", "store", "straddling", "buffer", "null", "scalar"],
)
def test_out_of_bounds(code, message):
    with pytest.raises(gcnsim.MemoryFault, match=message) as caught:
        execute("gfx942", code, {"v0": A} | OFFSET, "v2")
    assert caught.value.instruction == code.splitlines()[-1]
    assert caught.value.line


def test_inactive_lanes_may_point_anywhere():
    inputs = {"v0": A, "v1": np.where(LANE < 8, LANE * 4, 1 << 30).astype(np.uint32), "v2": B}
    result = execute("gfx942", FIRST + "global_load_dword v2, v1, s[4:5]", inputs, "v2", exec_mask=0xFF)
    assert np.array_equal(result, np.where(LANE < 8, A, B))


def test_scratch_has_bounds_and_is_not_written_at_first():
    with pytest.raises(gcnsim.MemoryFault, match="byte 16 to 20 of the scratch .* which has 16 bytes"):
        execute("gfx942", "scratch_store_dword off, v1, off offset:16", {}, "v1", scratch=16)
    with pytest.raises(gcnsim.UninitializedRead, match="nobody wrote byte 8"):
        execute("gfx942", "scratch_load_dword v1, off, off offset:8", {}, "v1", scratch=16)


def test_lds_has_bounds_and_is_not_written_at_first():
    with pytest.raises(gcnsim.MemoryFault, match="byte 64 to 68 of the LDS .* which has 64 bytes"):
        execute("gfx942", "ds_write_b32 v1, v1 offset:64", {"v1": np.zeros(64, np.uint32)}, "v1", lds=64)
    with pytest.raises(gcnsim.UninitializedRead, match="nobody wrote byte 12"):
        execute("gfx942", "ds_read_b32 v1, v1 offset:12", {"v1": np.zeros(64, np.uint32)}, "v1", lds=64)
    with pytest.raises(gcnsim.UninitializedRead, match="nobody wrote byte 1"):
        code = "ds_write_b8 v1, v1\nds_read_u16 v1, v1"
        execute("gfx942", code, {"v1": np.zeros(64, np.uint32)}, "v1", lds=64)
