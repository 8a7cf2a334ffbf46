# SPDX-License-Identifier: Apache-2.0
"""The order in which Hopper's kernels take tiles, in plain Python: Gluon has no interpreter."""

import inspect
import textwrap
from collections.abc import Callable
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")


def python(
    *functions: str, programs: int | tuple[int, ...] = 0, program: int | tuple[int, ...] = 0,
    load: Callable[..., int] | None = None, **stand_ins: Callable[..., Any]
) -> list[Callable[..., Any]]:  # fmt: skip
    """Functions of the kernels, as one of so many programs runs them, in a grid of one dimension or of several; with
    `stand_ins` for what they call."""
    from llm_quant_rocm.kernels import cluster, hopper, nvfp4_wgmma, nvfp4_wgmma_large, nvfp4_wgmma_split, wgmma_parts

    modules = (nvfp4_wgmma_large, nvfp4_wgmma_split, nvfp4_wgmma, cluster, wgmma_parts, hopper)
    grid, at = ((each,) if isinstance(each, int) else each for each in (programs, program))
    gl = SimpleNamespace(
        minimum=min,
        maximum=max,
        where=lambda here, a, b: a if here else b,
        cdiv=lambda a, b: -(-a // b),
        num_programs=lambda axis: grid[axis],
        program_id=lambda axis: at[axis],
        cast=lambda number, dtype: number,
        uint32=None,
        int32=None,
        load=load,
        constexpr=int,
        static_range=range,
    )
    names: dict[str, Any] = {"gl": gl, **stand_ins}
    names |= {name: getattr(cluster, name).value for name in ("_BARRIERS", "_EIGHT_COLUMNS")}
    for name in functions:
        function = next(getattr(module, name) for module in modules if hasattr(module, name))
        exec(textwrap.dedent(inspect.getsource(function.fn)).replace("@gluon.jit\n", ""), names)
    return [names[name] for name in functions]


@pytest.mark.parametrize("stages", [3, 4, 6])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_ring_goes_on_and_back(stages: int, steps: int) -> None:
    advance, behind = python("advance", "behind")
    places = [(step % stages, step // stages & 1) for step in range(5 * stages)]
    for here, there in zip(places, places[steps:], strict=False):
        assert advance(*here, stages, steps) == there
        assert behind(there[0], stages, steps) == here[0]


@pytest.mark.parametrize("tiles_n", [1, 2, 17, 33])
@pytest.mark.parametrize("tiles_m", [1, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("size", [4, 1, 8], ids=lambda size: f"group_of_{size}")
def test_every_tile_once_and_a_few_tiles_of_m_at_a_time(size: int, tiles_m: int, tiles_n: int) -> None:
    (place,) = python("place")
    placed = [place(tile, tiles_m, tiles_n, size) for tile in range(tiles_m * tiles_n)]
    assert sorted(placed) == [(m, n) for m in range(tiles_m) for n in range(tiles_n)]
    groups = [m // size for m, _ in placed]
    assert groups == sorted(groups)
    for group in set(groups):
        columns = [n for m, n in placed if m // size == group]
        assert columns == sorted(columns), "programs that run together share a tile of the weight"


@pytest.mark.parametrize("tiles_n", [1, 2, 17])
@pytest.mark.parametrize("tiles_m", [1, 3, 4, 5, 8, 10, 11])
@pytest.mark.parametrize("size", [4, 1, 8], ids=lambda size: f"group_of_{size}")
def test_a_tiles_place_is_found_without_divisions(size: int, tiles_m: int, tiles_n: int) -> None:
    """From the place of the tile before, or by the grid: in the same order where groups are whole."""
    from llm_quant_rocm.kernels.hopper import grid_of_tiles

    place, place_after = python("place", "place_after")
    placed = [place(tile, tiles_m, tiles_n, size) for tile in range(tiles_m * tiles_n)]
    for before, after in pairwise(placed):
        assert place_after(*before, tiles_m, tiles_n, size) == after
    grid = grid_of_tiles(tiles_m, tiles_n, size)
    # As a GPU begins them, the first dimension fastest.
    programs = [tuple(reversed(program)) for program in product(*map(range, reversed(grid)))]
    found = [python("_own_tile", programs=grid, program=program)[0]() for program in programs]
    inside = [(tile_m, tile_n) for tile_m, tile_n in found if tile_m < tiles_m]
    assert sorted(inside) == sorted(placed)
    assert grid[0] <= size and len(found) - len(inside) < grid[2] * tiles_n
    if tiles_m <= size or tiles_m % size == 0:
        assert found == placed


@pytest.mark.parametrize("experts", [True, False], ids=["experts", "dense"])
@pytest.mark.parametrize("programs", [1, 3, 8, 64])
@pytest.mark.parametrize(
    ("tiles_m", "tiles_n", "tile_groups"), [(1, 1, 5), (1, 7, 1), (3, 2, 2), (8, 3, 3), (11, 2, 1)], ids=str
)
def test_programs_go_through_all_groups_of_steps_in_order(
    tiles_m: int, tiles_n: int, tile_groups: int, programs: int, experts: bool
) -> None:
    groups = tiles_m * tiles_n * tile_groups
    n = 100 * tiles_n - 1
    tile_expert = [10 + tile_m for tile_m in range(tiles_m)]
    (place,) = python("place")
    taken = []
    for program in range(min(programs, groups)):
        asked: list[tuple[int, int]] = []
        names = ("begin_of", "place", "place_after", "_share", "expert_of", "ask_for_scales", "_next_group")
        *_, share, expert_of, ask_for_scales, next_group = python(
            *names, programs=programs, program=program, prefetch=lambda *scales, asked=asked: asked.append(scales),
            load=lambda at, mask, other: tile_expert[at] if mask else other,
        )  # fmt: skip
        begin, end, group, tile_m, tile_n = share(tiles_m, tiles_n, tile_groups)
        expert = expert_of(0 if experts else None, tile_m, True)
        if experts:
            ask_for_scales(0, expert, tile_n, n, 100, True)
        at = (group, tile_m, tile_n, expert)
        mine = []
        for index in range(begin, end):
            mine.append(at)
            sizes = (tiles_m, tiles_n, tile_groups, 0 if experts else None, 0, n, 100)
            assert next_group(*at, *sizes, False, True) == (at[0] + 1, *at[1:]), "of its own tile alone"
            at = next_group(*at, *sizes, True, index + 1 < end)
        places = dict.fromkeys((tile_m, tile_n) for _, tile_m, tile_n, _ in mine)
        scales = [(tile_expert[m] * n + tile_n * 100, min(n - tile_n * 100, 100) * 4) for m, tile_n in places]
        assert [each for each in asked if each[1]] == (scales if experts else [])
        taken += mine
    expected = [(index % tile_groups, *place(index // tile_groups, tiles_m, tiles_n)) for index in range(groups)]
    assert taken == [(group, m, tile_n, tile_expert[m] if experts else 0) for group, m, tile_n in expected]


@pytest.mark.parametrize("tile_groups", [1, 3, 28])
@pytest.mark.parametrize("tiles", [0, 1, 7, 8, 9, 100])
@pytest.mark.parametrize("programs", [1, 8, 64])
def test_tiles_are_shared_evenly_and_their_flags_are_their_own(programs: int, tiles: int, tile_groups: int) -> None:
    """Also where routing leaves fewer groups of steps than there are programs."""
    begin_of, program_at = python("begin_of", "_program_at", programs=programs)
    groups = tiles * tile_groups
    begins = [begin_of(program, groups) for program in range(programs + 1)]
    lengths = [end - begin for begin, end in pairwise(begins)]
    assert (begins[0], begins[-1]) == (0, groups) and max(lengths) - min(lengths) <= 1
    owners = [program for program, length in enumerate(lengths) for _ in range(length)]
    assert [program_at(group, groups) for group in range(groups)] == owners
    stretches = [(owners[first], owners[first + tile_groups - 1]) for first in range(0, groups, tile_groups)]
    shared = [first for first, last in stretches if first != last]
    assert len(set(shared)) == len(shared), "two tiles would count on one flag"


# Tiles, groups of steps in each, tiles that are not cut, programs, and programs that share each tile.
CUTS = [
    (20, 5, 20, 8, 0), (20, 5, 16, 8, 0), (20, 5, 8, 8, 0), (3, 5, 0, 8, 0), (3, 1, 0, 8, 0), (3, 5, 3, 8, 0),
    (4, 7, 0, 8, 2), (2, 8, 0, 6, 3), (1, 8, 0, 8, 8), (5, 17, 0, 30, 6),
]  # fmt: skip


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_programs_together_take_every_step_once(cut: tuple[int, int, int, int, int]) -> None:
    """Where tiles are shared, each program has a part of one, and its neighbours have the others in their order. What
    is compiled for whole tiles only does as the rest would."""
    tiles, tile_groups, whole, programs, shares = cut
    for some_cut in {True, whole < tiles}:
        taken = []
        for program in range(programs):
            _, pieces, piece = python("begin_of", "program_pieces", "piece_at", programs=programs, program=program)
            begin, end, count = pieces(tiles, whole, tile_groups, some_cut, shares)
            found = [piece(index, begin, end, whole, tile_groups, some_cut) for index in range(count)]
            if shares:
                assert [tile for tile, _, _ in found] == [program // shares]
            taken += [(tile, group) for tile, first, last in found for group in range(first, last)]
        assert sorted(taken) == [(tile, group) for tile in range(tiles) for group in range(tile_groups)]
        if shares:
            assert taken == sorted(taken)


@pytest.mark.parametrize("shares", [0, 2, 3])
@pytest.mark.parametrize("tail", [64, 128])
def test_lower_tiles_take_every_row_and_step_of_the_last_wave_once(tail: int, shares: int) -> None:
    tiles_m, tiles_n, whole, programs, rows, tile_groups = 5, 7, 32, 40, 256, 7
    (place,) = python("place")
    taken = []
    for program in range(programs):
        _, tail_of_program = python("place", "program_tail", programs=programs, program=program)
        mine = tail_of_program(tiles_m, tiles_n, whole, tile_groups, rows, tail, shares)
        tile_m, tile_n, number, first, last = mine
        taken += [(tile_m, tile_n, number, group) for group in range(first, last)]
    order = [place(tile, tiles_m, tiles_n) for tile in range(tiles_m * tiles_n)]
    for column in range(tiles_n):
        assert [m for m, n in order if n == column] == list(range(tiles_m)), (
            "a whole tile would begin within a shared one"
        )
    tiles = order[whole:]
    parts = product(tiles, range(0, rows, tail), range(tile_groups))
    assert taken == [(*tile, number, group) for tile, number, group in parts]


@pytest.mark.parametrize(
    ("shape", "tail_m", "shares", "tail", "shared"),
    [
        # 160 tiles: 28 beyond a wave, which have 112 parts of 64 rows, or 56 of 128, of two programs each.
        ((1024, 5120), 64, 0, 64, 0),
        ((1024, 5120), 64, 2, 64, 0),
        ((1024, 5120), 128, 2, 128, 2),
        ((1024, 5120), 128, 3, 128, 0),
        # 4 beyond a wave, which have 16 parts of 64 rows; more programs than there are groups of steps.
        ((2048, 2112), 64, 8, 64, 8),
        ((2048, 2112), 64, 9, 64, 0),
        # 56 beyond two waves, and 68 beyond one.
        ((2048, 5120), 64, 0, 0, 0),
        ((2048, 5120), 128, 0, 128, 0),
        ((1280, 5120), 128, 0, 0, 0),
        # Fewer than a wave, whole waves, a tile beyond x, and results that are not lines of 16 bytes.
        ((768, 5120), 64, 0, 0, 0),
        ((3072, 5632), 64, 0, 0, 0),
        ((200, 17000), 64, 0, 0, 0),
        ((1024, 5118), 64, 0, 0, 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("fp8", [False, True], ids=["16 bits", "FP8"])
def test_the_last_wave_has_lower_tiles_where_they_run_together(
    fp8: bool, shape: tuple[int, int], tail_m: int, shares: int, tail: int, shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from llm_quant_rocm import hardware
    from llm_quant_rocm.kernels import nvfp4_wgmma_large, nvfp4_wgmma_large_tiles

    launches = launches_of(nvfp4_wgmma_large, monkeypatch)
    (m, n), k = shape, 4096 if fp8 else 2048
    x, out = torch.zeros(m, k, dtype=torch.bfloat16), torch.zeros(m, n, dtype=torch.bfloat16)
    weight = torch.zeros(64, 1072, 128, dtype=torch.int32), torch.zeros(64, 1072, 64, dtype=torch.uint8), x, None
    hopper, config = hardware.nvidia(9, 0), nvfp4_wgmma_large_tiles.Config(256, 128, 0, shares, tail_m)
    if fp8:
        nvfp4_wgmma_large.gemm_large_fp8(x.to(torch.float8_e4m3fn), x, *weight, out, hopper, config)
    else:
        nvfp4_wgmma_large.gemm_large(x, *weight, n, hopper, config, out=out)
    ((arguments, options),) = launches
    tail_x, stored, shared_out, parts, whole = arguments[1], *arguments[7:10], arguments[-1]
    assert (options["TAIL"], options["SHARES"]) == (tail, shared)
    assert bool(options["STORES"]) == (stored is not out) == (n % 8 == 0)
    assert shared_out is (out if shared else None)
    assert (None if parts is None else parts.shape) == ((132, 128, tail) if shared else None)
    tiles = -(-m // 256) * -(-n // 128)
    assert whole == (tiles // 132 * 132 if tail else tiles)
    assert (tail_x is None) == (not tail)
    if tail:
        assert tail_x.block_shape[0] * tail_x.block_shape[1] == tail


@pytest.mark.parametrize(
    ("tile", "m", "shares", "programs"),
    [((256, 128), 256, 2, 80), ((256, 128), 512, 3, 80), ((320, 128), 300, 3, 120), ((128, 256), 128, 6, 120)],
    ids=str,
)
def test_where_there_is_no_whole_wave_programs_share_all_tiles(
    tile: tuple[int, int], m: int, shares: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as run together; else (80 tiles, three each) steps are shared out evenly."""
    import torch

    from llm_quant_rocm import hardware
    from llm_quant_rocm.kernels import nvfp4_wgmma_large, nvfp4_wgmma_large_tiles

    launches = launches_of(nvfp4_wgmma_large, monkeypatch)
    x = torch.zeros(m, 2048, dtype=torch.bfloat16)
    weight = torch.zeros(32, 320, 128, dtype=torch.int32), torch.zeros(32, 320, 64, dtype=torch.uint8), x, None
    config = nvfp4_wgmma_large_tiles.Config(*tile, 0, shares)
    nvfp4_wgmma_large.gemm_large(x, *weight, 5120, hardware.nvidia(9, 0), config)
    ((arguments, options),) = launches
    fits = -(-m // tile[0]) * (5120 // tile[1]) * shares <= 132
    assert (options["SHARES"], options["TAIL"]) == (shares if fits else 0, 0)
    assert options["grid"] == ((programs if fits else 132),)
    assert arguments[-1] == (0 if fits else 80)
    assert (None if arguments[9] is None else arguments[9].shape) == ((programs, *tile[::-1]) if fits else None)


@pytest.mark.parametrize("shares", [0, 2])
def test_experts_have_whole_tiles_alone(shares: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from llm_quant_rocm import hardware
    from llm_quant_rocm.kernels import nvfp4_wgmma, nvfp4_wgmma_large, nvfp4_wgmma_large_tiles

    launches = launches_of(nvfp4_wgmma_large, monkeypatch)
    x = torch.zeros(1024, 256, dtype=torch.bfloat16)
    weight = torch.zeros(4, 320, 128, dtype=torch.int32), torch.zeros(4, 320, 64, dtype=torch.uint8), x, None
    config = nvfp4_wgmma_large_tiles.Config(256, 128, 0, shares, tail_m=128)
    routed = nvfp4_wgmma.Routed(*(torch.zeros(4, dtype=torch.int32) for _ in range(3)))
    nvfp4_wgmma_large.gemm_large(x, *weight, 5120, hardware.nvidia(9, 0), config, routed)
    ((arguments, options),) = launches
    assert arguments[1] is None and options["TAIL"] == options["SHARES"] == 0 and arguments[-1] == 160


@pytest.mark.parametrize("split_k", [4, 2])
@pytest.mark.parametrize("programs", [1, 3, 8, 20])
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(0, 640, 1000), (1, 64, 128), (5, 640, 1000), (40, 333, 768), (17, 2000, 130)], ids=str
)
def test_consumers_take_every_step_once_in_the_producers_order(
    m: int, n: int, k: int, experts: bool, programs: int, split_k: int
) -> None:
    """Also where no expert has a row."""
    block_m, block_n = 8, 256 // split_k
    tiles_m, tiles_n, tile_steps = -(-m // block_m), -(-n // block_n), -(-k // 128)
    tile_expert = [10 + tile_m for tile_m in range(tiles_m)]
    everything = []
    for program in range(min(programs, max(tiles_m, 1) * tiles_n * tile_steps)):
        names = (
            "place", "begin_of", "quick_place", "program_stretch", "expert_of", "first_piece_of", "next_step",
            "turns_in_tile",
        )  # fmt: skip
        place, _, _, stretch, _, piece_of, next_step, turns = python(
            *names, programs=programs, program=program, load=lambda at, mask, other: tile_expert[at] if mask else other
        )
        found = stretch(tiles_m, n, k, block_n, 128, True)
        assert found[:2] == (tiles_n, tile_steps)
        begin, end, first_tile = found[2:]
        at = ()
        if begin < end:
            tile_m, tile_n = place(first_tile, tiles_m, tiles_n)
            piece = piece_of(tile_expert[tile_m], k) if experts else 0
            at = (begin - first_tile * tile_steps, tile_m, tile_n, first_tile, piece)
        filled = []
        for _ in range(begin, end):
            filled.append(at)
            at = next_step(*at, tile_steps, tiles_m, tiles_n, 0 if experts else None, k, True)
        assert all((tile_m, tile_n) == place(tile, tiles_m, tiles_n) for _, tile_m, tile_n, tile, _ in filled)
        assert [tile * tile_steps + step for step, _, _, tile, _ in filled] == list(range(begin, end))
        assert all(
            piece == (tile_expert[tile_m] * -(-k // 128) * 2 if experts else 0) for _, tile_m, *_, piece in filled
        )
        for mine in range(split_k):
            taken = 0
            for tile in range(first_tile, -(-end // tile_steps)):
                first, last = turns(tile, tile_steps, begin, end, mine, split_k)
                assert first == taken, "a consumer's turns go on from tile to tile, as its stages of the ring do"
                taken = last
                everything += [(tile, mine + turn * split_k + begin) for turn in range(first, last)]
                assert all(filled[mine + turn * split_k][3] == tile for turn in range(first, last))
    steps = range(tiles_m * tiles_n * tile_steps)
    if programs <= len(steps):
        assert sorted(everything) == [(step // tile_steps, step) for step in steps]


@pytest.mark.parametrize("programs", [1, 2, 3, 4])
@pytest.mark.parametrize("k", [16, 128, 600, 2048, 7168])
def test_the_programs_of_a_cluster_share_the_steps_of_their_tile(k: int, programs: int) -> None:
    tiles_n, steps = 5, -(-k // 128)
    shares = []
    for program in range(2 * tiles_n * programs):
        _, stretch = python("begin_of", "program_stretch", program=program)
        *sizes, begin, end, tile = stretch(2, 64 * tiles_n, k, 64, 128, False, programs)
        assert sizes == [tiles_n, steps] and tile == program // programs
        shares.append(range(begin, end))
    assert [step for share in shares for step in share] == list(range(2 * tiles_n * steps))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


class Columns(list[int]):
    """Stands for a tensor of 64 rows: a number for each of its columns."""

    type = SimpleNamespace(layout=None)

    @property
    def shape(self) -> tuple[int, int]:
        return 64, len(self)


@pytest.mark.parametrize("programs", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("columns", [64, 128, 256])
def test_each_column_of_a_shared_tile_is_added_once_of_all_programs(columns: int, programs: int) -> None:
    from llm_quant_rocm.kernels.wgmma_parts import piece_columns

    memory: dict[int, int] = {}

    def store(values: Columns, at: int) -> None:
        for i, value in enumerate(values):
            assert memory.setdefault(at + i * 64, value) == value, "parts do not overlap"

    give, take = python(
        "give_pieces", "take_pieces", piece_columns=piece_columns.fn, acc_layout_of=lambda columns, fp8: None,
        columns_of=lambda acc, width, number, layout: Columns(acc[number * width :][:width]), store_part=store,
        add_part=lambda acc, at, layout: Columns(value + memory[at + i * 64] for i, value in enumerate(acc)),
    )  # fmt: skip
    size, apart = 64 * columns, 3 * 64 * columns
    # A digit of a number for each program, so that a sum says which programs' it has.
    sums = [Columns(10**program for _ in range(columns)) for program in range(programs)]
    mine = [give(sums[rank], rank * apart, rank, programs, False) for rank in range(programs)]
    assert all(at % apart < size for at in memory), "a part has room for a consumer's sum"
    piece = piece_columns(columns, programs)
    assert columns // piece <= programs and piece * programs < 2 * columns, "as even as powers of two can be"
    for rank in range(columns // piece):
        assert take(mine[rank], 0, rank, apart, programs) == [int("1" * programs)] * piece


@pytest.mark.parametrize("programs", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("block", [64, 128, 160, 192, 256, 288, 320])
def test_each_row_of_shared_tiles_is_stored_once(block: int, programs: int) -> None:
    """Whose sums, added by several programs, need not have the same bits."""
    from llm_quant_rocm.kernels.hopper import main_part, tile_and_rest
    from llm_quant_rocm.kernels.wgmma_parts import piece_columns

    first_row, row_in_tile, first_own_row = python("first_row", "row_in_tile", "first_own_row", main_rows=main_part)
    row_in_tile.__globals__["first_row"] = first_row
    for m in range(1, 3 * block):
        height, rest = tile_and_rest(block, m)
        main = height - rest
        parts = [(0, main), (main, rest)] if rest else [(0, main)]
        stored = []
        for tile_m in range(-(-m // height)):
            for begin, columns in parts:
                piece = piece_columns(columns, programs)
                for number in range(begin, begin + columns, piece):
                    row, least = (of(tile_m, number, m, height) for of in (row_in_tile, first_own_row))
                    stored += [each for each in range(row, row + piece) if least <= each < m]
        assert stored == list(range(m))


@pytest.mark.parametrize("programs", [2, 3, 4])
@pytest.mark.parametrize("columns", [8, 16, 32, 64])
def test_what_comes_to_an_inbox_has_room_of_its_own(columns: int, programs: int) -> None:
    from llm_quant_rocm.kernels.cluster import MOST_INBOX_BYTES, inbox_bytes
    from llm_quant_rocm.kernels.wgmma_parts import piece_columns

    (slot,) = python("_slot")
    piece = piece_columns(columns, programs)
    assert piece * programs >= columns, "programs add all columns"
    for adder in range(columns // piece):
        senders = [sender for sender in range(programs) if sender != adder]
        begins = sorted(
            slot(1000, sender, adder, consumer, piece, programs) for sender in senders for consumer in range(4)
        )
        assert begins[0] >= 1000 + 4 * 8, "the barriers come first"
        assert all(there - here >= piece * 64 * 4 for here, there in pairwise(begins))
        assert begins[-1] + piece * 64 * 4 <= 1000 + inbox_bytes(4, columns, programs)
        assert columns == 64 or inbox_bytes(4, columns, programs) <= 48 * 1024 == MOST_INBOX_BYTES
        assert inbox_bytes(4, columns, programs) % 1024 == 0, "swizzled tiles come after it"
        # What is read where the program's own is, and not used, is the inbox, too.
        assert slot(1000, adder, adder, 3, piece, programs) in begins


def launches_of(module: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    """What a module's kernel is launched with from now on, on an H100's multiprocessors: arguments, and options with
    the grid."""
    from llm_quant_rocm.kernels import flags

    launches: list[tuple[Any, dict[str, Any]]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *arguments, **options: launches.append((arguments, options | {"grid": grid}))

    monkeypatch.setattr(module, f"{module.__name__.rpartition('.')[2]}_kernel", Kernel())
    monkeypatch.setattr(module, "_plan", module._plan.__wrapped__)  # those that are kept have the real kernel
    monkeypatch.setattr(module, "multiprocessors", lambda device: 132, raising=False)
    monkeypatch.setattr(flags, "flags_of", lambda device: None)
    return launches


@pytest.mark.parametrize("m", [1, 8, 9, 33, 100])
def test_a_program_for_each_tile_or_no_more_than_share_their_groups(m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from llm_quant_rocm import hardware
    from llm_quant_rocm.kernels import nvfp4_wgmma

    launches = launches_of(nvfp4_wgmma, monkeypatch)
    x = torch.zeros(m, 1024, dtype=torch.bfloat16, device="cpu")
    words = torch.zeros(16, 32, 128, dtype=torch.int32, device="cpu")
    scales = torch.zeros(16, 32, 64, dtype=torch.uint8, device="cpu")
    tiles_m, tiles_n, groups = -(-m // 8), 8, 4
    for programs in (0, 5, 528):
        config = nvfp4_wgmma.Config(8, 64, 128, programs)
        nvfp4_wgmma.gemm(x, words, scales, x, None, 500, hardware.nvidia(9, 0), config)
        arguments, options = launches.pop()
        parts, grid = arguments[6], options["grid"]
        if programs:
            assert grid == (min(programs, tiles_m * tiles_n * groups), 1, 1) and parts.shape == (grid[0], 2, 8, 64)
        else:
            assert grid[0] * grid[2] >= tiles_m and grid[1] == tiles_n and parts is None


@pytest.mark.parametrize("m", [1, 16, 32, 64, 80, 128])
def test_a_stage_of_the_ring_is_one_consumers(m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another consumer could come a whole round too early, and a barrier would not tell it."""
    import torch

    from llm_quant_rocm import hardware
    from llm_quant_rocm.kernels import nvfp4_wgmma_split, nvfp4_wgmma_split_tiles

    launches = launches_of(nvfp4_wgmma_split, monkeypatch)
    x = torch.zeros(m, 1024, dtype=torch.bfloat16, device="cpu")
    words = torch.zeros(16, 8, 128, dtype=torch.int32, device="cpu")
    scales = torch.zeros(16, 8, 64, dtype=torch.uint8, device="cpu")
    tiles = nvfp4_wgmma_split_tiles
    shared = tiles.cluster_configs(m) + tiles.shared_configs(m, 10240)
    configs = tiles.configs(m) + shared
    for config in configs:
        nvfp4_wgmma_split.gemm_split(x, words, scales, x, None, 128, hardware.nvidia(9, 0), config)
    for config, (_, options) in zip(configs, launches, strict=True):
        assert options["STAGES"] > 0 and options["STAGES"] % options["SPLIT_K"] == 0
        assert 0 < options["EAGER"] <= options["STAGES"]
        # With the ring there is room for an inbox, for sums beside it, and for 3 KB that Triton takes and 1 KB that
        # CUDA does of each program.
        stage = options["DEPTH"] * 64 * (options["BLOCK_M"] * 2 + options["BLOCK_N"] * 9 // 16)
        sums = (config.split_k - 1) * options["BLOCK_M"] * options["BLOCK_N"] * 4 * bool(config.programs)
        used = options["STAGES"] * stage + config.inbox_bytes + sums + 4 * 1024
        two = config.consumers == 2 or (config.block_m == 8 and not 0 < config.programs <= 132)
        assert used <= 228 * 1024 // (2 if two else 1)


@pytest.mark.parametrize(
    ("block_m", "asked", "consumers", "most"),
    [(64, 1000, 4, 132), (64, 1000, 2, 264), (8, 1000, 4, 264), (8, 140, 4, 140), (8, 132, 4, 132), (8, 1000, 2, 264)],
)
def test_as_many_programs_share_tiles_as_run_together(
    block_m: int, asked: int, consumers: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One waits for what another adds. Half of the consumers leave room for another program on a multiprocessor, and so
    do four with 8 rows, unless they are few enough to have one each."""
    import torch

    from llm_quant_rocm import hardware
    from llm_quant_rocm.kernels import nvfp4_wgmma_split

    launches = launches_of(nvfp4_wgmma_split, monkeypatch)
    x, words = torch.zeros(40, 1024, dtype=torch.bfloat16), torch.zeros(16, 640, 128, dtype=torch.int32)
    scales = torch.zeros(16, 640, 64, dtype=torch.uint8)
    config = nvfp4_wgmma_split.Config(block_m, 2, asked, consumers)
    nvfp4_wgmma_split.gemm_split(x, words, scales, x, None, 10240, hardware.nvidia(9, 0), config)
    ((_, options),) = launches
    assert options["grid"] == (most,)
    assert (options.get("maxnreg") is None) == (most == 132)


@pytest.mark.parametrize(
    ("fields", "k", "columns"),
    [
        # A consumer has 24 of 96 steps of 128 columns, or 23.75 of 95; of two programs' half as many.
        ((8, 4), 12288, 256),
        ((8, 4), 12160, 128),
        ((8, 2), 6144, 256),
        ((8, 4, 0, 4, 2), 12288, 128),
        ((8, 4, 0, 4, 2), 24576, 256),
        # Of 80 tiles of 128 steps a program of 264 has 38.8, and a consumer half of them; of 133 they have twice that.
        ((8, 2, 264), 16384, 128),
        ((8, 2, 133), 16384, 256),
        ((8, 2, 1, 2), 1024, 256),
        # Others multiply together, for which a step's values are all decoded before.
        ((16, 4), 12288, 128),
        ((128, 4), 12288, 64),
    ],
    ids=str,
)
def test_steps_are_longer_where_a_consumer_whose_warps_multiply_alone_has_many(
    fields: tuple[int, ...], k: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from llm_quant_rocm import hardware
    from llm_quant_rocm.kernels import nvfp4_wgmma_split

    launches = launches_of(nvfp4_wgmma_split, monkeypatch)
    x, words = torch.zeros(5, k, dtype=torch.bfloat16), torch.zeros(k // 64, 640, 128, dtype=torch.int32)
    scales, config = torch.zeros(k // 64, 640, 64, dtype=torch.uint8), nvfp4_wgmma_split.Config(*fields)
    nvfp4_wgmma_split.gemm_split(x, words, scales, x, None, 10240, hardware.nvidia(9, 0), config)
    assert [options["DEPTH"] * 64 for _, options in launches] == [columns]


def test_the_grid_has_a_cluster_for_each_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from llm_quant_rocm import hardware
    from llm_quant_rocm.kernels import nvfp4_wgmma_split, nvfp4_wgmma_split_tiles

    said: list[tuple[Any, ...]] = []

    def planned(kernel: Any, grid: Any, *numbers: int, cluster: int, **options: Any) -> Callable[..., None]:
        return lambda *tensors: said.append((grid, cluster, options["CLUSTER"]))

    monkeypatch.setattr(nvfp4_wgmma_split, "Launch", planned)
    monkeypatch.setattr(nvfp4_wgmma_split, "_plan", nvfp4_wgmma_split._plan.__wrapped__)
    monkeypatch.setattr(nvfp4_wgmma_split, "multiprocessors", lambda device: 132)
    x, words = torch.zeros(40, 1024, dtype=torch.bfloat16), torch.zeros(16, 32, 128, dtype=torch.int32)
    scales = torch.zeros(16, 32, 64, dtype=torch.uint8)
    for config in nvfp4_wgmma_split_tiles.cluster_configs(16) + nvfp4_wgmma_split_tiles.configs(16):
        nvfp4_wgmma_split.gemm_split(x, words, scales, x, None, 500, hardware.nvidia(9, 0), config)
        assert said.pop() == ((config.tiles(40, 500),), config.cluster, config.cluster)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_m": 96, "split_k": 4, "cluster": 2}, "one tile of 96 rows"),
        ({"block_m": 96, "split_k": 2, "consumers": 2}, "one tile of 96 rows"),
        ({"block_m": 8, "split_k": 4, "programs": 132, "cluster": 2}, "in no cluster"),
        ({"block_m": 128, "split_k": 2, "consumers": 2}, "up to 64 rows"),
        ({"block_m": 64, "split_k": 4, "consumers": 2}, "two consumers"),
        ({"block_m": 128, "split_k": 2, "cluster": 3}, "3 programs send .* 128 x 128 than they have room for"),
        ({"block_m": 128, "split_k": 2, "cluster": 4}, "4 programs send .* 128 x 128 than they have room for"),
        ({"block_m": 8, "split_k": 4, "cluster": 8}, "4 consumers in a cluster of 8"),
        ({"block_m": 8, "split_k": 4, "cluster": 0}, "4 consumers in a cluster of 0"),
        ({"block_m": 8, "split_k": 2, "consumers": 3}, "3 consumers in a cluster of 1"),
    ],
    ids=str,
)
def test_what_the_kernel_does_not_have_is_no_configuration(fields: dict[str, int], message: str) -> None:
    from llm_quant_rocm.kernels.nvfp4_wgmma_split_tiles import Config

    with pytest.raises(ValueError, match=message):
        Config(**fields)


@pytest.mark.parametrize("n", [5120, 1001])
@pytest.mark.parametrize("m", [40, 64, 100, 200, 300, 1024])
def test_the_accelerator_stores_what_no_other_program_adds_to(m: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from llm_quant_rocm import hardware
    from llm_quant_rocm.kernels import nvfp4_wgmma_large, nvfp4_wgmma_large_tiles

    launches = launches_of(nvfp4_wgmma_large, monkeypatch)
    x = torch.zeros(m, 2048, dtype=torch.bfloat16)
    words = torch.zeros(32, 320, 128, dtype=torch.int32)
    scales = torch.zeros(32, 320, 64, dtype=torch.uint8)
    for config in {*nvfp4_wgmma_large_tiles.configs(m, n, 2048), nvfp4_wgmma_large_tiles.Config(256, 64, 0)}:
        nvfp4_wgmma_large.gemm_large(x, words, scales, x, None, n, hardware.nvidia(9, 0), config)
    for arguments, options in launches:
        (out, _, parts), block_m = arguments[7:10], options["BLOCK_M"]
        stage = block_m * 128 + options["BLOCK_N"] * 36
        used = options["STAGES"] * stage
        if options["STORES"]:
            assert n == 5120 and (parts is None or options["TAIL"])
            rows, columns = out.block_shape
            assert block_m % rows == 0 and 2 * rows <= nvfp4_wgmma_large.main_part(block_m)
            used += 2 * options["STORES"] * rows * columns * 2
        else:
            assert options["BLOCK_N"] > 64, "nobody else stores what two consumers add up"
            assert parts is not None or n == 1001
        assert nvfp4_wgmma_large.RING_BYTES[2] - stage < used <= nvfp4_wgmma_large.RING_BYTES[2]
    assert len({options["STORES"] for _, options in launches}) == (2 if n == 5120 else 1)


@pytest.mark.parametrize("kind", ["nvfp4_wgmma", "nvfp4_wgmma_split", "nvfp4_wgmma_large"])
def test_a_kernel_gets_what_routing_says(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from llm_quant_rocm import hardware
    from llm_quant_rocm.kernels import nvfp4_hopper
    from llm_quant_rocm.kernels.routing import Schedule

    module = getattr(nvfp4_hopper, kind)
    config = {
        "nvfp4_wgmma": nvfp4_hopper.nvfp4_wgmma.Config(8, 64, 128),
        "nvfp4_wgmma_split": nvfp4_hopper.Split(8, 4, 132),
        "nvfp4_wgmma_large": nvfp4_hopper.Large(64, 128, 0),
    }[kind]
    names = getattr(module, f"{kind}_kernel").arg_names
    launches = launches_of(module, monkeypatch)
    x = torch.zeros(128, 1024, dtype=torch.bfloat16)
    words, scales = torch.zeros(4, 16, 32, 128, dtype=torch.int32), torch.zeros(4, 16, 32, 64, dtype=torch.uint8)
    routing = Schedule(*(torch.zeros(2) for _ in range(6)))
    weight, operands = (words, scales, torch.zeros(4, 512)), (512, hardware.nvidia(9, 0), config, routing)
    half = nvfp4_hopper.grouped_gemm(x, weight, *operands, activation="gelu")
    out = torch.zeros(128, 512, dtype=torch.bfloat16)
    # The kernel for many rows stores them in their order, and takes their weights as it takes the scales of FP8.
    is_large = kind == "nvfp4_wgmma_large"
    row_map = None if is_large else routing.row_map
    weighted = {"row_map": row_map, "row_weight": routing.row_weight}
    assert nvfp4_hopper.grouped_gemm(x, weight, *operands, **weighted, out=out) is out
    assert half.shape == (128, 256) and half.dtype == x.dtype
    tiles = ["tile_expert", "tile_count"] + ["tile_rows"] * is_large
    expected = {"row_scale": routing.row_weight} if is_large else weighted
    for (arguments, options), activation, more in zip(launches, ("gelu", None), ({}, expected), strict=True):
        given = dict(zip(names, arguments, strict=False))
        assert all(given[name] is getattr(routing, name) for name in tiles)
        assert all(given[name] is more.get(name) for name in expected)
        assert options["ACTIVATION"] == activation


@pytest.mark.parametrize("many_rows", [True, False])
def test_experts_results_stay_in_their_tiles_or_go_to_their_slots(
    many_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from llm_quant_rocm import hardware
    from llm_quant_rocm.kernels import nvfp4_hopper
    from llm_quant_rocm.kernels.pair_config import PairConfig
    from llm_quant_rocm.kernels.routing import Schedule

    copied, products = torch.zeros(64, 96), []

    def scatter_rows(x: torch.Tensor, slot_row: torch.Tensor, rows: int, device: Any) -> torch.Tensor:
        assert rows == 64 and slot_row is routing.slot_row
        return copied

    def grouped_gemm(x: torch.Tensor, weight: Any, n: int, *rest: Any, out: Any = None, **epilogue: Any) -> Any:
        products.append((x, n, epilogue))
        return x.new_empty(len(x), n // 2) if out is None else out

    monkeypatch.setattr(nvfp4_hopper, "scatter_rows", scatter_rows)
    monkeypatch.setattr(nvfp4_hopper, "grouped_gemm", grouped_gemm)
    few, many = nvfp4_hopper.nvfp4_wgmma.Config(64, 64, 64), nvfp4_hopper.Large(64, 128, 0)
    w13, w2 = ((copied, copied, torch.zeros(3, rows)) for rows in (2 * 40, 96))
    routing = Schedule(*(torch.zeros(64) for _ in range(5)), slot_row=torch.zeros(10))
    pair = PairConfig(few, many) if many_rows else PairConfig(many, few)
    y, in_tiles = nvfp4_hopper.expert_products(
        torch.zeros(5, 96), w13, w2, "silu", routing, hardware.nvidia(9, 0), pair
    )
    (x, n, first), (h, hidden, second) = products
    assert x is copied and (n, hidden) == (80, 96) and h.shape == (64, 40) and first == {"activation": "silu"}
    assert second["row_weight"] is routing.row_weight
    if many_rows:
        assert y is copied and in_tiles and second["row_map"] is None
    else:
        assert y.shape == (10, 96) and not in_tiles and second["row_map"] is routing.row_map


def test_a_tile_has_a_rest_where_the_main_part_is_too_small() -> None:
    from llm_quant_rocm.kernels.hopper import tile_and_rest

    assert [tile_and_rest(96, m) for m in (1, 64, 65, 500)] == [(64, 0), (64, 0), (96, 32), (96, 32)]
    assert [tile_and_rest(320, m) for m in (256, 257)] == [(256, 0), (320, 64)]
    assert [tile_and_rest(128, m) for m in (5, 128, 129)] == 3 * [(128, 0)]


@pytest.mark.parametrize(
    ("m", "heights"),
    [
        (129, {160, 256}),
        (161, {160, 192, 256}),
        (256, {160, 256}),
        (257, {160, 256, 288}),
        (300, {160, 256, 320}),
        (576, {160, 192, 256, 288}),
        (4096, {160, 192, 256, 288, 320}),
    ],
)
def test_tiles_are_the_lowest_that_do_with_as_many(m: int, heights: set[int]) -> None:
    """Or of 256 rows, which may be cut."""
    from llm_quant_rocm.kernels.nvfp4_wgmma_large_tiles import configs

    for fp8 in (False, True):
        found = {config.block_m for config in configs(m, 8192, 8192, fp8) if config.block_n == 128}
        assert found - {128} == heights


def test_batch_invariant_sums_have_no_parts() -> None:
    from llm_quant_rocm.kernels import nvfp4_wgmma, nvfp4_wgmma_large_tiles, nvfp4_wgmma_split_tiles
    from llm_quant_rocm.kernels.nvfp4_hopper import batch_invariant

    few, many = nvfp4_wgmma.Config, nvfp4_wgmma_large_tiles.Config
    assert batch_invariant(few(16, 64, 128, programs=528)) == few(16, 64, 128, programs=0)
    assert batch_invariant(many(64, 256, 2, shares=4)) == many(64, 256, 0, shares=0)
    assert batch_invariant(many(256, 64, 0)) == many(256, 128, 0)
    assert batch_invariant(many(256, 128, 0, shares=2, tail_m=128)) == many(256, 128, 0, tail_m=128)
    assert batch_invariant(nvfp4_wgmma_split_tiles.Config(32, 4)) == few(32, 64, 128, programs=0, stages=2)
    assert batch_invariant(nvfp4_wgmma_split_tiles.Config(96, 2)) == few(128, 64, 128, programs=0, stages=2)
