# SPDX-License-Identifier: Apache-2.0
"""How `nvfp4_wgmma_split` cuts its product into tiles, and which of their steps are a program's and a consumer's: what
others call its tile scheduler.

A program has one tile, its cluster's share of one, or its share of the steps of all tiles (`wgmma_parts`). Its
consumers take the steps in turns. Of routed experts, each tile of rows has its own expert's weight, and programs always
share.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from llm_quant_rocm.kernels.cluster import MOST_INBOX_BYTES, inbox_bytes
from llm_quant_rocm.kernels.hopper import SMS, main_part, place
from llm_quant_rocm.kernels.nvfp4_wgmma import expert_of, first_piece_of
from llm_quant_rocm.kernels.sizes import cdiv, next_power_of_2
from llm_quant_rocm.kernels.stretches import begin_of

# Programs of a cluster, and how many clusters run together, a program a multiprocessor, as CUDA said of the H100 that
# was measured: those of one come to the same part of the GPU (GPC), whose size is no multiple of three or four.
CLUSTERS = {2: 66, 3: 39, 4: 30}


@gluon.constexpr_function
def by_warps(block_m):
    """Whether each warp of a consumer multiplies alone (mma.sync), not all four together (wgmma), with so many rows of
    x in a tile.

    A wgmma reads x once for four warps, but holds them from the first value that it is given until it has the last one.
    With 8 rows that is what takes the time: without, and with two programs on a multiprocessor, 31 weights took 6.5%
    less in the mean, and 16% at most. With 16 rows most took up to 7% more, with 32 up to 22%. Compared by hand on an
    H200."""
    return block_m == 8


@dataclass(frozen=True)
class Config:
    """How the product is cut.

    Attributes:
        block_m: rows of x in a tile, 8 to 128, a power of two or 96.
        split_k: consumers, 4 or 2, that share the steps of the same 64 rows of the weight.
        programs: programs that share the steps of all tiles evenly; 0: one for each tile, always with tiles of 96 rows
            and never with routed experts.
        consumers: of a program: 4, or 2: then `split_k` is 2, and tiles have up to 64 rows of x.
        cluster: programs that share the steps of one tile, of which they send each other parts; 1: none do.
    """

    block_m: int
    split_k: int
    programs: int = 0
    consumers: int = 4
    cluster: int = 1

    def __post_init__(self) -> None:
        if self.consumers not in (2, 4) or self.cluster not in (1, *CLUSTERS):
            raise ValueError(f"no program has {self.consumers} consumers in a cluster of {self.cluster}")
        if main_part(self.block_m) < self.block_m and (self.programs or self.consumers < 4 or self.cluster > 1):
            raise ValueError(f"each program has four consumers and one tile of {self.block_m} rows")
        if self.programs and self.cluster > 1:
            raise ValueError("programs that share the steps of all tiles are in no cluster")
        if self.consumers < 4 and (self.split_k, self.block_m > 64) != (2, False):
            raise ValueError("two consumers share the steps of a tile of up to 64 rows")
        if self.inbox_bytes > MOST_INBOX_BYTES:
            tile = f"a tile of {self.block_m} x {self.block_n}"
            raise ValueError(f"{self.cluster} programs send each other more of {tile} than they have room for")

    @cached_property
    def inbox_bytes(self) -> int:
        """Shared memory for what the others of a cluster send."""
        if self.cluster == 1:
            return 0
        size: int = inbox_bytes(self.consumers, max(self.block_m // self.split_k, 8), self.cluster)
        return size

    @property
    def by_warps(self) -> bool:
        """Whether each warp multiplies alone."""
        alone: bool = by_warps(self.block_m)
        return alone

    @property
    def programs_together(self) -> int:
        """Programs that a multiprocessor runs at a time. Of those whose warps multiply alone two fit; where programs
        share all steps, they may be few enough to have one each."""
        if self.by_warps and self.consumers == 4:
            return 1 if 0 < self.programs <= SMS else 2
        return 4 // self.consumers

    @property
    def block_n(self) -> int:
        return self.consumers // self.split_k * 64

    def tiles(self, m: int, n: int) -> int:
        return cdiv(m, self.block_m) * cdiv(n, self.block_n)

    def turns(self, m: int, n: int, k: int) -> float:
        """Steps of 128 columns that a consumer has of a product of m rows and a weight [n, k]."""
        tiles = self.tiles(m, n)
        return tiles * cdiv(k, 128) / (self.programs or tiles * self.cluster) / self.split_k


def _covering(m: int) -> int:
    """The lowest tile that has m rows, up to 128."""
    return max(8, min(128, next_power_of_2(m)))


def configs(m: int) -> list[Config]:
    """Those with a tile a program of no more rows than m asks for, of 8 only where one has all m, the lowest first,
    with K split in four before in two."""
    covering = _covering(m)
    lows = [low for low in (8, 16, 32, 64, 96, 128) if low <= covering and (low > 8 or m <= 8)]
    return [
        *(Config(block_m, split_k) for split_k in (4, 2) for block_m in lows),
        *(Config(block_m, 2, consumers=2) for block_m in lows if block_m <= 64),
    ]


def cluster_configs(m: int) -> list[Config]:
    """Those in which the programs of a cluster share a tile. Of 128 rows of the weight that pays, by hand, with as many
    rows of x, of which two programs have room for each other's parts."""
    whole = [config for config in configs(m) if config.block_n == 64 and config.block_m != 96]
    clusters = [replace(config, cluster=cluster) for config in whole for cluster in CLUSTERS]
    if _covering(m) == 128:
        clusters.append(Config(128, 2, cluster=2))
    return clusters


