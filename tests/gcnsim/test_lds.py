# SPDX-License-Identifier: Apache-2.0
"""LDS: every width of read and write, strided pairs, transposing reads, loads that go there directly."""

import gcnsim
import numpy as np
import pytest

from tests.gcnsim.harness import ARCHS, execute, random_bits

COUNT = 256
LDS = 16384
LANE = np.arange(64)
# Lane n's place: 16 bytes apart, in an order of its own.
ORDER = np.random.default_rng(0).permutation(64)
PLACE = np.resize(ORDER * 16, COUNT).astype(np.uint32)
A, B, C, D, OLD = (random_bits(COUNT, np.uint32, seed) for seed in range(5))
FILL = "ds_write_b128 v1, v[4:7]\n"
VALUES = {"v1": PLACE, "v4": A, "v5": B, "v6": C, "v7": D}
BYTES = np.stack([A, B, C, D], axis=1).view(np.uint8)  # by lane, what lies at its place


def signed(x, bits):
    return (x.astype(np.int64) ^ 1 << bits - 1) - (1 << bits - 1)


@pytest.mark.parametrize("arch", ARCHS)
def test_widest_write_and_narrower_reads(arch):
    reads = "ds_read_b32 v8, v1 offset:4\nds_read_b64 v[10:11], v1 offset:8\n"
    reads += "ds_read_b96 v[12:14], v1\nds_read_b128 v[16:19], v1"
    word, pair, three, four = execute(arch, FILL + reads, VALUES, "v8 v[10:11] v[12:14] v[16:19]", lds=LDS)
    assert np.array_equal(word, B)
    assert np.array_equal(pair, C | D.astype(np.uint64) << np.uint64(32))
    assert np.array_equal(three, [A, B, C])
    assert np.array_equal(four, [A, B, C, D])


NARROW = {
    "ds_read_u8 v0, v1 offset:5": lambda old: BYTES[:, 5],
    "ds_read_i8 v0, v1 offset:5": lambda old: signed(BYTES[:, 5], 8),
    "ds_read_u16 v0, v1 offset:6": lambda old: BYTES.view(np.uint16)[:, 3],
    "ds_read_i16 v0, v1 offset:6": lambda old: signed(BYTES.view(np.uint16)[:, 3], 16),
    "ds_read_u8_d16 v0, v1 offset:5": lambda old: old & 0xFFFF0000 | BYTES[:, 5],
    "ds_read_u8_d16_hi v0, v1 offset:5": lambda old: old & 0xFFFF | BYTES[:, 5].astype(np.uint32) << 16,
    "ds_read_i8_d16 v0, v1 offset:5": lambda old: old & 0xFFFF0000 | signed(BYTES[:, 5], 8) & 0xFFFF,
    "ds_read_i8_d16_hi v0, v1 offset:5": lambda old: old & 0xFFFF | (signed(BYTES[:, 5], 8) & 0xFFFF) << 16,
    "ds_read_u16_d16 v0, v1 offset:2": lambda old: old & 0xFFFF0000 | BYTES.view(np.uint16)[:, 1],
    "ds_read_u16_d16_hi v0, v1 offset:2": lambda old: (
        old & 0xFFFF | BYTES.view(np.uint16)[:, 1].astype(np.uint32) << 16
    ),
}


@pytest.mark.parametrize("code", NARROW)
def test_narrow_reads(code):
    result = execute("gfx942", FILL + code, VALUES | {"v0": OLD}, "v0", lds=LDS)
    assert np.array_equal(result, NARROW[code](OLD.astype(np.int64)).astype(np.int64) & 0xFFFFFFFF)


NARROW_WRITES = {
    "ds_write_b8 v1, v0 offset:1": (1, lambda x: x.astype(np.uint8)[:, None]),
    "ds_write_b8_d16_hi v1, v0 offset:1": (1, lambda x: (x >> 16).astype(np.uint8)[:, None]),
    "ds_write_b16 v1, v0 offset:6": (6, lambda x: x.astype(np.uint16)[:, None].view(np.uint8)),
    "ds_write_b16_d16_hi v1, v0 offset:6": (6, lambda x: (x >> 16).astype(np.uint16)[:, None].view(np.uint8)),
    "ds_write_b32 v1, v0 offset:4": (4, lambda x: x[:, None].view(np.uint8)),
}


@pytest.mark.parametrize("code", NARROW_WRITES)
def test_narrow_writes_leave_their_neighbours_alone(code):
    start, raw = NARROW_WRITES[code]
    result = execute("gfx942", FILL + code + "\nds_read_b128 v[16:19], v1", VALUES | {"v0": OLD}, "v[16:19]", lds=LDS)
    expected = BYTES.copy()
    data = raw(OLD)
    expected[:, start : start + data.shape[1]] = data
    assert np.array_equal(result.T.copy().view(np.uint8), expected)


