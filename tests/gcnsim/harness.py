# SPDX-License-Identifier: Apache-2.0
"""Runs a few instructions on given registers and returns the registers they leave.

The instructions are put into a kernel that loads its registers from memory and stores them at the end. It keeps v240 to
v255 and s60 to s101 for itself. One wave a workgroup, as many workgroups as the arrays have multiples of 64 values.
"""

import functools
import re
from typing import Any

import gcnsim
import numpy as np

ARCHS = ("gfx90a", "gfx942", "gfx950")
LANES = 64
Array = np.ndarray[Any, np.dtype[Any]]

HEADER = """
.amdgcn_target "amdgcn-amd-amdhsa--{arch}"
test:
"""
# The kernel of `execute` begins so.
PROLOGUE = """
  s_mov_b64 s[60:61], s[0:1]
  s_lshl_b32 s62, s2, 8
  v_lshl_add_u32 v240, v0, 2, s62
  s_lshl_b32 s62, s2, 2
"""
FOOTER = """
  s_endpgm
.section .rodata
.amdhsa_kernel test
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
  .amdhsa_user_sgpr_count 2
  .amdhsa_system_sgpr_workgroup_id_x 1
.end_amdhsa_kernel
.amdgpu_metadata
  .kernarg_segment_size: {kernarg}
  .private_segment_fixed_size: {scratch}
{arguments}
"""


def assemble(arch: str, body: str, arguments: int, scratch: int = 0) -> gcnsim.Program:
    """A kernel with `arguments` arguments of 8 bytes: s[0:1] points to them, s2 is the workgroup, v0 the lane."""
    each = "  - .offset: {}\n    .size: 8\n    .value_kind: global_buffer"
    listed = "\n".join(each.format(8 * n) for n in range(arguments))
    footer = FOOTER.format(kernarg=8 * arguments, scratch=scratch, arguments=listed)
    return gcnsim.parse(HEADER.format(arch=arch) + body + footer)


