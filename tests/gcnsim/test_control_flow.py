# SPDX-License-Identifier: Apache-2.0
"""Branches, divergence of waves, barriers, LDS races, and several launches on one memory."""

import gcnsim
import numpy as np
import pytest
from gcnsim.races import RaceDetector

from tests.gcnsim.harness import ARCHS, assemble, execute

LANE = np.arange(64)
# s3 is the wave in its workgroup, v1 the lane of all workgroups times 4; s[8:9] and s[10:11] are the first arguments.
START = """
  v_readfirstlane_b32 s3, v0
  s_lshr_b32 s3, s3, 6
  s_load_dwordx4 s[8:11], s[0:1], 0x0
  s_mul_i32 s4, s2, {stride}
  v_lshl_add_u32 v1, v0, 2, s4
"""


def run(arch, body, waves, workgroups, *arrays, lds=0, **options):
    """Runs a kernel on copies of the arrays and returns what is in them afterwards."""
    memory = gcnsim.Memory()
    places = [memory.allocate(array, f"array {n}") for n, array in enumerate(arrays)]
    program = assemble(arch, START.format(stride=waves * 256) + body, len(places))
    gcnsim.run([gcnsim.Launch(program, (workgroups, 1, 1), waves, places, lds)], memory, **options)
    results = [memory.read(place, array.dtype, array.shape) for place, array in zip(places, arrays, strict=True)]
    return results[0] if len(results) == 1 else results


# --- branches


@pytest.mark.parametrize("arch", ARCHS)
def test_loop_with_a_count_of_its_own_in_each_wave(arch):
    """Waves leave at different times and all come out right: s5 turns of adding s6."""
    code = """
      s_mov_b32 s4, 0
    again:
      s_cmp_eq_u32 s5, 0
      s_cbranch_scc1 done
      s_add_u32 s4, s4, s6
      s_sub_u32 s5, s5, 1
      s_branch again
    done:
      s_add_u32 s4, s4, 1000
    """
    turns, step = np.arange(40, dtype=np.uint32) * 7 % 23, np.arange(40, dtype=np.uint32)
    assert execute(arch, code, {"s5": turns, "s6": step}, "s4").tolist() == (turns * step + 1000).tolist()


BRANCHES = {
    "s_cbranch_scc0": ("s_cmp_eq_u32 s5, 1", lambda x: x != 1),
    "s_cbranch_scc1": ("s_cmp_eq_u32 s5, 1", lambda x: x == 1),
    "s_cbranch_vccz": ("s_mov_b32 vcc_lo, 0\ns_mov_b32 vcc_hi, s5", lambda x: x == 0),
    "s_cbranch_vccnz": ("s_mov_b32 vcc_lo, s5\ns_mov_b32 vcc_hi, 0", lambda x: x != 0),
    "s_cbranch_execz": ("s_mov_b32 exec_lo, s5\ns_mov_b32 exec_hi, 0", lambda x: x == 0),
    "s_cbranch_execnz": ("s_mov_b32 exec_lo, 0\ns_mov_b32 exec_hi, s5", lambda x: x != 0),
    "s_branch": ("", lambda x: x == x),
}


@pytest.mark.parametrize("op", BRANCHES)
def test_branch(op):
    setup, taken = BRANCHES[op]
    code = f"{setup}\n s_mov_b32 s4, 7\n {op} away\n s_mov_b32 s4, 8\naway:\n s_add_u32 s4, s4, 100"
    values = np.arange(6, dtype=np.uint32) % 3
    assert execute("gfx942", code, {"s5": values}, "s4").tolist() == np.where(taken(values), 107, 108).tolist()


