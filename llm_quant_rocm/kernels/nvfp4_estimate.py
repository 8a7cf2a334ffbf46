# SPDX-License-Identifier: Apache-2.0
"""How long the NVFP4 GEMM takes on an H100 under a configuration: the choice for weights that nobody has measured.

The program with the most work decides: `launch + step * steps + tile * tiles + part * parts` microseconds, to the power
of `SLOWING`. The four numbers of each kind of tile are fitted to what was measured of every configuration on 31 weights
(benchmarks/results/nvfp4_configs_sm_90.json and, in FP8, nvfp4_configs_fp8_sm_90.json) by
`python -m benchmarks._estimate_fit`, which also says how much slower than the best the choice is for weights that are
left out of the fit. What won at a weight of like size is a worse guide: whether tiles fill the multiprocessors' last
wave decides, and a few more columns change that.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from llm_quant_rocm.formats.nvfp4_wgmma import COLUMNS
from llm_quant_rocm.kernels import nvfp4_wgmma_large, nvfp4_wgmma_split, ptpc_wgmma
from llm_quant_rocm.kernels.hopper import SMS
from llm_quant_rocm.kernels.nvfp4_slices import Expanded
from llm_quant_rocm.kernels.sizes import cdiv

Config = nvfp4_wgmma_large.Config | nvfp4_wgmma_split.Config
# How the product in FP8 is computed.
Fp8Config = nvfp4_wgmma_large.Config | Expanded

# Bytes of x that the L2 cache holds beside the weight. Programs at different columns of more wait for memory: each of
# their steps took 1.3 to 1.8 times as long.
_CACHED, _UNCACHED_STEP = 32e6, 1.6
# Programs that share the steps of all tiles have so many each, or more.
_LEAST_STEPS = 8

# What takes long takes longer than its parts: a product of a millisecond was an eighth slower than the steps of short
# ones add up to, presumably as an H100 lowers its clock under load. Of the powers tried, this left the least error.
SLOWING = 1.05

# Microseconds (launch, step, tile, part) by kernel, tile and how tiles are shared out.
_TIMES: dict[tuple[str, int, int, str], tuple[float, float, float, float]] = {
    ("expanded", 0, 0, "whole"): (3.034, 0.292, 0.0, 0.0),
    ("fp8", 192, 128, "shares"): (0.944, 2.258, 2.892, 4.658),
    ("fp8", 192, 128, "whole"): (1.174, 2.224, 1.919, 0.0),
    ("fp8", 256, 64, "whole"): (1.15, 1.39, 2.175, 0.0),
    ("fp8", 256, 128, "cut"): (8.284, 2.665, 1.293, 1.026),
    ("fp8", 256, 128, "shares"): (0.574, 2.56, 3.921, 4.788),
    ("fp8", 256, 128, "whole"): (1.441, 2.452, 1.983, 0.0),
    ("fp8", 320, 128, "shares"): (0.0, 3.071, 6.718, 5.924),
    ("fp8", 320, 128, "whole"): (0.557, 3.129, 2.696, 0.0),
    ("half", 8, 64, "cluster"): (2.386, 0.151, 0.076, 0.0),
    ("half", 8, 64, "whole"): (1.796, 0.166, 0.441, 0.0),
    ("half", 16, 64, "cluster"): (2.063, 0.154, 0.354, 0.0),
    ("half", 16, 64, "whole"): (1.515, 0.165, 0.586, 0.0),
    ("half", 32, 64, "cluster"): (1.715, 0.171, 0.483, 0.0),
    ("half", 32, 64, "whole"): (1.406, 0.181, 0.569, 0.0),
    ("half", 64, 64, "cluster"): (2.247, 0.223, 0.26, 0.0),
    ("half", 64, 64, "whole"): (1.492, 0.224, 0.617, 0.0),
    ("large", 64, 128, "cut"): (4.096, 1.006, 0.0, 0.516),
    ("large", 64, 128, "shares"): (1.889, 0.932, 1.685, 2.003),
    ("large", 64, 128, "whole"): (0.998, 0.922, 1.673, 0.0),
    ("large", 64, 256, "cut"): (4.416, 1.864, 0.0, 0.802),
    ("large", 64, 256, "shares"): (0.0, 1.613, 4.716, 2.898),
    ("large", 64, 256, "whole"): (0.0, 1.467, 4.614, 0.0),
    ("large", 128, 128, "cut"): (4.594, 1.26, 0.397, 0.722),
    ("large", 128, 128, "shares"): (1.783, 1.179, 1.901, 2.722),
    ("large", 128, 128, "whole"): (2.158, 1.183, 0.96, 0.0),
    ("large", 128, 256, "cut"): (6.999, 2.335, 0.0, 2.797),
    ("large", 128, 256, "shares"): (1.034, 2.061, 4.505, 4.487),
    ("large", 128, 256, "whole"): (1.761, 1.914, 2.637, 0.0),
    ("large", 192, 128, "shares"): (0.448, 1.586, 2.757, 4.602),
    ("large", 192, 128, "whole"): (1.005, 1.532, 1.722, 0.0),
    ("large", 256, 64, "whole"): (0.976, 1.153, 2.041, 0.0),
    ("large", 256, 128, "cut"): (5.541, 2.167, 0.787, 1.253),
    ("large", 256, 128, "shares"): (0.208, 2.023, 3.522, 4.921),
    ("large", 256, 128, "tail of 128"): (3.942, 2.125, 1.0, 1.137),
    ("large", 256, 128, "tail of 64"): (2.82, 2.136, 1.078, 0.982),
    ("large", 256, 128, "whole"): (1.644, 2.019, 1.542, 0.0),
    ("large", 320, 128, "shares"): (0.0, 2.573, 4.769, 6.981),
    ("large", 320, 128, "whole"): (0.938, 2.53, 2.395, 0.0),
    ("split", 8, 64, "cluster"): (1.585, 0.118, 1.405, 0.0),
    ("split", 8, 64, "shared"): (1.503, 0.186, 0.5, 0.468),
    ("split", 8, 64, "whole"): (1.167, 0.149, 1.121, 0.0),
    ("split", 8, 128, "shared"): (0.962, 0.374, 1.103, 0.585),
    ("split", 8, 128, "whole"): (0.847, 0.261, 1.78, 0.0),
    ("split", 16, 64, "cluster"): (1.554, 0.126, 1.5, 0.0),
    ("split", 16, 64, "shared"): (1.601, 0.185, 0.665, 0.468),
    ("split", 16, 64, "whole"): (1.076, 0.154, 1.311, 0.0),
    ("split", 16, 128, "shared"): (1.336, 0.385, 1.464, 0.47),
    ("split", 16, 128, "whole"): (0.687, 0.278, 2.099, 0.0),
    ("split", 32, 64, "cluster"): (1.718, 0.139, 1.715, 0.0),
    ("split", 32, 64, "shared"): (2.311, 0.19, 0.919, 0.378),
    ("split", 32, 64, "whole"): (0.803, 0.165, 1.621, 0.0),
    ("split", 32, 128, "shared"): (1.559, 0.37, 1.584, 0.416),
    ("split", 32, 128, "whole"): (0.555, 0.297, 1.973, 0.0),
    ("split", 64, 64, "cluster"): (1.318, 0.183, 1.987, 0.139),
    ("split", 64, 64, "shared"): (1.513, 0.24, 1.151, 0.571),
    ("split", 64, 64, "whole"): (0.665, 0.201, 2.049, 0.0),
    ("split", 64, 128, "shared"): (1.98, 0.429, 1.217, 0.558),
    ("split", 64, 128, "whole"): (0.468, 0.361, 2.368, 0.0),
    ("split", 96, 64, "whole"): (0.846, 0.276, 2.255, 0.0),
    ("split", 96, 128, "whole"): (0.661, 0.509, 2.412, 0.0),
    ("split", 128, 64, "cluster"): (0.721, 0.293, 2.228, 0.418),
    ("split", 128, 64, "shared"): (1.07, 0.478, 1.631, 0.632),
    ("split", 128, 64, "whole"): (0.941, 0.3, 2.323, 0.0),
    ("split", 128, 128, "shared"): (1.874, 0.608, 1.816, 0.808),
    ("split", 128, 128, "whole"): (0.0, 0.52, 3.422, 0.0),
}

# Bytes a microsecond of quantizing x, of expanding a weight and of storing a result, and microseconds of a launch more.
_COPY, _LAUNCH = 2.9e6, 2.5


class Load(NamedTuple):
    """What the program with the most work does.

    Attributes:
        kind: kernel ("half" is the split one with two consumers, "fp8" the large one in FP8, "expanded" cuBLAS in FP8),
            rows of x and of the weight in a tile, and how tiles are shared out.
        steps: steps of the split kernel, groups of steps of the large one, of 128 columns each of cuBLAS.
        tiles: tiles of which it computes something, or with two consumers its multiprocessor; 0 for cuBLAS, whose
            results `beside_fp8` counts.
        parts: programs that compute one tile that is cut or a cluster's; of tiles with `shares`, how much of the GPU
            exchanges parts, which the L2 cache limits; of a tail, groups of steps of one of its tiles. Else 0.
    """

    kind: tuple[str, int, int, str]
    steps: float
    tiles: float
    parts: float


def load_of(config: Config | Fp8Config, m: int, n: int, k: int, fp8: bool = False) -> Load:
    """What `config` gives the busiest program to do, on 132 multiprocessors."""
    if isinstance(config, Expanded):
        waves = ptpc_wgmma.waves(ptpc_wgmma.default_config(m, n), m, n)
        return Load(("expanded", 0, 0, "whole"), waves * k / 128, 0, 0)
    if isinstance(config, nvfp4_wgmma_split.Config):
        tiles, steps = config.tiles(m, n), cdiv(k, 2 * COLUMNS)
        if config.programs:
            share = cdiv(tiles * steps, config.programs)
            touched = _touched(tiles, steps, config.programs)
            return Load(_kind("split", config, "shared"), share, touched, max(1, config.programs / tiles))
        kernel = "split" if config.consumers == 4 else "half"
        if config.cluster > 1:
            waves = cdiv(tiles, nvfp4_wgmma_split.CLUSTERS[config.cluster])
            return Load(_kind(kernel, config, "cluster"), waves * cdiv(steps, config.cluster), waves, config.cluster)
        waves = cdiv(tiles, SMS)
        return Load(_kind(kernel, config, "whole"), waves * steps, waves, 0)
    kernel, value_bytes = ("fp8", 1) if fp8 else ("large", 2)
    tiles = cdiv(m, config.block_m) * cdiv(n, config.block_n)
    groups = nvfp4_wgmma_large.groups_of(k, nvfp4_wgmma_large.STEP_BYTES // value_bytes)
    shares = nvfp4_wgmma_large.shares_of(config, tiles, groups, SMS)
    if shares:
        waves = tiles // SMS
        exchanging = tiles % SMS * shares / SMS
        return Load(_kind(kernel, config, "shares"), waves * groups + cdiv(groups, shares), waves + 1, exchanging)
    if tail := nvfp4_wgmma_large.tail_of(config, m, tiles, SMS):
        waves = tiles // SMS
        return Load(_kind(kernel, config, f"tail of {tail}"), waves * groups, waves, groups)
    whole = nvfp4_wgmma_large.whole_tiles(tiles, groups, SMS, config.cut)
    if whole == tiles:
        waves = cdiv(tiles, SMS)
        return Load(_kind(kernel, config, "whole"), waves * groups, waves, 0)
    share = cdiv((tiles - whole) * groups, SMS)
    slower = _UNCACHED_STEP if config.cut == 2 and value_bytes * m * k > _CACHED else 1
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
    return beside_fp8(config, m, n, k) + _microseconds(load_of(config, m, n, k, fp8=True))


def beside_fp8(config: Fp8Config, m: int, n: int, k: int) -> float:
    """Microseconds beside those of the steps in FP8: of quantizing x and, for cuBLAS, of expanding the weight, of which
    9/16 of a byte of each value are read and one is written, and of storing the result, which it does after a tile's
    steps, not meanwhile: with few columns in K that takes longer than they do."""
    quantizing = 3 * m * k / _COPY + _LAUNCH
    if not isinstance(config, Expanded):
        return quantizing
    return quantizing + (n * k * 25 / 16 + 2 * m * n) / _COPY + _LAUNCH


def _microseconds(load: Load) -> float:
    return total(_TIMES[load.kind], load)


def total(times: Sequence[float], load: Load) -> float:
    """Microseconds of `load`, of whose kind `times` are (launch, step, tile, part)."""
    launch, step, tile, part = times
    return (launch + step * load.steps + tile * load.tiles + part * load.parts) ** SLOWING


def configs(m: int, n: int, k: int) -> Iterator[Config]:
    """Configurations of both kernels that could be the fastest, and that no sum of parts makes slow for sure."""
    for whole in nvfp4_wgmma_split.configs(m):
        if SMS // 3 <= whole.tiles(m, n) <= 2 * SMS * (4 // whole.consumers):
            yield whole
    for cluster in nvfp4_wgmma_split.cluster_configs(m):
        # A multiprocessor has one program or, with two consumers, two; and each consumer a step.
        programs = cluster.tiles(m, n) * cluster.cluster
        if SMS // 3 <= programs <= SMS * (4 // cluster.consumers) and k > cluster.cluster * cluster.split_k * COLUMNS:
            yield cluster
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
