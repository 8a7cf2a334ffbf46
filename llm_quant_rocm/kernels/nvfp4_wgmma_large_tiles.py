# SPDX-License-Identifier: Apache-2.0
"""How `nvfp4_wgmma_large` cuts its product into tiles, and which of them, or parts of one, are a program's: what others
call its tile scheduler.

Tiles beyond whole waves can be cut: the steps of all of them are shared out evenly, each program a stretch. Where a
tile is several programs', the one with its beginning adds the others' parts, in order, and stores the result. Or each
of these tiles is the same number of programs', each of which adds and stores some of its rows: one alone would read the
parts of all. Programs with the same columns of x then read them at the same time, which with many columns matters more
than that all have the same number of steps. Or each of these tiles, the tail, is several of fewer rows of x. Nothing is
added then, but each of them decodes the weight. A few tiles are both: the fewer rows a part has, the less is exchanged.

A weight is decoded once a tile, and a tile costs what its rows of x do, filled or not. So there are tiles of 160, 192,
288 and 320 rows, too, whose accumulator is two, of 128 or 256 rows and of the 32 or 64 others.
"""

from dataclasses import dataclass, replace

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from llm_quant_rocm.kernels.hopper import SMS, main_part, place
from llm_quant_rocm.kernels.nvfp4_wgmma import tiles_of_rows
from llm_quant_rocm.kernels.sizes import cdiv
from llm_quant_rocm.kernels.stretches import begin_of

# Bytes of a row of x in one step.
STEP_BYTES = 128
# Steps in a row without a branch. Tiles are cut at multiples of it.
UNROLL = 4
# How many programs may compute one tile.
SHARES = (2, 3, 4, 6, 8)
# Rows of x in a tile of 128 rows of the weight.
_HEIGHTS = (160, 192, 256, 288, 320)


@dataclass(frozen=True)
class Config:
    """How the product is cut.

    Attributes:
        block_m, block_n: rows of x, 64, 128, 160, 192, 256, 288 or 320, and of the weight, 64, 128 or 256, in a tile;
            256 of the weight only with up to 128 of x, rows of x that are no power of two with 128, and 64 of the
            weight with 256 of x.
        cut: how many waves of tiles may be cut, so that their sums are of parts: none, the last one if it is not full
            (1), or that and the full one before it (2), for longer stretches. None of tiles whose rows of x are no
            power of two, and of 64 rows of the weight.
        shares: so many programs, 2 to 8, compute each tile of the last wave if that is not full, or of the tail, where
            they run together; `cut` is for where they do not.
        tail_m: tiles of the last wave are of so many rows of x instead, 64 or 128 of 256, where these run together;
            with 128 rows of the weight.
    """

    block_m: int = 256
    block_n: int = 128
    cut: int = 2
    shares: int = 0
    tail_m: int = 0

    def __post_init__(self) -> None:
        if main_part(self.block_m) < self.block_m and (self.cut or self.block_n > 128):
            raise ValueError(f"tiles of {self.block_m} rows are of 128 rows of the weight and cut into shares only")
        if self.block_n == 64 and (self.block_m != 256 or self.cut or self.shares):
            raise ValueError("tiles of 64 rows of the weight are of 256 rows of x and not cut")
        if self.tail_m and (self.cut or (self.block_m, self.block_n) != (256, 128)):
            raise ValueError(f"tiles of {self.tail_m} rows stand for ones of 256 x 128 that are not cut")


