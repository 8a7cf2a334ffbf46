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
    ("expanded", 0, 0, "whole"): (3.236, 0.288, 0.0, 0.0),
    ("fp8", 192, 128, "shares"): (4.871, 2.198, 2.835, 0.049),
    ("fp8", 192, 128, "tail of 64"): (2.977, 2.219, 1.958, 1.331),
    ("fp8", 192, 128, "whole"): (1.802, 2.219, 1.958, 0.0),
    ("fp8", 256, 64, "whole"): (1.844, 1.381, 2.183, 0.0),
    ("fp8", 256, 128, "cut"): (8.696, 2.631, 0.987, 1.038),
    ("fp8", 256, 128, "shares"): (4.828, 2.5, 3.573, 0.068),
    ("fp8", 256, 128, "tail of 128"): (3.275, 2.415, 2.102, 1.331),
    ("fp8", 256, 128, "tail of 64"): (3.275, 2.415, 2.102, 1.331),
    ("fp8", 256, 128, "whole"): (2.1, 2.415, 2.102, 0.0),
    ("fp8", 320, 128, "shares"): (4.89, 2.989, 6.565, 0.0),
    ("fp8", 320, 128, "tail of 64"): (2.565, 3.052, 2.778, 1.331),
    ("fp8", 320, 128, "whole"): (1.39, 3.052, 2.778, 0.0),
    ("large", 64, 128, "cut"): (4.841, 0.977, 0.0, 0.464),
    ("large", 64, 128, "shares"): (2.97, 0.918, 1.78, 0.151),
    ("large", 64, 128, "whole"): (1.303, 0.884, 1.648, 0.0),
    ("large", 64, 256, "cut"): (5.152, 1.824, 0.0, 0.767),
    ("large", 64, 256, "shares"): (0.0, 1.567, 6.156, 0.17),
    ("large", 64, 256, "whole"): (0.0, 1.437, 5.05, 0.0),
    ("large", 128, 128, "cut"): (5.167, 1.241, 0.115, 0.714),
    ("large", 128, 128, "shares"): (4.006, 1.153, 1.576, 0.168),
    ("large", 128, 128, "tail of 64"): (4.102, 1.173, 0.94, 0.884),
    ("large", 128, 128, "whole"): (2.454, 1.173, 0.94, 0.0),
    ("large", 128, 256, "cut"): (7.554, 2.284, 0.0, 2.804),
    ("large", 128, 256, "shares"): (4.824, 1.991, 4.181, 0.049),
    ("large", 128, 256, "tail of 64"): (7.494, 1.906, 2.436, 1.437),
    ("large", 128, 256, "whole"): (2.444, 1.906, 2.436, 0.0),
    ("large", 192, 128, "shares"): (4.329, 1.573, 2.405, 0.078),
    ("large", 192, 128, "tail of 64"): (3.212, 1.538, 1.715, 0.884),
    ("large", 192, 128, "whole"): (1.564, 1.538, 1.715, 0.0),
    ("large", 256, 64, "whole"): (2.005, 1.139, 1.823, 0.0),
    ("large", 256, 128, "cut"): (6.14, 2.127, 0.42, 1.236),
    ("large", 256, 128, "shares"): (4.073, 1.977, 3.063, 0.235),
    ("large", 256, 128, "tail of 128"): (3.097, 1.972, 1.607, 1.173),
    ("large", 256, 128, "tail of 64"): (3.805, 1.972, 1.607, 0.884),
    ("large", 256, 128, "whole"): (2.157, 1.972, 1.607, 0.0),
    ("large", 320, 128, "shares"): (4.866, 2.513, 4.875, 0.14),
    ("large", 320, 128, "tail of 64"): (3.318, 2.476, 2.354, 0.884),
    ("large", 320, 128, "whole"): (1.67, 2.476, 2.354, 0.0),
    ("split", 8, 64, "shared"): (1.604, 0.179, 0.491, 0.475),
    ("split", 8, 64, "whole"): (1.24, 0.148, 1.069, 0.0),
    ("split", 8, 128, "shared"): (1.372, 0.366, 0.962, 0.507),
    ("split", 8, 128, "whole"): (0.727, 0.261, 1.839, 0.0),
    ("split", 16, 64, "shared"): (1.692, 0.181, 0.595, 0.485),
    ("split", 16, 64, "whole"): (1.045, 0.154, 1.337, 0.0),
    ("split", 16, 128, "shared"): (1.446, 0.376, 1.348, 0.523),
    ("split", 16, 128, "whole"): (0.592, 0.28, 2.091, 0.0),
    ("split", 32, 64, "shared"): (2.329, 0.189, 0.933, 0.369),
    ("split", 32, 64, "whole"): (0.838, 0.163, 1.678, 0.0),
    ("split", 32, 128, "shared"): (1.624, 0.368, 1.69, 0.362),
    ("split", 32, 128, "whole"): (0.711, 0.295, 1.967, 0.0),
    ("split", 64, 64, "shared"): (1.626, 0.233, 1.179, 0.569),
    ("split", 64, 64, "whole"): (0.711, 0.199, 2.079, 0.0),
    ("split", 64, 128, "shared"): (2.558, 0.421, 1.043, 0.485),
    ("split", 64, 128, "whole"): (0.739, 0.358, 2.252, 0.0),
    ("split", 96, 64, "whole"): (0.931, 0.273, 2.302, 0.0),
    ("split", 96, 128, "whole"): (0.937, 0.504, 2.286, 0.0),
    ("split", 128, 64, "shared"): (1.048, 0.472, 1.74, 0.654),
    ("split", 128, 64, "whole"): (1.144, 0.298, 2.274, 0.0),
    ("split", 128, 128, "shared"): (2.153, 0.592, 1.768, 0.823),
    ("split", 128, 128, "whole"): (0.0, 0.514, 3.501, 0.0),
}

# Bytes a microsecond of quantizing x, of expanding a weight and of storing a result, and microseconds of a launch more.
_COPY, _LAUNCH = 2.9e6, 2.5


class Load(NamedTuple):
    """What the program with the most work does.

    Attributes:
        kind: kernel ("fp8" is the large one in FP8, "expanded" cuBLAS in FP8), rows of x and of the weight in a tile,
            and how tiles are shared out.
        steps: steps of the split kernel, groups of steps of the large one, of 128 columns each of cuBLAS.
        tiles: tiles of which it computes something; 0 for cuBLAS, whose results `beside_fp8` counts.
        parts: programs that compute one tile that is cut, or groups of steps of one of the tail; 0 where there are
            neither.
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
        waves = cdiv(tiles, SMS)
        return Load(_kind("split", config, "whole"), waves * steps, waves, 0)
    kernel, value_bytes = ("fp8", 1) if fp8 else ("large", 2)
    tiles = cdiv(m, config.block_m) * cdiv(n, config.block_n)
    groups = nvfp4_wgmma_large.groups_of(k, nvfp4_wgmma_large.STEP_BYTES // value_bytes)
    shares = nvfp4_wgmma_large.shares_of(config, tiles, groups, SMS)
    if shares:
        waves = tiles // SMS
        return Load(_kind(kernel, config, "shares"), waves * groups + cdiv(groups, shares), waves + 1, shares)
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