def test_divergent_lanes():
    """if (lane % 3 == 0) x += 1; else x += 2, by masks, as LLVM writes it; with the jump over an empty side."""
    code = """
      v_mul_u32_u24 v2, v1, 1
      v_cmp_eq_u32 vcc, 0, v3
      s_and_saveexec_b64 s[4:5], vcc
      s_xor_b64 s[4:5], exec, s[4:5]
      s_cbranch_execz other
      v_add_u32 v2, 1, v2
    other:
      s_andn2_saveexec_b64 s[4:5], s[4:5]
      s_cbranch_execz join
      v_add_u32 v2, 2, v2
    join:
      s_or_b64 exec, exec, s[4:5]
      v_add_u32 v2, 100, v2
    """
    values = np.arange(256, dtype=np.uint32)
    thirds = np.where(values < 128, values % 3, 1).astype(np.uint32)  # two waves without a lane on the first side
    result = execute("gfx942", code, {"v1": values, "v3": thirds}, "v2")
    assert np.array_equal(result, values + np.where(thirds == 0, 101, 102))


def test_lanes_that_leave_a_loop_one_by_one():
    """while (n) n--, count++ with n of its own in each lane."""
    code = """
      v_mov_b32 v2, 0
      s_mov_b64 s[4:5], exec
    again:
      v_cmp_ne_u32 vcc, 0, v1
      s_and_b64 exec, exec, vcc
      s_cbranch_execz out
      v_subrev_u32 v1, 1, v1
      v_add_u32 v2, 3, v2
      s_branch again
    out:
      s_mov_b64 exec, s[4:5]
    """
    counts = np.random.default_rng(0).integers(0, 20, 512).astype(np.uint32)
    assert np.array_equal(execute("gfx90a", code, {"v1": counts}, "v2"), counts * 3)


# --- workgroups, waves, barriers


def test_grid_of_three_dimensions():
    body = """
      s_load_dwordx2 s[8:9], s[0:1], 0x0
      s_mul_i32 s5, s4, 2
      s_add_u32 s5, s5, s3
      s_mul_i32 s5, s5, 3
      s_add_u32 s5, s5, s2
      v_mov_b32 v1, s5
      v_lshlrev_b32 v1, 2, v1
      v_mov_b32 v2, 1
      global_atomic_add v1, v2, s[8:9]
    """
    memory = gcnsim.Memory()
    place = memory.allocate(np.zeros(3 * 2 * 4, np.uint32))
    program = assemble("gfx942", body, 1)
    program.descriptor.update(system_sgpr_workgroup_id_y=1, system_sgpr_workgroup_id_z=1)
    gcnsim.run([gcnsim.Launch(program, (3, 2, 4), 1, [place])], memory)
    assert (memory.read(place, np.uint32, 24) == 64).all()


def test_launches_of_a_stream_run_one_after_another():
    """The first one takes long to store a 1, the second one adds 41, the third one doubles."""
    slow = """
      s_mov_b32 s4, 5000
    again:
      s_sub_u32 s4, s4, 1
      s_cmp_lg_u32 s4, 0
      s_cbranch_scc1 again
      v_mov_b32 v5, 1
    """
    change = "global_load_dword v5, v1, s[8:9]\n s_waitcnt vmcnt(0)\n"
    store = "\n global_store_dword v1, v5, s[8:9]"
    bodies = (slow + store, change + "v_add_u32 v5, 41, v5" + store, change + "v_add_u32 v5, v5, v5" + store)
    memory = gcnsim.Memory()
    ordered, alone = (memory.allocate(np.zeros(64, np.uint32)) for _ in range(2))
    programs = [assemble("gfx942", START.format(stride=256) + body, 1) for body in bodies]
    stream = [gcnsim.Launch(program, (1, 1, 1), 1, [ordered]) for program in programs]
    gcnsim.run([stream, gcnsim.Launch(programs[1], (1, 1, 1), 1, [alone])], memory)
    assert (memory.read(ordered, np.uint32, 64) == 84).all()
    assert (memory.read(alone, np.uint32, 64) == 41).all()


