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
    ("expanded", 0, 0, "whole"): (2.96, 0.294, 0.995, 0.0),
    ("fp8", 192, 128, "shares"): (4.045, 2.213, 3.188, 0.066),
    ("fp8", 192, 128, "whole"): (1.88, 2.148, 2.545, 0.0),
    ("fp8", 256, 64, "whole"): (1.947, 1.4, 1.4, 0.0),
    ("fp8", 256, 128, "cut"): (8.786, 2.64, 1.396, 0.99),
    ("fp8", 256, 128, "shares"): (4.384, 2.527, 3.76, 0.098),
    ("fp8", 256, 128, "whole"): (1.947, 2.403, 2.623, 0.0),
    ("fp8", 320, 128, "shares"): (4.074, 3.021, 7.032, 0.0),
    ("fp8", 320, 128, "whole"): (1.344, 3.111, 3.138, 0.0),
    ("large", 64, 128, "cut"): (4.385, 0.977, 0.0, 0.491),
    ("large", 64, 128, "shares"): (2.612, 0.903, 1.852, 0.171),
    ("large", 64, 128, "whole"): (1.399, 0.917, 1.382, 0.0),
    ("large", 64, 256, "cut"): (4.846, 1.845, 0.0, 0.791),
    ("large", 64, 256, "shares"): (0.0, 1.538, 5.993, 0.2),
    ("large", 64, 256, "whole"): (0.0, 1.425, 4.936, 0.0),
    ("large", 128, 128, "cut"): (4.903, 1.235, 0.143, 0.701),
    ("large", 128, 128, "shares"): (3.255, 1.157, 1.927, 0.188),
    ("large", 128, 128, "whole"): (2.341, 1.176, 0.97, 0.0),
    ("large", 128, 256, "cut"): (7.419, 2.29, 0.0, 2.516),
    ("large", 128, 256, "shares"): (4.095, 2.005, 4.616, 0.067),
    ("large", 128, 256, "whole"): (2.334, 1.903, 2.52, 0.0),
    ("large", 192, 128, "shares"): (4.148, 1.559, 2.714, 0.028),
    ("large", 192, 128, "whole"): (1.49, 1.527, 1.665, 0.0),
    ("large", 256, 64, "whole"): (2.013, 1.2, 1.4, 0.0),
    ("large", 256, 128, "cut"): (6.182, 2.132, 0.604, 1.235),
    ("large", 256, 128, "shares"): (3.773, 1.991, 3.218, 0.259),
    ("large", 256, 128, "whole"): (2.013, 1.983, 1.619, 0.0),
    ("large", 320, 128, "shares"): (4.595, 2.513, 5.291, 0.103),
    ("large", 320, 128, "whole"): (1.205, 2.481, 2.554, 0.0),
    ("split", 8, 64, "shared"): (1.779, 0.181, 0.466, 0.415),
    ("split", 8, 64, "whole"): (1.241, 0.148, 1.066, 0.0),
    ("split", 8, 128, "shared"): (1.281, 0.367, 0.905, 0.636),
    ("split", 8, 128, "whole"): (0.816, 0.261, 1.804, 0.0),
    ("split", 16, 64, "shared"): (1.758, 0.179, 0.612, 0.446),
    ("split", 16, 64, "whole"): (0.966, 0.154, 1.373, 0.0),
    ("split", 16, 128, "shared"): (1.79, 0.373, 1.283, 0.433),
    ("split", 16, 128, "whole"): (0.629, 0.279, 2.096, 0.0),
    ("split", 32, 64, "shared"): (2.406, 0.186, 0.886, 0.381),
    ("split", 32, 64, "whole"): (0.805, 0.164, 1.637, 0.0),
    ("split", 32, 128, "shared"): (1.6, 0.366, 1.574, 0.418),
    ("split", 32, 128, "whole"): (0.647, 0.296, 1.922, 0.0),
    ("split", 64, 64, "shared"): (1.44, 0.235, 1.228, 0.59),
    ("split", 64, 64, "whole"): (0.712, 0.2, 2.058, 0.0),
    ("split", 64, 128, "shared"): (2.054, 0.424, 1.172, 0.562),
    ("split", 64, 128, "whole"): (0.711, 0.358, 2.257, 0.0),
    ("split", 96, 64, "whole"): (0.927, 0.274, 2.138, 0.0),
    ("split", 96, 128, "whole"): (0.748, 0.505, 2.239, 0.0),
    ("split", 128, 64, "shared"): (0.947, 0.474, 1.793, 0.623),
    ("split", 128, 64, "whole"): (0.975, 0.299, 2.286, 0.0),
    ("split", 128, 128, "shared"): (2.02, 0.596, 1.939, 0.755),
    ("split", 128, 128, "whole"): (0.0, 0.519, 3.333, 0.0),
}