def test_pairs_of_places():
    """Two places in one instruction, offsets counted in elements, or in 64 of them."""
    code = """
      ds_write2_b32 v1, v4, v5 offset0:1 offset1:3
      ds_read2_b32 v[8:9], v1 offset0:3 offset1:1
      ds_write2_b64 v1, v[4:5], v[6:7] offset1:1
      ds_read2_b64 v[16:19], v1 offset0:1
      ds_write2st64_b32 v1, v4, v5 offset0:8 offset1:12
      ds_read2st64_b32 v[10:11], v1 offset0:12 offset1:8
      ds_write2st64_b64 v1, v[4:5], v[6:7] offset0:8 offset1:10
      ds_read2st64_b64 v[20:23], v1 offset0:10 offset1:8
    """
    words, pairs, far, far_pairs = execute("gfx942", code, VALUES, "v[8:9] v[16:19] v[10:11] v[20:23]", lds=LDS)
    swapped = B | A.astype(np.uint64) << np.uint64(32)
    assert np.array_equal(words, swapped)
    assert np.array_equal(pairs, [C, D, A, B])
    assert np.array_equal(far, swapped)
    assert np.array_equal(far_pairs, [C, D, A, B])


def test_strides_of_pairs():
    """What st64 means, checked by plain reads."""
    reads = "\nds_read_b32 v8, v1 offset:{}\nds_read_b32 v9, v1 offset:{}"
    code = "ds_write2st64_b32 v1, v4, v5 offset0:8 offset1:12" + reads.format(2048, 3072)
    first, second = execute("gfx942", code, VALUES, "v8 v9", lds=LDS)
    assert np.array_equal(first, A)
    assert np.array_equal(second, B)
    code = "ds_write2st64_b64 v1, v[4:5], v[6:7] offset0:8 offset1:10" + reads.format(4096, 5124)
    first, second = execute("gfx942", code, VALUES, "v8 v9", lds=LDS)
    assert np.array_equal(first, A)
    assert np.array_equal(second, D)


def test_inactive_lanes_neither_write_nor_read():
    code = """
      s_mov_b64 exec, -1
      ds_write_b32 v1, v4
      s_mov_b32 exec_lo, 0xffff
      s_mov_b32 exec_hi, 0
      ds_write_b32 v1, v5
      ds_read_b32 v0, v1
      s_mov_b64 exec, -1
      ds_read_b32 v2, v1
    """
    partly, everything = execute("gfx942", code, VALUES | {"v0": OLD}, "v0 v2", lds=LDS)
    active = np.resize(LANE < 16, COUNT)
    assert np.array_equal(partly, np.where(active, B, OLD))
    assert np.array_equal(everything, np.where(active, B, A))


def test_workgroups_have_their_own():
    """Four workgroups write to the same place and read their own value back."""
    code = "ds_write_b32 v1, v4\nds_read_b32 v0, v1"
    assert np.array_equal(
        execute("gfx942", code, {"v1": np.zeros(COUNT, np.uint32), "v4": A}, "v0", lds=64).reshape(4, 64)[:, 0],
        A[63::64],
    )


@pytest.mark.parametrize("size", [8, 24, 1020])
def test_the_end_of_lds(size):
    """A size that is no multiple of 16 bytes ends where it ends."""
    place = {"v1": np.full(64, size - 4, np.uint32), "v4": A[:64]}
    code = "ds_write_b32 v1, v4{0}\nds_read_b32 v0, v1{0}"
    assert (execute("gfx942", code.format(""), place, "v0", lds=size) == A[63]).all()
    with pytest.raises(gcnsim.MemoryFault, match=f"which has {size} bytes"):
        execute("gfx942", code.format(" offset:4"), place, "v0", lds=size)


def test_transposing_reads_with_inactive_lanes_are_refused():
    code = "ds_write_b64 v1, v[4:5]\ns_mov_b32 exec_hi, 0\nds_read_b64_tr_b16 v[2:3], v1"
    with pytest.raises(gcnsim.UnknownInstruction, match="a transposing read with inactive lanes"):
        execute("gfx950", code, {"v1": LANE * 8, "v4": A[:64], "v5": B[:64]}, "v2 v3", lds=LDS)