# Every wave writes its lanes' numbers to LDS, waits, and reads those of the next wave.
EXCHANGE = """
  v_lshlrev_b32 v2, 2, v0
  v_add_u32 v3, 1000, v0
  ds_write_b32 v2, v3
  {barrier}
  v_add_u32 v4, 256, v2
  v_and_b32 v4, 0x3ff, v4
  ds_read_b32 v5, v4
  global_store_dword v1, v5, s[8:9]
"""


@pytest.mark.parametrize("arch", ARCHS)
def test_barrier_and_exchange_through_lds(arch):
    result = run(arch, EXCHANGE.format(barrier="s_barrier"), 4, 5, np.zeros((5, 256), np.uint32), lds=1024)
    assert np.array_equal(result, np.tile(1000 + (np.arange(256) + 64) % 256, (5, 1)))


def test_more_workgroups_than_are_resident():
    body = EXCHANGE.format(barrier="s_barrier")
    result = run("gfx942", body, 4, 11, np.zeros((11, 256), np.uint32), lds=1024, resident_waves=8)
    assert np.array_equal(result, np.tile(1000 + (np.arange(256) + 64) % 256, (11, 1)))


def test_a_missing_barrier_is_a_race():
    with pytest.raises(gcnsim.LdsRace) as caught:
        run("gfx942", EXCHANGE.format(barrier="s_nop 0"), 4, 2, np.zeros((2, 256), np.uint32), lds=1024)
    assert caught.value.instruction == "ds_read_b32 v5, v4"
    assert "wave 0 of resident workgroup 0 reads byte 256 of LDS" in str(caught.value)
    assert "wave 1 wrote it" in str(caught.value)
    body = EXCHANGE.format(barrier="s_nop 0")
    run("gfx942", body, 4, 2, np.zeros((2, 256), np.uint32), lds=1024, detect_races=False)


RACES = {
    "write after another wave's read": (
        """
        ds_write_b32 v2, v3
        s_barrier
        ds_read_b32 v5, v4
        v_add_u32 v3, 1, v3
        ds_write_b32 v2, v3
        """,
        "wave 0 .* writes byte 0 .* wave 3 read it",
    ),
    "two waves write different values to one place": (
        "v_and_b32 v2, 0xff, v2\n ds_write_b32 v2, v3",
        "writes byte 0 .* wave . wrote it",
    ),
    "one byte of a neighbour's word": (
        """
        v_lshlrev_b32 v2, 1, v0
        ds_write_b16 v2, v3
        ds_read_u16 v5, v2
        v_and_b32 v2, 0x7c, v2
        ds_read_b32 v5, v2
        """,
        "reads byte 0",
    ),
    "a plain read of another wave's atomic": (
        """
        ds_write_b32 v2, v3
        s_barrier
        ds_add_u32 v2, v3
        ds_read_b32 v5, v4
        """,
        "reads byte .* changed it",
    ),
    "an atomic on what another wave wrote": (
        "ds_write_b32 v2, v3\n ds_add_u32 v4, v3",
        "changes atomically byte .* wrote it",
    ),
    "an atomic on what another wave read": (
        "ds_write_b32 v2, v3\n s_barrier\n ds_read_b32 v5, v4\n ds_add_u32 v2, v3",
        "changes atomically byte .* read it",
    ),
}
HARMLESS = {
    "the same value from every wave": """
        v_and_b32 v2, 0xfc, v2
        v_and_b32 v3, 63, v0
        ds_write_b32 v2, v3
        ds_read_b32 v5, v2
        ds_write_b32 v2, v3
        """,
    "one's own bytes": "ds_write_b32 v2, v3\n ds_read_b32 v5, v2\n ds_write_b32 v2, v5",
    "bytes that are neighbours": "ds_write_b8 v0, v0\n ds_read_u8 v5, v0",
    "reads of the same place": """
        ds_write_b32 v2, v3
        s_barrier
        v_mov_b32 v2, 0
        ds_read_b32 v5, v2
        ds_read_b128 v[8:11], v2
        """,
    "atomics of every wave": """
        ds_write_b32 v2, v3
        s_barrier
        v_mov_b32 v2, 0
        ds_add_u32 v2, v3
        s_barrier
        ds_read_b32 v5, v2
        """,
    "a barrier between any two": """
        ds_write_b32 v2, v3
        s_barrier
        ds_read_b32 v5, v4
        s_barrier
        ds_write_b32 v2, v0
        s_barrier
        ds_read_b32 v5, v4
        """,
}
RACE_START = "v_lshlrev_b32 v2, 2, v0\n v_add_u32 v3, 1000, v0\n v_add_u32 v4, 256, v2\n v_and_b32 v4, 0x3ff, v4\n"


