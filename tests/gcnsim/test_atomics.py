# SPDX-License-Identifier: Apache-2.0
"""Atomics in global memory and in LDS, with many lanes on few addresses, against one lane after the other."""

import gcnsim
import ml_dtypes
import numpy as np
import pytest

from tests.gcnsim.harness import ARCHS, execute, random_bits

LANES, PLACES = 64, 5
LANE = np.arange(LANES)
WHERE = np.random.default_rng(0).integers(0, PLACES, LANES)
FIRST = "s_load_dwordx2 s[4:5], s[60:61], 0x0\n"
M32, M64 = (1 << 32) - 1, (1 << 64) - 1
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def signed(x, bits):
    return x - (1 << bits) if x >> bits - 1 else x


# name in global memory, name in LDS: the new value of old and data, of so many bits
INTEGER = {
    ("swap", "wrxchg"): lambda old, data, bits: data,
    ("add", "add"): lambda old, data, bits: old + data,
    ("sub", "sub"): lambda old, data, bits: old - data,
    ("smin", "min_i"): lambda old, data, bits: min(old, data, key=lambda x: signed(x, bits)),
    ("smax", "max_i"): lambda old, data, bits: max(old, data, key=lambda x: signed(x, bits)),
    ("umin", "min_u"): lambda old, data, bits: min(old, data),
    ("umax", "max_u"): lambda old, data, bits: max(old, data),
    ("and", "and"): lambda old, data, bits: old & data,
    ("or", "or"): lambda old, data, bits: old | data,
    ("xor", "xor"): lambda old, data, bits: old ^ data,
    ("inc", "inc"): lambda old, data, bits: 0 if old >= data else old + 1,
    ("dec", "dec"): lambda old, data, bits: data if old == 0 or old > data else old - 1,
}
BITS = {"add": "u", "sub": "u", "inc": "u", "dec": "u", "min_i": "i", "max_i": "i", "min_u": "u", "max_u": "u"}


