# SPDX-License-Identifier: Apache-2.0
"""Fits kernels/nvfp4_estimate.py to results/nvfp4_configs_sm_90.json and nvfp4_configs_fp8_h200_sm_90.json, with 8 rows
and for tiles that came later to nvfp4_configs_h200_sm_90.json, and prints its table.

python -m benchmarks._estimate_fit
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks._markdown import load
from llm_quant_rocm.kernels import nvfp4_estimate
from llm_quant_rocm.kernels.nvfp4_slices import Expanded
from llm_quant_rocm.kernels.nvfp4_wgmma_large_tiles import Config as Large
from llm_quant_rocm.kernels.nvfp4_wgmma_split_tiles import Config as Split

EXACT, FP8 = "nvfp4_configs_sm_90.json", "nvfp4_configs_fp8_h200_sm_90.json"
# Not fitted but with 8 rows, of which all configurations are other kernels now than an H100 has measured, and for tiles
# that no H100 has measured: by them the choice, which an H100's figures decide, is seen on another GPU, and with more
# rows.
H200, H200_MANY = "nvfp4_configs_h200_sm_90.json", "nvfp4_configs_h200_many_rows_sm_90.json"
# Of a fit by least squares of relative errors, so many times again with those down that were far off.
ROUNDS, NEAR = 5, 0.05
# The estimate of a weight is that of a fit without it and every so many others.
FOLDS = 6
# What nvfp4_configs.py calls the kinds of configurations.
KERNELS = {"large": Large, "split": Split, "expanded": Expanded}

Row = dict[str, Any]
Config = nvfp4_estimate.Config | nvfp4_estimate.Fp8Config
Times = dict[tuple[str, int, int, str], tuple[float, ...]]


class Chosen(NamedTuple):
    """What the estimate chooses for a row, its microseconds as estimated and as measured, and those of the best."""

    row: Row
    config: Config
    estimated: float
    measured: float
    best: float


def rows_of(*files: str) -> list[Row]:
    """The rows of these files, each with `fp8`: whether its products are in FP8."""
    return [row | {"fp8": file == FP8} for file in files for row in load(file)["rows"]]


def fitted_rows() -> list[Row]:
    """Those that the exact product's estimate is fitted to."""
    return [*(row for row in rows_of(H200) if row["m"] == 8), *rows_of(EXACT)]


def later_rows() -> list[Row]:
    """What that estimate is fitted to beside `fitted_rows`: an H200's figures of the kernel for many rows in tiles that
    no H100 has measured. It is as fast on both: the arithmetic takes its time."""
    known = {tuple(fields[:2]) for row in rows_of(EXACT) for fields in row["us"]}
    found = []
    for row in rows_of(H200):
        later = [fields for fields in row["us"] if fields[0] == "large" and tuple(fields[:2]) not in known]
        found += [row | {"us": later}] if later else []
    return found


def config_of(fields: Sequence[Any]) -> Config:
    """What nvfp4_configs.py described."""
    kernel, *numbers = fields
    return KERNELS[kernel](*numbers)


def measured(row: Row) -> Iterator[tuple[Config, float]]:
    for *fields, us in row["us"]:
        yield config_of(fields), us


def beside(row: Row) -> float:
    """Microseconds of `row` that the table does not have."""
    return nvfp4_estimate.quantizing(row["m"], row["k"]) if row["fp8"] else 0


def fit(rows: Sequence[Row]) -> Times:
    """(launch, step, tile, part) of each kind of tile, as `nvfp4_estimate.microseconds` adds them up.

    Before a tail, tiles are whole: a tile takes as long as where all are. Not a step: kernels with a tail are compiled
    otherwise, and in FP8 their products are not queued. Few were measured that have many tiles."""
    loads, times = defaultdict(list), defaultdict(list)
    for row in rows:
        for config, us in measured(row):
            kind, *load_ = nvfp4_estimate.load_of(config, row["m"], row["n"], row["k"], row["fp8"])
            loads[kind].append([1, *load_])
            times[kind].append((us - beside(row)) ** (1 / nvfp4_estimate.SLOWING))
    found: Times = {}
    # Those with a tail after the whole ones, of which they take the time of a tile.
    for kind in sorted(loads, key=lambda kind: ("tail" in kind[3], kind)):
        tile = found[(*kind[:3], "whole")][2] if "tail" in kind[3] else None
        found[kind] = _least_squares(np.array(loads[kind], float), np.array(times[kind]), tile)
    return dict(sorted(found.items()))


def _least_squares(loads: np.ndarray, times: np.ndarray, tile: float | None) -> tuple[float, ...]:
    """The four numbers; where the time of a `tile` is known, the other three."""
    result, own = np.zeros(4), [0, 1, 2, 3]
    if tile is not None:
        result[2] = tile
        own.remove(2)
    rest = times - loads @ result
    # A column that is the same everywhere has no time of its own, and none is negative.
    used = [i for i in own if i == 0 or np.ptp(loads[:, i]) > 0]
    while True:
        weight = 1 / times
        for _ in range(ROUNDS):
            found, *_ = np.linalg.lstsq(loads[:, used] * weight[:, None], rest * weight, rcond=None)
            errors = np.abs((loads[:, used] @ found - rest) / times)
            weight = 1 / times / np.sqrt(np.maximum(NEAR, errors))
        if found.min() >= 0:
            break
        del used[int(found.argmin())]
    result[used] = found
    return tuple(round(float(value), 3) for value in result)


def chosen(row: Row, times: Times) -> Chosen:
    """By the estimate with `times`."""
    us = dict(measured(row))

    def estimate(config: Config) -> float:
        work = nvfp4_estimate.load_of(config, row["m"], row["n"], row["k"], row["fp8"])
        return beside(row) + nvfp4_estimate.total(times[work.kind], work)

    config = min(us, key=estimate)
    return Chosen(row, config, estimate(config), us[config], min(us.values()))


def left_out(rows: Sequence[Row]) -> list[Chosen]:
    """Of every row, by a fit that knows nothing of its weight."""
    layers = list(dict.fromkeys(row["layer"] for row in rows))
    found = []
    for fold in range(FOLDS):
        unseen = set(layers[fold::FOLDS])
        times = fit([row for row in rows if row["layer"] not in unseen])
        found += [chosen(row, times) for row in rows if row["layer"] in unseen]
    return found


def main() -> None:
    for (kernel, block_m, block_n, sharing), times in fit([*fitted_rows(), *later_rows(), *rows_of(FP8)]).items():
        print(f'    ("{kernel}", {block_m}, {block_n}, "{sharing}"): ({", ".join(map(str, times))}),')
    for product, rows in (("exact", fitted_rows()), ("FP8", rows_of(FP8))):
        slower = [each.measured / each.best for each in left_out(rows)]
        mean, most = np.mean(slower), max(slower)
        print(f"{product}, left out: mean {mean:.3f}, 95% {np.quantile(slower, 0.95):.3f}, most {most:.2f}")


if __name__ == "__main__":
    main()