@pytest.mark.parametrize("name", RACES)
def test_races(name):
    code, message = RACES[name]
    with pytest.raises(gcnsim.LdsRace, match=message):
        run("gfx942", RACE_START + code, 4, 1, np.zeros(4, np.uint32), lds=1024)


def test_a_barrier_is_its_own_workgroups():
    """What the waves of another one have done stays in mind."""
    races, place = RaceDetector(workgroups=2, size=16), np.array([16])
    old, new = np.zeros((1, 4), np.uint8), np.ones((1, 4), np.uint8)
    races.write(np.array([0]), place, old, new, new)
    races.barrier(np.array([0]))
    with pytest.raises(gcnsim.LdsRace, match="wave 1 of resident workgroup 1 reads byte 0 .* wave 0 wrote it"):
        races.read(np.array([1]), place, 4)
    races.barrier(np.array([1]))
    races.read(np.array([1]), place, 4)


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_no_race(name):
    run("gfx942", RACE_START + HARMLESS[name], 4, 2, np.zeros(4, np.uint32), lds=1024)


def test_waves_that_ended_are_not_waited_for():
    body = """
      s_cmp_eq_u32 s3, 1
      s_cbranch_scc1 leave
      s_barrier
      v_mov_b32 v5, 5
      global_store_dword v1, v5, s[8:9]
    leave:
      s_endpgm
    """
    result = run("gfx942", body, 3, 2, np.zeros((2, 3, 64), np.uint32))
    assert np.array_equal(result[:, :, 0], [[5, 0, 5], [5, 0, 5]])


def test_waves_may_wait_at_different_barriers():
    """The hardware counts arrivals, whichever s_barrier they come from."""
    body = """
      s_and_b32 s4, s3, 1
      s_cmp_eq_u32 s4, 0
      s_cbranch_scc1 even
      s_barrier
      s_branch join
    even:
      s_barrier
    join:
      v_mov_b32 v5, s3
      global_store_dword v1, v5, s[8:9]
    """
    assert np.array_equal(run("gfx942", body, 4, 1, np.zeros((4, 64), np.uint32))[:, 0], range(4))


# --- deadlocks


def test_a_barrier_that_a_wave_never_reaches():
    body = """
      s_cmp_eq_u32 s3, 1
    forever:
      s_cbranch_scc1 forever
      s_barrier
    """
    with pytest.raises(gcnsim.Deadlock) as caught:
        run("gfx942", body, 2, 1, np.zeros(4, np.uint32))
    message = str(caught.value)
    assert "workgroup (0, 0, 0) wave [0] waits at" in message and "s_barrier" in message
    assert "workgroup (0, 0, 0) wave [1] runs at" in message and "s_cbranch_scc1 forever" in message


def test_work_without_end_is_found_although_it_writes():
    """A loop that stores the same value again and again changes nothing."""
    body = "v_mov_b32 v5, 1\nforever:\n global_store_dword v1, v5, s[8:9]\n s_branch forever"
    with pytest.raises(gcnsim.Deadlock, match="the same instructions again and again"):
        run("gfx942", body, 1, 1, np.zeros(64, np.uint32))


def test_a_loop_that_counts_without_end_has_a_limit():
    body = "forever:\n s_add_u32 s20, s20, 1\n s_branch forever"
    with pytest.raises(gcnsim.Deadlock, match="no change of memory in 5... straight pieces"):
        run("gfx942", body, 1, 1, np.zeros(64, np.uint32), max_idle_runs=5000)


