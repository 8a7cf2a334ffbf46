# SPDX-License-Identifier: Apache-2.0
"""`llm-quant-rocm tune`: measure launch configurations on this machine's GPU, for the library to use."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from llm_quant_rocm.cli._arguments import Layers, numbers, require_gpu
from llm_quant_rocm.cli._arguments import layers as layers_of
from llm_quant_rocm.cli._errors import CommandError, reported

if TYPE_CHECKING:
    from llm_quant_rocm.hardware import Hardware
    from llm_quant_rocm.tune.record import Record
    from llm_quant_rocm.tune.workload import Tuner


@dataclass(frozen=True)
class Point:
    """Something to measure: a layer's weight [n, k] under m rows."""

    layer: str
    n: int
    k: int
    m: int


def tune(
    operators: Annotated[list[str] | None, typer.Argument(help="ptpc_gemm, nvfp4_gemm; both where left out.")] = None,
    model: Annotated[
        Path | None, typer.Option(help="A model's folder or config.json, for its layers; left out, well-known models'.")
    ] = None,
    tp: Annotated[int, typer.Option(help="GPUs that the model will be cut over; one of them measures.")] = 1,
    layers: Annotated[list[str] | None, typer.Option(help="Only layers of this name, * for anything.")] = None,
    ms: Annotated[str | None, typer.Option(help="Numbers of rows, for example 1,16,256.")] = None,
    budget: Annotated[
        float | None, typer.Option(help="Stop after so many seconds; the same command then goes on.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="A folder for OPERATOR/ARCHITECTURE.json; left out, the user's cache.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was measured as JSON.")] = False,
) -> None:
    """Measure which launch configuration is fastest for each layer and number of rows. The library then uses it.

    What was measured is kept after every shape, and the same command goes on behind it."""
    output, messages = Console(), Console(stderr=True)
    with reported("tune", messages):
        require_gpu()
        names = _operators(operators)
        chosen = layers_of(model, tp, layers)
        rows = numbers("--ms", ms) if ms is not None else None
        from llm_quant_rocm import provenance
        from llm_quant_rocm.hardware import detect

        try:
            device = detect(_cuda())
        except ValueError as error:
            raise CommandError(f"{error}.") from error
        if device.arch != "sm_90" and "nvfp4_gemm" in names and not device.arch.startswith("gfx"):
            raise CommandError(f"nvfp4_gemm has no kernel for {device.arch}: name the operators to tune.")
        measured_on = provenance.environment()
        messages.print(provenance.line(measured_on), style="dim", highlight=False, soft_wrap=True)
        end = time.monotonic() + (budget or float("inf"))
        try:
            records = {name: _tune(name, device, chosen, rows, end, out, measured_on, messages) for name in names}
        except OSError as error:
            raise CommandError(f"what was measured cannot be kept ({error}): name another folder by --out.") from error
    if as_json:
        output.print_json(json.dumps({name: record.content() for name, record in records.items()}))


def _operators(names: list[str] | None) -> list[str]:
    from llm_quant_rocm.tune import OPERATORS

    unknown = [name for name in names or [] if name not in OPERATORS]
    if unknown:
        raise CommandError(f"{unknown[0]} is not one of {', '.join(OPERATORS)}.")
    return names or list(OPERATORS)


def _cuda():  # type: ignore[no-untyped-def]  # the type imports torch
    import torch

    return torch.device("cuda")


def _tune(
    name: str,
    device: "Hardware",
    layers: Layers,
    ms: tuple[int, ...] | None,
    end: float,
    out: Path | None,
    measured_on: dict[str, str],
    messages: Console,
) -> "Record":
    """Measure one operator; ends before `end` on the monotonic clock, or soon after."""
    from llm_quant_rocm import tuning
    from llm_quant_rocm.tune import tuner
    from llm_quant_rocm.tune.record import Record

    method = tuner(name)
    path = out / name / f"{device.arch}.json" if out else tuning.cache_file(name, device.arch)
    record = Record(path, measured_on)
    points = [Point(layer, n, k, m) for layer, (n, k) in layers.items() for m in ms or method.ms]
    left = [point for point in points if not record.holds(point.n, point.k, point.m)]
    if left:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=messages, transient=True, disable=not messages.is_terminal) as progress:
            _measure(method, device, left, record, end, progress, messages)
    missing = sum(not record.holds(point.n, point.k, point.m) for point in points)
    ending = f"{missing} of {len(points)} shapes are left: the same command goes on" if missing else "all shapes"
    messages.print(f"{name}: {ending}; {path}", highlight=False, soft_wrap=True)
    return record


def _measure(
    method: "Tuner",
    device: "Hardware",
    points: list[Point],
    record: "Record",
    end: float,
    progress: Progress,
    messages: Console,
) -> None:
    """Every point, layer by layer, written as it comes. Nothing compiles while something is timed."""
    from llm_quant_rocm.tune.search import Compiler, fastest

    task = progress.add_task(method.operator, total=len(points))
    layer, weights = "", None
    with Compiler(method.compile) as compiler:
        for point in points:
            if time.monotonic() > end:
                return
            name = f"{point.layer} m={point.m}"
            progress.update(task, description=f"{method.operator} {name}: compiling")
            candidates = method.candidates(device, point.m, point.n, point.k)
            configs = compiler.fit(candidates)
            if not configs:
                reason = compiler.reasons[candidates[0]]
                messages.print(f"{name}: no configuration fits ({reason})", highlight=False, soft_wrap=True)
                continue
            progress.update(task, description=f"{method.operator} {name}: timing")
            if point.layer != layer:
                weights = None  # free before the next are made
                layer, weights = point.layer, method.weights(point.n, point.k)
            workload = method.workload(weights, point.m)
            winner, us = fastest({config: workload.ours(config) for config in configs}, workload.peers())
            record.add(point.n, point.k, point.m, method.backend(point.m, us), winner)
            times = ", ".join(f"{who} {time_us:.1f}" for who, time_us in us.items())
            line = f"{name:28} microseconds: {times}  {winner}, the best of {len(configs)}"
            messages.print(line, highlight=False, soft_wrap=True)
            progress.advance(task)
