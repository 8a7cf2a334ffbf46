# SPDX-License-Identifier: Apache-2.0
"""How long the NVFP4 GEMM takes on an H100 under a configuration: the choice for weights that nobody has measured.

The program with the most work decides: `launch + step * steps + tile * tiles + part * parts` microseconds. The four
numbers of each kind of tile are fitted to what was measured of every configuration on 31 weights
(benchmarks/results/nvfp4_configs_sm_90.json) by `python -m benchmarks._estimate_fit`, which also says how much slower
than the best the choice is for weights that are left out of the fit. What won at a weight of like size is a worse
guide: whether tiles fill the multiprocessors' last wave decides, and a few more columns change that.
"""

from collections.abc import Iterator
from typing import NamedTuple

from llm_quant_rocm.formats.nvfp4_wgmma import COLUMNS
from llm_quant_rocm.kernels import nvfp4_wgmma_large, nvfp4_wgmma_split
from llm_quant_rocm.kernels.sizes import cdiv

Config = nvfp4_wgmma_large.Config | nvfp4_wgmma_split.Config

_SMS = 132
# Bytes of x that the L2 cache holds beside the weight. Programs at different columns of more wait for memory: each of
# their steps took 1.3 to 1.8 times as long.
_CACHED, _UNCACHED_STEP = 32e6, 1.6
# Programs that share the steps of all tiles have so many each, or more.
_LEAST_STEPS = 8

# Microseconds (launch, step, tile, part) by kernel, tile and how tiles are shared out.
_TIMES: dict[tuple[str, int, int, str], tuple[float, float, float, float]] = {
    ("large", 64, 128, "cut"): (4.519, 1.257, 0.0, 0.637),
    ("large", 64, 128, "shares"): (4.981, 1.142, 0.0, 0.12),
    ("large", 64, 128, "whole"): (0.938, 1.13, 2.107, 0.0),
    ("large", 64, 256, "cut"): (5.547, 2.275, 0.0, 0.91),
    ("large", 64, 256, "shares"): (6.701, 1.879, 0.0, 0.171),
    ("large", 64, 256, "whole"): (0.0, 1.857, 5.385, 0.0),
    ("large", 128, 128, "cut"): (4.713, 1.602, 0.0, 0.916),
    ("large", 128, 128, "shares"): (5.925, 1.443, 0.0, 0.161),
    ("large", 128, 128, "whole"): (1.879, 1.518, 1.376, 0.0),
    ("large", 128, 256, "cut"): (6.441, 2.906, 0.0, 2.15),
    ("large", 128, 256, "shares"): (9.247, 2.435, 0.0, 0.155),
    ("large", 128, 256, "whole"): (1.105, 2.464, 4.005, 0.0),
    ("large", 256, 128, "cut"): (5.02, 2.794, 1.334, 1.575),
    ("large", 256, 128, "shares"): (8.31, 2.405, 0.0, 0.242),
    ("large", 256, 128, "whole"): (0.141, 2.553, 3.048, 0.0),
    ("split", 8, 64, "shared"): (2.005, 0.214, 0.691, 0.456),
    ("split", 8, 64, "whole"): (0.681, 0.17, 1.93, 0.0),
    ("split", 8, 128, "shared"): (1.485, 0.45, 1.136, 0.525),
    ("split", 8, 128, "whole"): (0.0, 0.314, 2.671, 0.0),
    ("split", 16, 64, "shared"): (2.114, 0.217, 0.823, 0.475),
    ("split", 16, 64, "whole"): (0.534, 0.181, 2.167, 0.0),
    ("split", 16, 128, "shared"): (1.542, 0.468, 1.534, 0.523),
    ("split", 16, 128, "whole"): (0.0, 0.342, 2.792, 0.0),
    ("split", 32, 64, "shared"): (2.038, 0.23, 1.178, 0.482),
    ("split", 32, 64, "whole"): (0.602, 0.197, 2.461, 0.0),
    ("split", 32, 128, "shared"): (2.071, 0.445, 1.401, 0.59),
    ("split", 32, 128, "whole"): (0.0, 0.367, 2.837, 0.0),
    ("split", 64, 64, "shared"): (1.413, 0.293, 1.532, 0.626),
    ("split", 64, 64, "whole"): (0.751, 0.243, 2.687, 0.0),
    ("split", 64, 128, "shared"): (1.96, 0.525, 1.52, 0.672),
    ("split", 64, 128, "whole"): (0.0, 0.449, 3.236, 0.0),
    ("split", 128, 64, "shared"): (0.334, 0.598, 2.101, 0.731),
    ("split", 128, 64, "whole"): (0.182, 0.37, 3.235, 0.0),
    ("split", 128, 128, "shared"): (1.584, 0.755, 2.215, 0.927),
    ("split", 128, 128, "whole"): (0.0, 0.645, 3.766, 0.0),
}

# The same in FP8, of tiles of 256 x 128 by how they are shared out; a step has twice as many columns. Fitted to 36
# products of benchmarks/results/nvfp4_gemm_sm_90.json and nvfp4_gemm_untuned_sm_90.json, less what quantizing x takes:
# off by 3% in the mean, by 6% at most.
_FP8_TIMES = {"whole": (0.0, 3.37, 3.57, 0.0), "cut": (10.0, 3.62, 3.57, 0.0), "shares": (6.6, 3.37, 3.57, 0.0)}


