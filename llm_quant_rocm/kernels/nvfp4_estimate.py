# SPDX-License-Identifier: Apache-2.0
"""How long the NVFP4 GEMM takes on Hopper under a configuration: the choice for weights that nobody has measured.

The program with the most work decides: `launch + step * steps + tile * tiles + part * parts` microseconds, to the power
of `SLOWING`. The four numbers of each kind of tile are fitted to what was measured of every configuration on 31
weights, on an H100, or with 8 rows, in tiles of 160 and 288 and in FP8 on an H200, which computes as fast
(benchmarks/results/nvfp4_configs_sm_90, nvfp4_configs_h200_sm_90 and nvfp4_configs_fp8_h200_sm_90.json), by `python -m
benchmarks._estimate_fit`, which also says how much slower than the best the choice is for weights that are left out of
the fit. What won at a weight of like size is a worse guide: whether tiles fill the multiprocessors' last wave decides,
and a few more columns change that.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from llm_quant_rocm.formats.nvfp4_wgmma import COLUMNS
from llm_quant_rocm.kernels import nvfp4_wgmma_large_tiles, nvfp4_wgmma_split_tiles, ptpc_wgmma
from llm_quant_rocm.kernels.hopper import SMS
from llm_quant_rocm.kernels.nvfp4_slices import Expanded
from llm_quant_rocm.kernels.sizes import cdiv

Config = nvfp4_wgmma_large_tiles.Config | nvfp4_wgmma_split_tiles.Config
# How the product in FP8 is computed.
Fp8Config = nvfp4_wgmma_large_tiles.Config | Expanded

# Bytes of x, in 16 bits, that the L2 cache holds beside the weight. Programs at different columns of more wait for
# memory: each of their steps took 1.3 to 1.8 times as long. In FP8, where a step is as many bytes and takes longer, it
# was up to 1.17 times, which is left out.
_CACHED, _UNCACHED_STEP = 32e6, 1.6
# Programs that share the steps of all tiles have so many each, or more.
_LEAST_STEPS = 8

# What takes long takes longer than its parts: a product of a millisecond was an eighth slower than the steps of short
# ones add up to, presumably as an H100 lowers its clock under load. Of the powers tried, this left the least error.
SLOWING = 1.05

# Microseconds (launch, step, tile, part) by kernel, tile and how tiles are shared out.
_TIMES: dict[tuple[str, int, int, str], tuple[float, float, float, float]] = {
    ("expanded", 0, 0, "whole"): (5.246, 0.281, 0.364, 0.399),
    ("fp8", 160, 128, "shares"): (0.0, 1.736, 2.228, 3.033),
    ("fp8", 160, 128, "whole"): (0.657, 1.696, 1.371, 0.0),
    ("fp8", 192, 128, "shares"): (0.0, 1.866, 2.759, 2.708),
    ("fp8", 192, 128, "whole"): (0.0, 1.83, 1.483, 0.0),
    ("fp8", 256, 64, "whole"): (1.333, 1.168, 1.803, 0.0),
    ("fp8", 256, 128, "cut"): (6.611, 2.266, 2.149, 1.104),
    ("fp8", 256, 128, "shared tail of 128"): (3.008, 2.223, 1.851, 1.5),
    ("fp8", 256, 128, "shared tail of 64"): (5.012, 2.245, 1.851, 0.459),
    ("fp8", 256, 128, "shares"): (0.0, 2.162, 3.222, 3.247),
    ("fp8", 256, 128, "tail of 128"): (2.347, 2.187, 1.851, 1.425),
    ("fp8", 256, 128, "tail of 64"): (0.614, 2.214, 1.851, 1.3),
    ("fp8", 256, 128, "whole"): (0.725, 2.099, 1.851, 0.0),
    ("fp8", 288, 128, "shares"): (0.0, 2.59, 4.424, 2.657),
    ("fp8", 288, 128, "whole"): (0.0, 2.544, 2.491, 0.0),
    ("fp8", 320, 128, "shares"): (0.0, 2.83, 5.438, 2.452),
    ("fp8", 320, 128, "whole"): (0.326, 2.942, 2.451, 0.0),
    ("half", 8, 64, "cluster"): (1.9, 0.091, 0.082, 0.064),
    ("half", 8, 64, "shared"): (1.22, 0.287, 0.634, 0.574),
    ("half", 8, 64, "whole"): (1.279, 0.109, 0.501, 0.051),
    ("half", 16, 64, "cluster"): (1.542, 0.101, 0.608, 0.065),
    ("half", 16, 64, "whole"): (1.717, 0.119, 0.425, 0.051),
    ("half", 32, 64, "cluster"): (1.449, 0.12, 0.679, 0.052),
    ("half", 32, 64, "whole"): (1.668, 0.135, 0.432, 0.048),
    ("half", 64, 64, "cluster"): (2.261, 0.172, 0.444, 0.042),
    ("half", 64, 64, "whole"): (1.927, 0.193, 0.007, 0.047),
    ("large", 64, 128, "cut"): (4.489, 0.926, 0.0, 0.481),
    ("large", 64, 128, "shares"): (1.405, 0.864, 1.414, 2.457),
    ("large", 64, 128, "whole"): (1.218, 0.84, 1.454, 0.0),
    ("large", 64, 256, "cut"): (4.871, 1.745, 0.0, 0.771),
    ("large", 64, 256, "shares"): (0.0, 1.41, 4.046, 3.169),
    ("large", 64, 256, "whole"): (0.0, 1.302, 4.736, 0.0),
    ("large", 128, 128, "cut"): (4.909, 1.177, 0.0, 0.682),
    ("large", 128, 128, "shares"): (1.66, 1.117, 1.432, 2.719),
    ("large", 128, 128, "whole"): (2.14, 1.056, 0.946, 0.0),
    ("large", 128, 256, "cut"): (7.231, 2.257, 0.0, 2.774),
    ("large", 128, 256, "shares"): (0.563, 1.967, 3.903, 4.465),
    ("large", 128, 256, "whole"): (2.007, 1.893, 2.371, 0.0),
    ("large", 160, 128, "shares"): (1.435, 1.476, 1.458, 2.478),
    ("large", 160, 128, "whole"): (0.869, 1.376, 1.257, 0.0),
    ("large", 192, 128, "shares"): (0.237, 1.563, 2.495, 3.567),
    ("large", 192, 128, "whole"): (1.114, 1.53, 1.52, 0.0),
    ("large", 256, 64, "whole"): (1.398, 1.061, 2.036, 0.0),
    ("large", 256, 128, "cut"): (5.78, 2.151, 1.054, 1.255),
    ("large", 256, 128, "shared tail of 128"): (4.427, 2.112, 1.563, 1.153),
    ("large", 256, 128, "shared tail of 64"): (0.0, 2.143, 1.563, 1.283),
    ("large", 256, 128, "shares"): (0.076, 2.038, 2.976, 4.534),
    ("large", 256, 128, "tail of 128"): (3.375, 2.059, 1.563, 1.114),
    ("large", 256, 128, "tail of 64"): (1.4, 2.094, 1.563, 1.012),
    ("large", 256, 128, "whole"): (1.631, 2.027, 1.563, 0.0),
    ("large", 288, 128, "shares"): (0.36, 2.374, 2.707, 4.327),
    ("large", 288, 128, "whole"): (0.0, 2.34, 2.266, 0.0),
    ("large", 320, 128, "shares"): (0.0, 2.577, 4.61, 5.028),
    ("large", 320, 128, "whole"): (1.04, 2.54, 2.22, 0.0),
    ("split", 16, 64, "cluster"): (0.586, 0.075, 1.787, 0.108),
    ("split", 16, 64, "shared"): (1.447, 0.18, 0.635, 0.476),
    ("split", 16, 64, "whole"): (0.356, 0.12, 1.808, 0.038),
    ("split", 16, 128, "shared"): (1.387, 0.368, 1.24, 0.43),
    ("split", 16, 128, "whole"): (0.04, 0.231, 2.294, 0.028),
    ("split", 32, 64, "cluster"): (0.6, 0.079, 2.066, 0.122),
    ("split", 32, 64, "shared"): (2.201, 0.184, 0.888, 0.391),
    ("split", 32, 64, "whole"): (0.244, 0.134, 1.966, 0.035),
    ("split", 32, 128, "shared"): (1.227, 0.366, 1.569, 0.421),
    ("split", 32, 128, "whole"): (0.084, 0.256, 2.186, 0.027),
    ("split", 64, 64, "cluster"): (1.199, 0.131, 2.244, 0.096),
    ("split", 64, 64, "shared"): (1.368, 0.231, 1.276, 0.545),
    ("split", 64, 64, "whole"): (0.0, 0.17, 2.471, 0.04),
    ("split", 64, 128, "shared"): (2.097, 0.4, 1.282, 0.504),
    ("split", 64, 128, "whole"): (0.353, 0.33, 2.286, 0.029),
    ("split", 96, 64, "whole"): (0.332, 0.247, 2.599, 0.039),
    ("split", 96, 128, "whole"): (0.528, 0.478, 2.418, 0.019),
    ("split", 128, 64, "cluster"): (1.031, 0.19, 3.151, 0.147),
    ("split", 128, 64, "shared"): (0.889, 0.47, 1.774, 0.607),
    ("split", 128, 64, "whole"): (0.188, 0.265, 2.717, 0.056),
    ("split", 128, 128, "cluster"): (4.603, 0.409, 0.0, 0.074),
    ("split", 128, 128, "shared"): (2.13, 0.576, 1.932, 0.744),
    ("split", 128, 128, "whole"): (0.0, 0.496, 3.42, 0.01),
    ("warps", 8, 64, "cluster"): (1.34, 0.087, 0.357, 0.064),
    ("warps", 8, 64, "shared"): (1.196, 0.289, 0.62, 0.505),
    ("warps", 8, 64, "whole"): (1.012, 0.103, 0.711, 0.044),
    ("warps", 8, 128, "shared"): (2.234, 0.516, 1.079, 0.516),
    ("warps", 8, 128, "whole"): (1.048, 0.21, 0.703, 0.025),
}

# Bytes a microsecond of quantizing x, and microseconds of a launch more.
_COPY, _LAUNCH = 2.9e6, 2.5


class Load(NamedTuple):
    """What the program with the most work does.

    Attributes:
        kind: kernel ("half" is the split one with two consumers, "warps" that with four whose warps multiply alone,
            "fp8" the large one in FP8, "expanded" cuBLAS in FP8), rows of x and of the weight in a tile, and how tiles
            are shared out.
        steps: steps of the split kernel, groups of steps of the large one, of 128 columns each of cuBLAS.
        tiles: tiles of which it computes something, or its multiprocessor if that runs two; for cuBLAS millions of
            results, which it stores after a tile's steps, not meanwhile.
        parts: programs that compute one tile that is cut; of tiles with `shares`, how much of the GPU exchanges parts,
            which the L2 cache limits; of a tail, groups of steps that one program has of it; for cuBLAS, which expands
            the weight before, and the split kernel with a tile a program, which may wait for memory, millions of the
            weight's values. Else 0.
    """

    kind: tuple[str, int, int, str]
    steps: float
    tiles: float
    parts: float


def load_of(config: Config | Fp8Config, m: int, n: int, k: int, fp8: bool = False) -> Load:
    """What `config` gives the busiest program to do, on 132 multiprocessors."""
    if isinstance(config, Expanded):
        waves = ptpc_wgmma.waves(ptpc_wgmma.default_config(m, n), m, n)
        return Load(("expanded", 0, 0, "whole"), waves * k / 128, m * n / 1e6, n * k / 1e6)
    if isinstance(config, nvfp4_wgmma_split_tiles.Config):
        tiles, steps = config.tiles(m, n), cdiv(k, 2 * COLUMNS)
        kernel = "half" if config.consumers == 2 else "warps" if config.by_warps else "split"
        if config.programs:
            share = cdiv(tiles * steps, config.programs)
            touched = _touched(tiles, steps, config.programs)
            return Load(_kind(kernel, config, "shared"), share, touched, max(1, config.programs / tiles))
        if config.cluster > 1:
            waves = cdiv(tiles, nvfp4_wgmma_split_tiles.CLUSTERS[config.cluster])
            return Load(_kind(kernel, config, "cluster"), waves * cdiv(steps, config.cluster), waves, n * k / 1e6)
        waves = cdiv(tiles, SMS)
        return Load(_kind(kernel, config, "whole"), waves * steps, waves, n * k / 1e6)
    kernel, value_bytes = ("fp8", 1) if fp8 else ("large", 2)
    tiles = cdiv(m, config.block_m) * cdiv(n, config.block_n)
    groups = nvfp4_wgmma_large_tiles.groups_of(k, nvfp4_wgmma_large_tiles.STEP_BYTES // value_bytes)
    tail = nvfp4_wgmma_large_tiles.tail_of(config, m, tiles, SMS)
    shares = nvfp4_wgmma_large_tiles.shares_of(config, tiles, groups, SMS, tail)
    if tail:
        waves, sharing = tiles // SMS, f"{'shared ' if shares else ''}tail of {tail}"
        return Load(_kind(kernel, config, sharing), waves * groups, waves, cdiv(groups, max(shares, 1)))
    if shares:
        waves = tiles // SMS
        exchanging = tiles % SMS * shares / SMS
        return Load(_kind(kernel, config, "shares"), waves * groups + cdiv(groups, shares), waves + 1, exchanging)
    whole = nvfp4_wgmma_large_tiles.whole_tiles(tiles, groups, SMS, config.cut)
    if whole == tiles:
        waves = cdiv(tiles, SMS)
        return Load(_kind(kernel, config, "whole"), waves * groups, waves, 0)
    share = cdiv((tiles - whole) * groups, SMS)
    slower = _UNCACHED_STEP if config.cut == 2 and not fp8 and value_bytes * m * k > _CACHED else 1
    steps = whole // SMS * groups + share * slower
    return Load(_kind(kernel, config, "cut"), steps, whole // SMS, SMS / (tiles - whole))


def _kind(kernel: str, config: Config, sharing: str) -> tuple[str, int, int, str]:
    return kernel, config.block_m, config.block_n, sharing


def _touched(tiles: int, steps: int, programs: int) -> int:
    """The most tiles of which one program has a stretch, where they share all steps evenly."""
    each, longer = divmod(tiles * steps, programs)
    begins = [program * each + min(program, longer) for program in range(programs + 1)]
    return max(cdiv(end, steps) - begin // steps for begin, end in zip(begins, begins[1:], strict=False))


def microseconds(config: Config, m: int, n: int, k: int) -> float:
    """Of a product of x [m, k] and a weight [n, k]."""
    return _microseconds(load_of(config, m, n, k))


def microseconds_fp8(config: Fp8Config, m: int, n: int, k: int) -> float:
    """Of the product in FP8, with the quantization of x before it."""
    return quantizing(m, k) + _microseconds(load_of(config, m, n, k, fp8=True))


def quantizing(m: int, k: int) -> float:
    """Microseconds of making x [m, k] E4M3: two bytes of a value are read and one is written."""
    return 3 * m * k / _COPY + _LAUNCH


def _microseconds(load: Load) -> float:
    return total(_TIMES[load.kind], load)


def total(times: Sequence[float], load: Load) -> float:
    """Microseconds of `load`, of whose kind `times` are (launch, step, tile, part)."""
    launch, step, tile, part = times
    return (launch + step * load.steps + tile * load.tiles + part * load.parts) ** SLOWING


def configs(m: int, n: int, k: int) -> Iterator[Config]:
    """Configurations of both kernels that could be the fastest, and that no sum of parts makes slow for sure."""
    for whole in nvfp4_wgmma_split_tiles.configs(m):
        if SMS // 3 <= whole.tiles(m, n) <= 2 * SMS * whole.programs_together:
            yield whole
    for cluster in nvfp4_wgmma_split_tiles.cluster_configs(m):
        # A multiprocessor has one program or, with two consumers, two; at least every other consumer has a step.
        least, most = SMS // 3, SMS * cluster.programs_together
        fits = cluster.tiles(1, n) * cluster.cluster >= least and cluster.tiles(m, n) * cluster.cluster <= most
        if fits and k > cluster.cluster * cluster.split_k * COLUMNS:
            yield cluster
    for shared in nvfp4_wgmma_split_tiles.shared_configs(m, n):
        if shared.tiles(m, n) * cdiv(k, 2 * COLUMNS) >= _LEAST_STEPS * shared.programs:
            yield shared
    yield from nvfp4_wgmma_large_tiles.configs(m, n, k)


def fastest(m: int, n: int, k: int) -> Config | None:
    """The configuration with the least estimate; None for few rows of a weight too small for these kernels.

    Of more than 8 rows, programs with two consumers that share the steps of all tiles are not among those it chooses
    from: no H100 has measured them. On an H200 (nvfp4_configs_h200_sm_90.json) they took 4% less time than the best of
    all others, or more, only of a weight with many tiles and short sums, DeepSeek-V3's kv_b."""
    loads = {config: load_of(config, m, n, k) for config in configs(m, n, k)}
    fitted = [config for config, load in loads.items() if load.kind in _TIMES]
    return min(fitted, key=lambda config: _microseconds(loads[config]), default=None)


def configs_fp8(m: int, n: int, k: int) -> list[nvfp4_wgmma_large_tiles.Config]:
    """Configurations in FP8, of more than 128 rows, that could be the fastest."""
    return [config for config in nvfp4_wgmma_large_tiles.configs(m, n, k, fp8=True) if config.block_m > 128]


def fastest_fp8(m: int, n: int, k: int) -> nvfp4_wgmma_large_tiles.Config:
    """The configuration with the least estimate in FP8; of up to 128 rows, of which nothing is known, whole tiles."""
    if m <= 128:
        return nvfp4_wgmma_large_tiles.Config(128, 128, cut=0)
    return min(configs_fp8(m, n, k), key=lambda config: microseconds_fp8(config, m, n, k))