def test_long_work_without_a_change_of_memory_is_no_deadlock():
    """Every wave counts to a number of its own, so that they part, for 40 000 pieces of code."""
    code = """
      s_mov_b32 s4, 0
    again:
      s_add_u32 s4, s4, 1
      s_cmp_lt_u32 s4, s5
      s_cbranch_scc1 again
    """
    turns = np.arange(40, dtype=np.uint32) * 1000 + 1
    assert execute("gfx942", code, {"s5": turns}, "s4").tolist() == turns.tolist()


# --- several launches

# Each rank stores its value at the other's place, raises the other's flag, and waits for its own: arguments are its
# own array, the other's array, and its number.
SWAP = """
  s_load_dwordx4 s[8:11], s[0:1], 0x0
  s_load_dword s12, s[0:1], 0x10
  v_lshlrev_b32 v1, 2, v0
  v_mov_b32 v2, s12
  v_mov_b32 v3, 0
  global_store_dword v1, v2, s[10:11] offset:256
  s_mov_b64 exec, 1
  {signal}
wait:
  v_mov_b32 v4, 0
  global_atomic_add v4, v3, v4, s[8:9] sc0 sc1
  s_waitcnt vmcnt(0)
  v_readfirstlane_b32 s13, v4
  s_cmp_eq_u32 s13, 0
  s_cbranch_scc1 wait
  s_mov_b64 exec, -1
  global_load_dword v5, v1, s[8:9] offset:256
  v_add_u32 v5, 100, v5
  global_store_dword v1, v5, s[8:9] offset:512
"""
SIGNAL = "v_mov_b32 v4, 1\n global_atomic_swap v3, v4, s[10:11]"


def ranks(arch, bodies):
    memory = gcnsim.Memory()
    places = [memory.allocate(np.zeros(192, np.uint32), f"rank {n}") for n in range(len(bodies))]
    launches = []
    for rank, body in enumerate(bodies):
        program = assemble(arch, body, 3)
        other = places[(rank + 1) % len(places)]
        launches.append(gcnsim.Launch(program, (1, 1, 1), 1, [places[rank], other, rank + 1], name=f"rank {rank}"))
    gcnsim.run(launches, memory)
    return [memory.read(place, np.uint32, 192)[128:] for place in places]


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_ranks_that_wait_for_each_other(arch):
    results = ranks(arch, [SWAP.format(signal=SIGNAL)] * 4)
    assert [set(result.tolist()) for result in results] == [{104}, {101}, {102}, {103}]


def test_a_rank_that_never_signals():
    """The one it should have woken hangs, and is named with the line at which it spins."""
    with pytest.raises(gcnsim.Deadlock) as caught:
        ranks("gfx942", [SWAP.format(signal=SIGNAL), SWAP.format(signal="s_nop 0")])
    message = str(caught.value)
    assert "rank 0: workgroup (0, 0, 0) wave [0] runs at assembly line" in message
    assert "rank 1:" not in message


def test_a_missing_wait_between_ranks_reads_what_nobody_wrote():
    """Rank 0 reads at once what rank 1 writes later: without its wait it finds memory that nobody wrote."""
    memory = gcnsim.Memory()
    room = memory.allocate_empty(256, "exchange")
    reader = assemble("gfx942", START.format(stride=0) + "global_load_dword v5, v1, s[8:9]\n", 2)
    writer = assemble("gfx942", START.format(stride=0) + "global_store_dword v1, v1, s[8:9]\n", 2)
    launches = [gcnsim.Launch(program, (1, 1, 1), 1, [room, 0]) for program in (reader, writer)]
    with pytest.raises(gcnsim.UninitializedRead, match="nobody wrote: byte 0 of 'exchange'"):
        gcnsim.run(launches, memory)
    gcnsim.run(launches[::-1], memory)