def shared_configs(m: int, n: int) -> list[Config]:
    """Those in which an H100's programs share the steps of all tiles: of four consumers up to 128 rows, of two up to
    64."""
    covering, found = _covering(m), []
    for split_k, consumers, most_rows in ((4, 4, 128), (2, 4, 128), (2, 2, 64)):
        if m <= most_rows:
            whole = Config(covering, split_k, consumers=consumers)
            most = SMS * whole.programs_together
            found += [replace(whole, programs=each) for each in sorted({_programs(whole.tiles(m, n), most), most})]
    return found


def _programs(tiles: int, most: int) -> int:
    """How many programs should share so many tiles: nearly as many as run at a time, and so that each has whole
    quarters of tiles, for fewer parts."""
    return max((each for each in range(most * 3 // 4 + 1, most + 1) if 4 * tiles % each == 0), default=most)


@gluon.jit
def quick_place(tile, tiles_m, tiles_n):
    """`place`, without its divisions where there is one tile of rows: every program begins with them."""
    tile_m = tile * 0
    tile_n = tile
    if tiles_m > 1:
        tile_m, tile_n = place(tile, tiles_m, tiles_n)
    return tile_m, tile_n


@gluon.jit
def program_stretch(
    tiles_m, N, K, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, SHARED: gl.constexpr, CLUSTER: gl.constexpr = 1
):  # fmt: skip
    """Tiles of N, steps in each tile, where the program's stretch of the steps of all begins and ends, and the tile in
    which it begins."""
    program = gl.program_id(0)
    tiles_n = gl.cdiv(N, BLOCK_N)
    tile_steps = gl.cdiv(K, BLOCK_K)
    if SHARED:
        steps = tiles_m * tiles_n * tile_steps
        begin = begin_of(program, steps)
        return tiles_n, tile_steps, begin, begin_of(program + 1, steps), begin // tile_steps
    else:
        tile, rank = program // CLUSTER, program % CLUSTER
        begin = tile * tile_steps
        end = begin + begin_of(rank + 1, tile_steps, CLUSTER)
        return tiles_n, tile_steps, begin + begin_of(rank, tile_steps, CLUSTER), end, tile


@gluon.jit
def load_first_experts(tile_expert, M, BLOCK_M: gl.constexpr):
    """The experts of the first 32 tiles of rows, a lane each. A program with one of these does not have to wait twice
    for memory, for how many tiles there are and then for its own tile's expert."""
    tile_m = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    return gl.load(tile_expert + tile_m, mask=tile_m < M // BLOCK_M, other=0)


@gluon.jit
def first_expert(tile_m, first_experts, tile_expert, wanted):
    """The expert of a tile of rows, of which `first_experts` may know."""
    expert = gl.sum(gl.where(gl.arange(0, 32, layout=first_experts.type.layout) == tile_m, first_experts, 0), 0)
    if tile_m >= 32:
        expert = expert_of(tile_expert, tile_m, wanted)
    return expert


@gluon.jit
def next_step(step, tile_m, tile_n, tile, piece, tile_steps, tiles_m, tiles_n, tile_expert, K, SHARED: gl.constexpr):
    """The step after this one, and its tile. To place a tile takes divisions, too long for every step."""
    step += 1
    if SHARED:  # noqa: SIM102  # constants decide what is compiled
        if step == tile_steps:
            step = 0
            tile += 1
            tile_m, tile_n = quick_place(tile, tiles_m, tiles_n)
            if tile_expert is not None:
                piece = first_piece_of(expert_of(tile_expert, tile_m, tile < tiles_m * tiles_n), K)
    return step, tile_m, tile_n, tile, piece


@gluon.jit
def turns_in_tile(tile, tile_steps, begin, end, MINE: gl.constexpr, SPLIT_K: gl.constexpr):
    """The first of a consumer's turns in a tile, and the one after its last; turn 0 has step MINE of the stretch.

    Computed anew for each tile: one that the loop over tiles carries on Triton 3.6 takes for a constant.
    """
    first = gl.maximum(tile * tile_steps - begin, 0)
    last = gl.minimum((tile + 1) * tile_steps, end) - begin
    return gl.cdiv(first - MINE, SPLIT_K), gl.cdiv(last - MINE, SPLIT_K)