@pytest.mark.parametrize("bits, rows", [(16, 4), (8, 8), (4, 16)])
def test_transposing_read(bits, rows):
    """Of each sixteen lanes, lane n gets column n of a matrix whose rows lie in LDS one after the other."""
    matrix = np.random.default_rng(1).integers(0, 1 << bits, (4, rows, 16))
    inputs = {"v1": (LANE * 8).astype(np.uint32)} | {f"v{4 + n}": w for n, w in enumerate(packed_words(matrix, bits))}
    code = f"ds_write_b64 v1, v[4:5]\nds_read_b64_tr_b{bits} v[2:3], v1"
    result = execute("gfx950", code, inputs, "v2 v3", lds=LDS)
    assert np.array_equal(result, packed_words(matrix.transpose(0, 2, 1), bits))


def packed_words(values, bits):
    """Numbers of `bits` bits, 64 bits a lane, as the words of two registers."""
    rows = values.reshape(64, -1).tolist()
    whole = [sum(value << bits * n for n, value in enumerate(row)) for row in rows]
    return [np.array([lane >> 32 * word & 0xFFFFFFFF for lane in whole], np.uint32) for word in range(2)]


@pytest.mark.parametrize("arch, width", [("gfx90a", 1), ("gfx942", 1), ("gfx950", 1), ("gfx950", 4)])
def test_load_that_goes_to_lds(arch, width):
    """Lane n's data lies at m0 + offset + n times its size; a lane out of the buffer's range brings zeros."""
    suffix = "x4" if width == 4 else ""
    words = "v[16:19]" if width == 4 else "v16"
    code = f"""
      s_load_dwordx2 s[4:5], s[60:61], 0x0
      s_mov_b32 s6, 240
      s_mov_b32 s7, 0x27000
      s_movk_i32 m0, 0x100
      v_lshlrev_b32 v2, 2, v9
      buffer_load_dword{suffix} v2, s[4:7], 0 offen offset:16 lds
      v_lshlrev_b32 v3, {2 if width == 1 else 4}, v9
      ds_read_b{32 * width} {words}, v3 offset:272
    """
    source = np.arange(1000, 1256, dtype=np.uint32)
    order = (LANE[::-1] * (1 if width == 1 else 4) % 61).astype(np.uint32)
    if width == 4:
        order = (LANE[::-1] // 5 * 4).astype(np.uint32)
    code = code.replace("v_lshlrev_b32 v2, 2, v9", "v_lshlrev_b32 v2, 2, v10")
    inputs = {"v20": source[:64], "v9": LANE.astype(np.uint32), "v10": order}
    result = np.atleast_2d(execute(arch, code, inputs, words, lds=LDS))
    for word in range(width):
        start = order.astype(int) * 4 + 16
        inside = start + 4 * width <= 240
        expected = np.where(inside, source[np.minimum(start // 4 + word, 63)], 0)
        assert np.array_equal(result[word], expected)


@pytest.mark.parametrize("arch, suffix, words", [("gfx942", "", 1), ("gfx950", "x4", 4)])
def test_load_from_an_address_that_goes_to_lds(arch, suffix, words):
    """The constant offset counts for the address and for the place in LDS; inactive lanes leave a hole."""
    registers = "v[16:19]" if words == 4 else "v16"
    code = f"""
      s_load_dwordx2 s[4:5], s[60:61], 0x0
      s_movk_i32 m0, 0x40
      v_mov_b32 v4, -1
      v_mov_b32 v5, -1
      v_mov_b32 v6, -1
      v_mov_b32 v7, -1
      v_lshlrev_b32 v3, {4 if words == 4 else 2}, v9
      ds_write_b{32 * words} v3, {"v[4:7]" if words == 4 else "v4"} offset:80
      s_mov_b32 exec_lo, 0xffffff0f
      global_load_lds_dword{suffix} v10, s[4:5] offset:16
      s_mov_b32 exec_lo, -1
      ds_read_b{32 * words} {registers}, v3 offset:80
    """
    source = np.arange(1000, 1064, dtype=np.uint32)
    start = LANE[::-1] // 5 * 4
    inputs = {"v20": source, "v9": LANE.astype(np.uint32), "v10": (start * 4).astype(np.uint32)}
    result = np.atleast_2d(execute(arch, code, inputs, registers, lds=LDS))
    hole = (LANE >= 4) & (LANE < 8)
    for word in range(words):
        assert np.array_equal(result[word], np.where(hole, 0xFFFFFFFF, source[start + 4 + word]))


def test_bytes_straight_to_lds_are_refused():
    with pytest.raises(gcnsim.UnknownInstruction, match="bytes and shorts to LDS"):
        execute("gfx942", "buffer_load_ubyte v2, s[4:7], 0 offen lds", {}, "v2", lds=LDS)