# Bytes a microsecond of quantizing x and of expanding a weight, and microseconds of a launch more.
_COPY, _LAUNCH = 2.9e6, 2.5


class Load(NamedTuple):
    """What the program with the most work does.

    Attributes:
        kind: kernel ("fp8" is the large one in FP8, "expanded" cuBLAS in FP8), rows of x and of the weight in a tile,
            and how tiles are shared out.
        steps: steps of the split kernel, groups of steps of the large one, of 128 columns each of cuBLAS.
        tiles: tiles of which it computes something.
        parts: programs that compute one tile; 0 where none is cut.
    """

    kind: tuple[str, int, int, str]
    steps: float
    tiles: float
    parts: float


def load_of(config: Config | Fp8Config, m: int, n: int, k: int, fp8: bool = False) -> Load:
    """What `config` gives the busiest program to do, on 132 multiprocessors."""
    if isinstance(config, Expanded):
        waves = ptpc_wgmma.waves(ptpc_wgmma.default_config(m, n), m, n)
        return Load(("expanded", 0, 0, "whole"), waves * k / 128, waves, 0)
    if isinstance(config, nvfp4_wgmma_split.Config):
        tiles, steps = config.tiles(m, n), cdiv(k, 2 * COLUMNS)
        if config.programs:
            share = cdiv(tiles * steps, config.programs)
            touched = _touched(tiles, steps, config.programs)
            return Load(_kind("split", config, "shared"), share, touched, max(1, config.programs / tiles))
        waves = cdiv(tiles, SMS)
        return Load(_kind("split", config, "whole"), waves * steps, waves, 0)
    kernel, value_bytes = ("fp8", 1) if fp8 else ("large", 2)
    tiles = cdiv(m, config.block_m) * cdiv(n, config.block_n)
    groups = nvfp4_wgmma_large.groups_of(k, nvfp4_wgmma_large.STEP_BYTES // value_bytes)
    shares = nvfp4_wgmma_large.shares_of(config, tiles, groups, SMS)
    if shares:
        waves = tiles // SMS
        return Load(_kind(kernel, config, "shares"), waves * groups + cdiv(groups, shares), waves + 1, shares)
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
    return before_fp8(config, m, n, k) + _microseconds(load_of(config, m, n, k, fp8=True))


def before_fp8(config: Fp8Config, m: int, n: int, k: int) -> float:
    """Microseconds before the product in FP8: those of quantizing x, and of expanding the weight for cuBLAS, of which
    9/16 of a byte of each value are read and one is written."""
    expanding = n * k * 25 / 16 / _COPY + _LAUNCH if isinstance(config, Expanded) else 0
    return 3 * m * k / _COPY + _LAUNCH + expanding


def _microseconds(load: Load) -> float:
    return total(_TIMES[load.kind], load)


def total(times: Sequence[float], load: Load) -> float:
    """Microseconds of `load`, of whose kind `times` are (launch, step, tile, part)."""
    launch, step, tile, part = times
    return (launch + step * load.steps + tile * load.tiles + part * load.parts) ** SLOWING


def configs(m: int, n: int, k: int) -> Iterator[Config]:
    """Configurations of both kernels that could be the fastest, and that no sum of parts makes slow for sure."""
    for whole in nvfp4_wgmma_split.configs(m):
        if SMS // 3 <= whole.tiles(m, n) <= 2 * SMS:
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