def one_by_one(start, data, operation, bits):
    memory, returned = [int(x) for x in start], []
    for place, value in zip(WHERE, data, strict=True):
        returned.append(memory[place])
        memory[place] = operation(memory[place], int(value), bits) & (1 << bits) - 1
    return memory, returned


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("names", INTEGER, ids=[name for name, _ in INTEGER])
def test_integers(names, bits):
    kind = np.dtype(f"u{bits // 8}")
    start, data = random_bits(PLACES, kind, 1), random_bits(LANES, kind, 2)
    memory, returned = one_by_one(start, data, INTEGER[names], bits)
    room = np.zeros(LANES, np.uint32)
    room[: PLACES * bits // 32] = start.view(np.uint32)
    value, old = ("v[2:3]", "v[8:9]") if bits == 64 else ("v2", "v8")
    inputs = {
        "v0": room,
        "v1": (WHERE * bits // 8).astype(np.uint32),
        value: data,
        "v4": (LANE % PLACES * bits // 8).astype(np.uint32),
    }

    suffix = "_x2" if bits == 64 else ""
    width = "x2" if bits == 64 else ""
    code = f"global_atomic_{names[0]}{suffix} {old}, v1, {value}, s[4:5] glc\n"
    code += f"global_load_dword{width} v[10:11], v4, s[4:5]"
    code = code if bits == 64 else code.replace("v[10:11]", "v10")
    final = "v[10:11]" if bits == 64 else "v10"
    was, now = execute("gfx90a", FIRST + code, inputs, f"{old} {final}")
    assert was.tolist() == returned
    assert now[:PLACES].tolist() == memory

    base, _, letter = names[1].partition("_")
    letter = letter or BITS.get(names[1], "b")
    ds = f"ds_{base}_rtn_{letter}{bits}"
    fill = f"ds_write_b{bits} v4, {final}\n"
    values_by_lane = start[LANE % PLACES]
    code = f"{fill}{ds} {old}, v1, {value}\nds_read_b{bits} {final}, v4"
    was, now = execute("gfx90a", code, inputs | {final: values_by_lane}, f"{old} {final}", lds=64)
    assert was.tolist() == returned
    assert now[:PLACES].tolist() == memory


def test_without_the_old_value():
    code = FIRST + "global_atomic_add v1, v2, s[4:5]\nglobal_load_dword v8, v4, s[4:5]"
    ones = np.ones(LANES, np.uint32)
    inputs = {
        "v0": np.zeros(LANES, np.uint32),
        "v1": (WHERE * 4).astype(np.uint32),
        "v2": ones,
        "v4": (LANE * 4).astype(np.uint32),
    }
    assert np.array_equal(execute("gfx942", code, inputs, "v8"), np.bincount(WHERE, minlength=LANES))
    code = "ds_write_b32 v4, v0\nds_add_u32 v1, v2\nds_read_b32 v8, v4"
    assert np.array_equal(execute("gfx942", code, inputs, "v8", lds=256), np.bincount(WHERE, minlength=LANES))


def test_compare_and_swap():
    """In global memory the new value comes first, in LDS the expected one."""
    expected, new = (LANE % 7).astype(np.uint32), (LANE * 10).astype(np.uint32)
    memory, returned = [3], []
    for compare, value in zip(expected, new, strict=True):
        returned.append(memory[0])
        memory[0] = int(value) if memory[0] == compare else memory[0]
    zeros = np.zeros(LANES, np.uint32)
    inputs = {"v0": np.full(LANES, 3, np.uint32), "v1": zeros, "v2": new, "v3": expected}
    code = FIRST + "global_atomic_cmpswap v8, v1, v[2:3], s[4:5] sc0\nglobal_load_dword v9, v1, s[4:5]"
    was, now = execute("gfx942", code, inputs, "v8 v9")
    assert was.tolist() == returned
    assert (now == memory[0]).all()
    code = "ds_write_b32 v1, v0\nds_cmpst_rtn_b32 v8, v1, v3, v2\nds_read_b32 v9, v1"
    was, now = execute("gfx942", code, inputs, "v8 v9", lds=16)
    assert was.tolist() == returned
    assert (now == memory[0]).all()


FLOATS = {"add": np.add, "min": np.fmin, "max": np.fmax}


@pytest.mark.parametrize("kind, arch", [("f32", "gfx942"), ("f64", "gfx90a")])
@pytest.mark.parametrize("name", FLOATS)
def test_floats(name, kind, arch):
    dtype = np.dtype(f"f{int(kind[1:]) // 8}")
    data = np.random.default_rng(3).standard_normal(LANES).astype(dtype)
    memory = np.zeros(PLACES, dtype)
    for place, value in zip(WHERE, data, strict=True):
        memory[place] = FLOATS[name](memory[place], value)
    pair = kind == "f64"
    value, final = ("v[2:3]", "v[8:9]") if pair else ("v2", "v8")
    size = dtype.itemsize
    inputs = {"v0": np.zeros(LANES, np.uint32), "v1": (WHERE * size).astype(np.uint32), value: data}
    inputs["v4"] = (LANE % PLACES * size).astype(np.uint32)
    if name == "add" or pair:
        code = f"global_atomic_{name}_{kind} v1, {value}, s[4:5]\n"
        code += f"global_load_dword{'x2' if pair else ''} {final}, v4, s[4:5]"
        assert np.array_equal(execute(arch, FIRST + code, inputs, final).view(dtype)[:PLACES], memory)
    inputs[final] = np.zeros(LANES, dtype)
    code = f"ds_write_b{8 * size} v4, {final}\nds_{name}_{kind} v1, {value}\nds_read_b{8 * size} {final}, v4"
    assert np.array_equal(execute(arch, code, inputs, final, lds=64).view(dtype)[:PLACES], memory)


@pytest.mark.parametrize("kind, dtype", [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)], ids=["f16", "bf16"])
def test_pairs_of_16_bits(kind, dtype):
    data = np.random.default_rng(4).standard_normal((LANES, 2)).astype(dtype)
    memory = np.zeros((PLACES, 2), dtype)
    for place, value in zip(WHERE, data, strict=True):
        memory[place] = memory[place] + value
    inputs = {"v0": np.zeros(LANES, np.uint32), "v1": (WHERE * 4).astype(np.uint32), "v2": data.view(np.uint32)[:, 0]}
    inputs["v4"] = (LANE % PLACES * 4).astype(np.uint32)
    code = FIRST + f"global_atomic_pk_add_{kind} v1, v2, s[4:5]\nglobal_load_dword v8, v4, s[4:5]"
    result = execute("gfx942", code, inputs, "v8")[:PLACES]
    assert np.array_equal(result.view(np.uint16), memory.view(np.uint16).ravel())
    code = f"ds_write_b32 v4, v0\nds_pk_add_{kind} v1, v2\nds_read_b32 v8, v4"
    result = execute("gfx942", code, inputs, "v8", lds=64)[:PLACES]
    assert np.array_equal(result.view(np.uint16), memory.view(np.uint16).ravel())


@pytest.mark.parametrize("arch", ARCHS)
def test_in_a_buffer_and_by_address(arch):
    returns = "glc" if arch == "gfx90a" else "sc0"
    code = (
        FIRST
        + f"""
      s_mov_b32 s6, 8
      s_mov_b32 s7, 0x27000
      buffer_atomic_add v2, v1, s[4:7], 0 offen {returns}
      v_mov_b32 v6, s4
      v_mov_b32 v7, s5
      global_atomic_add v[6:7], v3, off offset:4
      global_load_dwordx3 v[8:10], v[6:7], off
    """
    )
    ones = np.ones(LANES, np.uint32)
    inputs = {"v0": np.full(LANES, 100, np.uint32), "v1": (LANE % 3 * 4).astype(np.uint32), "v2": ones, "v3": ones}
    old, now = execute(arch, code, inputs, "v2 v[8:10]")
    # The third place is beyond the buffer: nothing happens there.
    assert old.tolist() == [100 + lane // 3 if lane % 3 < 2 else 0 for lane in range(LANES)]
    assert now[:, 0].tolist() == [122, 100 + 21 + 64, 100]


def test_a_buffer_out_of_reach_of_every_lane():
    code = FIRST + "s_mov_b32 s6, 0\ns_mov_b32 s7, 0x27000\nbuffer_atomic_add v2, v1, s[4:7], 0 offen sc0"
    inputs = {"v0": np.zeros(64, np.uint32), "v1": np.zeros(64, np.uint32), "v2": np.ones(64, np.uint32)}
    assert (execute("gfx942", code, inputs, "v2") == 0).all()


def test_many_waves_on_one_counter():
    inputs = {"v0": np.zeros(4096, np.uint32), "v1": np.zeros(4096, np.uint32), "v2": np.ones(4096, np.uint32)}
    old = execute("gfx942", FIRST + "global_atomic_add v8, v1, v2, s[4:5] sc0", inputs, "v8")
    assert sorted(old.tolist()) == list(range(4096))


def test_only_active_lanes_take_part():
    inputs = {
        "v0": np.zeros(64, np.uint32),
        "v1": np.zeros(64, np.uint32),
        "v2": np.ones(64, np.uint32),
        "v8": np.full(64, 7, np.uint32),
    }
    code = FIRST + "global_atomic_add v8, v1, v2, s[4:5] sc0\ns_mov_b64 exec, -1\nglobal_load_dword v9, v1, s[4:5]"
    old, now = execute("gfx942", code, inputs, "v8 v9", exec_mask=0xF0)
    assert (now == 4).all()
    assert old.tolist() == [lane - 4 if 4 <= lane < 8 else 7 for lane in range(64)]


def test_faults():
    inputs = {"v0": np.zeros(64, np.uint32), "v1": np.full(64, 2, np.uint32), "v2": np.ones(64, np.uint32)}
    with pytest.raises(gcnsim.MemoryFault, match="no multiple of 4"):
        execute("gfx942", FIRST + "global_atomic_add v1, v2, s[4:5]", inputs, "v1")
    with pytest.raises(gcnsim.MemoryFault, match="out of bounds"):
        execute("gfx942", FIRST + "global_atomic_add v1, v2, s[4:5] offset:510", inputs, "v1")
    with pytest.raises(gcnsim.UninitializedRead, match="LDS"):
        execute("gfx942", "ds_add_u32 v1, v2 offset:2", inputs, "v1", lds=64)
    with pytest.raises(gcnsim.UnknownInstruction, match="csub"):
        execute("gfx942", "global_atomic_csub v1, v2, s[4:5]", inputs, "v1", check=False)