def execute(
    arch: str,
    code: str,
    inputs: dict[str, Array | int],
    outputs: str,
    exec_mask: int = -1,
    lds: int = 0,
    scratch: int = 0,
    check: bool = True,
) -> Any:
    """Runs `code` and returns the registers named in `outputs` ("v0 s[2:3] vcc exec scc"), alone or as a tuple.

    `inputs` gives registers their values: of v5 an array with one value a lane, of s5 one value a wave or an integer;
    8-byte values go to pairs, 2-byte values are zero-extended, what is too short is repeated. Results are arrays of
    uint32, or of uint64 for pairs, [lanes] for vector and [waves] for scalar registers. With `check`, LLVM must accept
    `code`.
    """
    if check:
        assert_assembles(arch, code)
    vectors = {
        name: np.asarray(value) for name, value in inputs.items() if name.startswith(("v", "a")) and name != "vcc"
    }
    scalars = {name: np.atleast_1d(np.asarray(value)) for name, value in inputs.items() if name not in vectors}
    lanes = max([LANES, *(len(value) for value in vectors.values()), *(LANES * len(v) for v in scalars.values())])
    lanes = -(-lanes // LANES) * LANES
    memory, arguments, text = gcnsim.Memory(), [], PROLOGUE

    def pointer(address: int) -> str:
        arguments.append(address)
        return f"  s_load_dwordx2 s[64:65], s[60:61], {8 * len(arguments) - 8:#x}\n"

    for name, value in scalars.items():
        for register, words in _words(name, np.resize(value, lanes // LANES)):
            text += (
                pointer(memory.allocate(words)) + f"  s_load_dword s66, s[64:65], s62\n  s_mov_b32 {register}, s66\n"
            )
    if "scc" in inputs:
        text = text.replace("s_mov_b32 scc, s66", "s_mov_b32 s67, s66")
    for name, value in vectors.items():
        for register, words in _words(name, np.resize(value, lanes)):
            text += pointer(memory.allocate(words)) + f"  global_load_dword {register}, v240, s[64:65]\n"
    text += (
        f"  s_mov_b32 exec_lo, {exec_mask & 0xFFFFFFFF:#x}\n  s_mov_b32 exec_hi, {exec_mask >> 32 & 0xFFFFFFFF:#x}\n"
    )
    text += ("  s_cmp_lg_u32 s67, 0\n" if "scc" in inputs else "") + code + "\n"
    text += "  s_cselect_b32 s70, 1, 0\n  s_mov_b64 s[72:73], exec\n  s_mov_b64 s[74:75], vcc\n  s_mov_b64 exec, -1\n"
    places = []
    for name in outputs.split():
        stored = {"scc": "s70", "exec": "s[72:73]", "vcc": "s[74:75]"}.get(name, name)
        registers = _registers(stored)
        places.append((stored, [memory.allocate_empty(4 * lanes) for _ in registers]))
        for register, place in zip(registers, places[-1][1], strict=True):
            text += pointer(place) + f"  v_mov_b32 v241, {register}\n".replace(
                "v_mov_b32 v241, a", "v_accvgpr_read_b32 v241, a"
            )
            text += "  global_store_dword v240, v241, s[64:65]\n"
    program = assemble(arch, text, len(arguments), scratch)
    gcnsim.run([gcnsim.Launch(program, (lanes // LANES, 1, 1), 1, arguments, lds)], memory)

    results = []
    for stored, words in places:
        values = [memory.read(place, np.uint32, lanes)[:: 1 if stored[0] in "va" else LANES] for place in words]
        pair = len(values) == 2
        results.append(values[0] | values[1].astype(np.uint64) << np.uint64(32) if pair else np.stack(values)[0])
        if len(values) > 2:
            results[-1] = np.stack(values)
    return results[0] if len(results) == 1 else tuple(results)


def _registers(name: str) -> list[str]:
    if match := re.match(r"([vsa])\[(\d+):(\d+)\]$", name):
        return [f"{match[1]}{n}" for n in range(int(match[2]), int(match[3]) + 1)]
    return {"vcc": ["vcc_lo", "vcc_hi"], "exec": ["exec_lo", "exec_hi"]}.get(name, [name])


def _words(name: str, value: Array) -> list[tuple[str, Array]]:
    """The registers of an input, and the 32-bit words that each gets."""
    registers = _registers(name)
    raw = np.ascontiguousarray(value)
    if raw.dtype.itemsize < 4:
        raw = raw.view(f"u{raw.dtype.itemsize}").astype(np.uint32)
    elif value.dtype == np.int64 and len(registers) == 1:  # Python integers
        raw = raw.astype(np.uint32)
    words = raw.view(np.uint32).reshape(len(value), -1)
    assert words.shape[1] == len(registers), f"{name} has {len(registers)} registers, its values {words.shape[1]} words"
    return [(register, np.ascontiguousarray(words[:, n])) for n, register in enumerate(registers)]


@functools.cache
def assert_assembles(arch: str, code: str) -> None:
    """LLVM's assembler, as Triton brings it along, must accept the code: no test of instructions that do not exist."""
    assert assembles(arch, code), f"LLVM does not assemble this for {arch}: {code}"


def assembles(arch: str, code: str) -> bool:
    try:
        from triton._C.libtriton import amd, llvm
    except ImportError:
        return True
    llvm.init_targets()
    try:
        binary = amd.assemble_amdgcn(code + "\n", "amdgcn-amd-amdhsa", arch, "")
    except TypeError:  # Triton 3.6 knows the triple itself
        binary = amd.assemble_amdgcn(code + "\n", arch, "")
    return len(binary) > 0


def random_bits(count: int, dtype: Any, seed: int = 0) -> Array:
    """Numbers of every kind: half of them random bits (NaN and denormals among them), half not far from 1."""
    kind = np.dtype(dtype)
    random = np.random.default_rng(seed)
    bits = random.integers(0, 256, (count, kind.itemsize), np.uint8).view(f"u{kind.itemsize}")[:, 0]
    if kind.kind == "f":
        near = (random.standard_normal(count) * 2.0 ** random.integers(-4, 5, count)).astype(kind)
        bits = np.where(random.random(count) < 0.5, bits, near.view(bits.dtype))
    else:
        small = random.integers(0, 70, count).astype(bits.dtype)
        bits = np.where(random.random(count) < 0.2, small, bits)
        bits = np.where(random.random(count) < 0.1, ~small, bits)
    return np.concatenate([bits.view(kind), special_values(kind)])[-count:] if count >= 256 else bits.view(kind)


def special_values(dtype: Any) -> Array:
    """Zeros, ones, extremes, denormals, infinities, NaN: what goes wrong first."""
    kind = np.dtype(dtype)
    if kind.kind == "f":
        info = np.finfo(kind)
        positive = [0.0, info.smallest_subnormal, info.tiny / 2, info.tiny, 0.5, 1, 1.5, 2, 3, info.max, np.inf, np.nan]
        positive += [1 + info.eps, 255.5, 2.5, 1023.5]
        return np.array([sign * value for value in positive for sign in (1, -1)], kind)
    ones = np.iinfo(f"u{kind.itemsize}").max
    values = [0, 1, 2, 31, 32, 63, 64, ones, ones - 1, ones >> 1, (ones >> 1) + 1, 0xFF, 0x80, 0x7F]
    return np.array(values, f"u{kind.itemsize}").view(kind)


def same_floats(actual: Array, expected: Array) -> None:
    """The same bits, but for NaN, which equals any NaN."""
    expected = np.broadcast_to(np.asarray(expected), actual.shape)
    actual = actual.view(expected.dtype)
    bits = f"u{expected.dtype.itemsize}"
    different = (actual.view(bits) != np.ascontiguousarray(expected).view(bits)) & ~(
        np.isnan(actual) & np.isnan(expected)
    )
    assert not different.any(), (
        f"{different.sum()} of {len(actual)} differ, first at {np.argmax(different)}: "
        f"{actual[different][0]!r} instead of {expected[different][0]!r}"
    )
