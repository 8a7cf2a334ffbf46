# SPDX-License-Identifier: Apache-2.0
"""How everything here is timed on a GPU: by the tuner, and by the benchmarks.

Times are of CUDA-graph replays, so that launches cost what they cost in a served model, and of rotating operands, so
that no call finds its weight in the L2 cache. A figure is the median over replays of the time of one call. Variants
of one row are timed in turns in the same process, so that a drift of the clock meets all of them.
"""

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from llm_quant_rocm import hardware

ROTATE_BYTES = 256 * 2**20  # five times the L2 cache of an H100, as much as the last cache of an MI300X
_SIZE = 8192  # rows and columns of the products whose rate is measured


def copies(bytes_each: int) -> int:
    """How many copies of an operand to rotate so that none is found in L2."""
    return max(2, -(-ROTATE_BYTES // bytes_each))


def capture(calls: Sequence[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
    """One graph of all `calls`, each run once before (compilation must not be captured)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def time_variants(
    variants: Mapping[str, Sequence[Callable[[], Any]]], repeats: int = 15, budget_ms: float = 60.0
) -> dict[str, float]:
    """Microseconds a call of every variant; a variant is the same call over rotating operands."""
    graphs = {name: (capture(calls), len(calls)) for name, calls in variants.items()}
    return time_graphs(graphs, repeats, budget_ms)


def time_graphs(
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]], repeats: int = 15, budget_ms: float = 60.0
) -> dict[str, float]:
    """Microseconds a call of every graph, each given with the number of calls it holds."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for graph, _ in graphs.values():
        graph.replay()
    torch.cuda.synchronize()
    spent = dict.fromkeys(graphs, 0.0)
    order = random.Random(0)
    for _ in range(repeats):
        # Shuffled: a variant that follows another always would always meet the cache and the clock that one leaves.
        for name, (graph, calls) in order.sample(list(graphs.items()), len(graphs)):
            if spent[name] > budget_ms and len(times[name]) >= 5:
                continue
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            elapsed = start.elapsed_time(end)
            spent[name] += elapsed
            times[name].append(elapsed * 1e3 / calls)
    return {name: statistics.median(values) for name, values in times.items()}


def copy_bandwidth(device: torch.device | str = "cuda", nbytes: int = 2**30) -> float:
    """Bytes a second of a copy of `nbytes` within a GPU's memory, read and written bytes counted: the median of ten."""
    source = torch.empty(nbytes, dtype=torch.uint8, device=device).random_(0, 255)
    target = torch.empty_like(source)
    with torch.cuda.device(device):
        return 2 * nbytes / _seconds(partial(target.copy_, source), 60)


def bf16_rate() -> float:
    """Floating-point operations a second of a large bf16 matrix product through torch: the median of ten."""
    a, b = (torch.randn(_SIZE, _SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * _SIZE**3 / _seconds(partial(torch.mm, a, b), 20)


def fp8_rate() -> float:
    """Floating-point operations a second of a large FP8 matrix product through torch, with one scale an operand and
    Hopper's fast sums, which is the fastest kind: the median of ten."""
    dtype = hardware.detect(torch.device("cuda")).fp8_dtype
    a, b = (torch.randn(_SIZE, _SIZE, device="cuda").to(dtype) for _ in range(2))
    one = torch.ones((), device="cuda")
    product = partial(torch._scaled_mm, a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    return 2 * _SIZE**3 / _seconds(product, 20)


def _seconds(call: Callable[[], Any], count: int) -> float:
    """The median of the last ten of `count` calls: an idle card needs some milliseconds to reach its clocks."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(count):
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return statistics.median(times[-10:])


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """||found - expected|| / ||expected||; NaN where either holds NaN."""
    return float((found.float() - expected).norm() / expected.norm())


def measure(
    variants: Mapping[str, Sequence[Callable[[], torch.Tensor]]], expected: torch.Tensor, tolerance: Mapping[str, float]
) -> dict[str, Any]:
    """What is measured of variants that compute `expected` with their first call: {"us": ..., "error": ...} by name.

    `error` is the relative one; a variant whose error exceeds its `tolerance`, or that raises, is not timed and stands
    in "failed" with the reason.
    """
    graphs, errors, failed = {}, {}, {}
    for name, calls in variants.items():
        try:
            errors[name] = float(f"{relative_error(calls[0](), expected):.3g}")
            if not errors[name] <= tolerance[name]:
                raise ArithmeticError(f"relative error {errors[name]} exceeds {tolerance[name]}")
            graphs[name] = capture(calls), len(calls)
        except Exception as error:
            failed[name] = in_a_cell(error)
    times = {name: round(t, 2) for name, t in time_graphs(graphs).items()}
    return {"us": times, "error": errors, **({"failed": failed} if failed else {})}


def in_a_cell(error: Exception) -> str:
    """An exception in a table's cell."""
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:200]