class Load(NamedTuple):
    """What the program with the most work does.

    Attributes:
        kind: kernel, rows of x and of the weight in a tile, and how tiles are shared out.
        steps: steps of the split kernel, groups of steps of the large one.
        tiles: tiles of which it computes something.
        parts: programs that compute one tile; 0 where none is cut.
    """

    kind: tuple[str, int, int, str]
    steps: float
    tiles: float
    parts: float


def load_of(config: Config, m: int, n: int, k: int, value_bytes: int = 2) -> Load:
    """What `config` gives the busiest program to do, on 132 multiprocessors, for x of values of so many bytes."""
    if isinstance(config, nvfp4_wgmma_split.Config):
        tiles, steps = config.tiles(m, n), cdiv(k, 2 * COLUMNS)
        if config.programs:
            share = cdiv(tiles * steps, config.programs)
            touched = _touched(tiles, steps, config.programs)
            return Load(_kind("split", config, "shared"), share, touched, max(1, config.programs / tiles))
        waves = cdiv(tiles, _SMS)
        return Load(_kind("split", config, "whole"), waves * steps, waves, 0)
    tiles = cdiv(m, config.block_m) * cdiv(n, config.block_n)
    groups = nvfp4_wgmma_large.groups_of(k, nvfp4_wgmma_large.STEP_BYTES // value_bytes)
    shares = nvfp4_wgmma_large.shares_of(config, tiles, groups, _SMS)
    if shares:
        waves = tiles // _SMS
        return Load(_kind("large", config, "shares"), waves * groups + cdiv(groups, shares), waves + 1, shares)
    whole = nvfp4_wgmma_large.whole_tiles(tiles, groups, _SMS, config.cut)
    if whole == tiles:
        waves = cdiv(tiles, _SMS)
        return Load(_kind("large", config, "whole"), waves * groups, waves, 0)
    share = cdiv((tiles - whole) * groups, _SMS)
    slower = _UNCACHED_STEP if config.cut == 2 and value_bytes * m * k > _CACHED else 1
    steps = whole // _SMS * groups + share * slower
    return Load(_kind("large", config, "cut"), steps, whole // _SMS, _SMS / (tiles - whole))


def _kind(kernel: str, config: Config, sharing: str) -> tuple[str, int, int, str]:
    return kernel, config.block_m, config.block_n, sharing


def _touched(tiles: int, steps: int, programs: int) -> int:
    """The most tiles of which one program has a stretch, where they share all steps evenly."""
    each, longer = divmod(tiles * steps, programs)
    begins = [program * each + min(program, longer) for program in range(programs + 1)]
    return max(cdiv(end, steps) - begin // steps for begin, end in zip(begins, begins[1:], strict=False))


def microseconds(config: Config, m: int, n: int, k: int) -> float:
    """Of a product of x [m, k] and a weight [n, k]."""
    load = load_of(config, m, n, k)
    return _sum(_TIMES[load.kind], load)


def microseconds_fp8(config: nvfp4_wgmma_large.Config, m: int, n: int, k: int) -> float:
    """Of a product of E4M3 x [m, k] and a weight [n, k], in tiles of 256 x 128; x is quantized already."""
    load = load_of(config, m, n, k, value_bytes=1)
    return _sum(_FP8_TIMES[load.kind[3]], load)


def _sum(times: tuple[float, float, float, float], load: Load) -> float:
    launch, step, tile, part = times
    return launch + step * load.steps + tile * load.tiles + part * load.parts


def configs(m: int, n: int, k: int) -> Iterator[Config]:
    """Configurations of both kernels that could be the fastest, and that no sum of parts makes slow for sure."""
    for whole in nvfp4_wgmma_split.configs(m):
        if _SMS // 3 <= whole.tiles(m, n) <= 2 * _SMS:
            yield whole
    for shared in nvfp4_wgmma_split.shared_configs(m, n):
        if shared.tiles(m, n) * cdiv(k, 2 * COLUMNS) >= _LEAST_STEPS * shared.programs:
            yield shared
    yield from nvfp4_wgmma_large.configs(m, n, k)


def fastest(m: int, n: int, k: int) -> Config | None:
    """The configuration with the least estimate; None for few rows of a weight too small for these kernels."""
    return min(configs(m, n, k), key=lambda config: microseconds(config, m, n, k), default=None)


def configs_fp8(m: int, n: int, k: int) -> list[nvfp4_wgmma_large.Config]:
    """Configurations in FP8, of more than 128 rows, that could be the fastest."""
    return [config for config in nvfp4_wgmma_large.configs(m, n, k, fp8=True) if config.block_m > 128]


def fastest_fp8(m: int, n: int, k: int) -> nvfp4_wgmma_large.Config:
    """The configuration with the least estimate in FP8; of up to 128 rows, of which nothing is known, whole tiles."""
    if m <= 128:
        return nvfp4_wgmma_large.Config(128, 128, cut=0)
    return min(configs_fp8(m, n, k), key=lambda config: microseconds_fp8(config, m, n, k))