def configs(m: int, n: int, k: int, fp8: bool = False) -> list[Config]:
    """Those that could be the fastest of m rows on an H100; none for less than 33. Compiled with Triton 3.6, none of
    them spills registers in a loop but tiles of 320 rows with `shares`, a few in a group of steps."""
    if m <= 32:
        return []
    shapes = [(64, 128), (64, 256)] if m <= 64 else [(height, 128) for height in _heights(m)] if m > 128 else []
    # The multiprocessors read more of x for as many products: for a few waves only.
    if m > 128 and n % 8 == 0 and cdiv(m, 256) * cdiv(n, 64) <= 4 * SMS:
        shapes.append((256, 64))
    if m > 64 and (m <= 512 or n * k < 2**24 or fp8):
        shapes.append((128, 128))
    # In FP8 it would spill.
    if 64 < m <= 128 and not fp8:
        shapes.append((128, 256))
    found = []
    for block_m, block_n in shapes:
        tiles = cdiv(m, block_m) * cdiv(n, block_n)
        uncut = block_n == 64 or main_part(block_m) < block_m
        cuts = (0,) if uncut else (0, 2) if tiles < SMS else (0, 1, 2)
        found += [Config(block_m, block_n, cut) for cut in cuts]
        last = tiles % SMS or SMS
        shared = () if block_n == 64 else SHARES
        found += [Config(block_m, block_n, cuts[-1], shares) for shares in shared if last * shares <= SMS]
        if (block_m, block_n) == (256, 128):
            found += _tailed(m, tiles, groups_of(k, STEP_BYTES if fp8 else STEP_BYTES // 2))
    return found


def _heights(m: int) -> list[int]:
    """Rows of x in tiles of 128 rows of the weight for m of more than 128: 256, which may be cut, and the fewest of
    which so many tiles have room for m."""
    fewest = {cdiv(m, height): height for height in sorted(_HEIGHTS, reverse=True)}
    return sorted({*fewest.values(), 256})


def _tailed(m: int, tiles: int, groups: int) -> list[Config]:
    """Of so many tiles of 256 x 128: those with a tail, and those whose tail as many programs share as run together."""
    tailed = [Config(256, 128, 0, tail_m=tail) for tail in (64, 128)]
    tailed = [config for config in tailed if tail_of(config, m, tiles, SMS)]
    found = tailed[:1]  # where both run together, the lower ones are done first
    for config in tailed:
        shared = [replace(config, shares=shares) for shares in SHARES]
        found += [each for each in shared if shares_of(each, tiles, groups, SMS, config.tail_m)][-1:]
    return found


def groups_of(k: int, block_k: int = STEP_BYTES // 2) -> int:
    """How many groups of steps a sum over k columns has."""
    return cdiv(k, block_k * UNROLL)


def shares_of(config: Config, tiles: int, groups: int, programs: int, tail: int) -> int:
    """How many programs compute each tile of the last wave, or of the tail, of so many rows of x, if there is one;
    0 where that is not the same number for all and more than one."""
    last = tiles % programs * (config.block_m // tail if tail else 1)
    return config.shares if last and last * config.shares <= programs and config.shares <= groups else 0


def tail_of(config: Config, m: int, tiles: int, programs: int) -> int:
    """How many rows of x the tiles of the last wave of several have, where they are fewer than others'; else 0."""
    last = tiles % programs
    if not config.tail_m or not last or tiles < programs or m < config.block_m:
        return 0
    return config.tail_m if last * config.block_m // config.tail_m <= programs else 0


def whole_tiles(tiles: int, groups: int, programs: int, cut: int) -> int:
    """How many of the tiles, of so many groups of steps each, not to cut where `cut` waves may be."""
    # Parts cost about as much time as three groups of steps.
    if not cut or -tiles % programs * groups <= 3 * programs:
        return tiles
    return max(tiles // programs + 1 - cut, 0) * programs


@gluon.jit
def count_tiles(tile_count, M, N, whole, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """How many tiles of rows of x and of the weight there are, and how many of all are not cut."""
    tiles_n = gl.cdiv(N, BLOCK_N)
    tiles_m = tiles_of_rows(tile_count, M, BLOCK_M)
    return tiles_m, tiles_n, whole if tile_count is None else tiles_m * tiles_n


@gluon.jit
def program_pieces(tiles, whole, tile_groups, CUT: gl.constexpr, SHARES: gl.constexpr):
    """The program's stretch of the groups of the tiles that are cut, if any are, and how many pieces of work it has:
    whole tiles, and what it has of the others. Where there are SHARES of each, a program has one of one tile, or none.
    """
    program = gl.program_id(0)
    if not CUT:
        return 0, 0, gl.cdiv(whole - program, gl.num_programs(0))
    if SHARES:
        begin = program // SHARES * tile_groups + program % SHARES * tile_groups // SHARES
        end = program // SHARES * tile_groups + (program % SHARES + 1) * tile_groups // SHARES
        end = gl.where(program < (tiles - whole) * SHARES, end, begin)
    else:
        begin = begin_of(program, (tiles - whole) * tile_groups)
        end = begin_of(program + 1, (tiles - whole) * tile_groups)
    cut_tiles = gl.where(end > begin, (end - 1) // tile_groups - begin // tile_groups + 1, 0)
    return begin, end, gl.cdiv(whole - program, gl.num_programs(0)) + cut_tiles


@gluon.jit
def piece_at(index, begin, end, whole, tile_groups, CUT: gl.constexpr):
    """Tile, first group and end of groups of the program's piece of work `index`."""
    program = gl.program_id(0)
    if not CUT:
        return program + index * gl.num_programs(0), 0, tile_groups
    whole_tiles = gl.cdiv(whole - program, gl.num_programs(0))
    cut_tile = begin // tile_groups + index - whole_tiles
    is_whole = index < whole_tiles
    tile = gl.where(is_whole, program + index * gl.num_programs(0), whole + cut_tile)
    first = gl.where(is_whole, 0, gl.maximum(begin - cut_tile * tile_groups, 0))
    last = gl.where(is_whole, tile_groups, gl.minimum(end - cut_tile * tile_groups, tile_groups))
    return tile, first, last


@gluon.jit
def program_tail(
    tiles_m, tiles_n, whole, tile_groups, BLOCK_M: gl.constexpr, TAIL: gl.constexpr, SHARES: gl.constexpr
):  # fmt: skip
    """Of the tail: the program's tile, from which of its rows on it has TAIL, and its first group of steps and end of
    groups, which are the same if it has none."""
    PARTS: gl.constexpr = BLOCK_M // TAIL
    EACH: gl.constexpr = SHARES if SHARES else 1
    program = gl.program_id(0)
    part = program // EACH
    tile_m, tile_n = place(whole + part // PARTS, tiles_m, tiles_n)
    first = program % EACH * tile_groups // EACH
    last = (program % EACH + 1) * tile_groups // EACH
    last = gl.where(part < (tiles_m * tiles_n - whole) * PARTS, last, first)
    return tile_m, tile_n, part % PARTS * TAIL, first, last
