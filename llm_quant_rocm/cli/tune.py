# SPDX-License-Identifier: Apache-2.0
"""`llm-quant-rocm tune`: measure launch configurations and crossovers on this machine, for the library to use."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from llm_quant_rocm.cli._arguments import config_at, experts, layers, numbers, require_gpu
from llm_quant_rocm.cli._errors import CommandError, ranks_reported, reported
from llm_quant_rocm.cli._json import print_json

if TYPE_CHECKING:
    from llm_quant_rocm.hardware import Hardware
    from llm_quant_rocm.tune.record import Measurements, Record
    from llm_quant_rocm.tune.workload import Tuner

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Point:
    """Something to measure: a layer's weights, as the operator's tuner says their shape, under m rows."""

    layer: str
    shape: tuple[int, ...]
    m: int


class Budget:
    """How long the command may measure, and whether it came to anything meanwhile.

    Args:
        seconds: from now on; None is no end.

    Attributes:
        end: on the monotonic clock.
        measured: shapes and sizes of all operators.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = float("inf") if seconds is None else seconds
        self.end = time.monotonic() + self._seconds
        self.measured = 0

    def ending(self, left: int, total: int, what: str) -> str:
        """How an operator ends with so many of its `what` left. Where a budget does not reach the first measurement,
        nor will it the next time: what comes before (the ranks' start, what was not compiled yet) comes again."""
        if not left:
            return f"all {what}"
        if self.measured:
            return f"{left} of {total} {what} are left: the same command goes on"
        return (
            f"{left} of {total} {what} are left, and the budget of {self._seconds:g} s ended before anything was "
            "measured: name a larger one by --budget, or none"
        )


def tune(
    operators: Annotated[
        list[str] | None,
        typer.Argument(
            help="ptpc_gemm, nvfp4_gemm, nvfp4_gemm_fp8 (prefill in FP8), ptpc_moe, nvfp4_moe, quick_reduce; left out, "
            "all that the model and the GPUs have a use for."
        ),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="A model's folder or config.json, for its layers; left out, well-known models'.")
    ] = None,
    tp: Annotated[
        int,
        typer.Option(min=1, help="GPUs that the model will be cut over: one measures its layers, all the all-reduce."),
    ] = 1,
    layers: Annotated[list[str] | None, typer.Option(help="Only layers of this name, * for anything.")] = None,
    ms: Annotated[str | None, typer.Option(help="Numbers of rows (of experts: tokens), for example 1,16,256.")] = None,
    budget: Annotated[
        float | None, typer.Option(help="Stop after so many seconds; the same command then goes on.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="A folder for OPERATOR/ARCHITECTURE.json; left out, the user's cache.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was measured as JSON.")] = False,
) -> None:
    """Measure which launch configurations and all-reduces are fastest on this machine. The library then uses them.

    What was measured is kept after every shape, and the same command goes on behind it."""
    output, messages = Console(markup=False), Console(stderr=True, markup=False)
    with reported("tune", messages, goes_on=True):
        from llm_quant_rocm.tune import QUICK_REDUCE

        _check(operators, model)
        rows = numbers("--ms", ms) if ms is not None else None
        require_gpu()
        chosen = _chosen(operators, model, tp, layers, messages)
        import torch

        from llm_quant_rocm import provenance
        from llm_quant_rocm.hardware import detect
        from llm_quant_rocm.ops.nvfp4_weight import PACKINGS

        try:
            device = detect(torch.device("cuda"))
        except ValueError as error:
            raise CommandError(f"{error}.") from error
        nvfp4 = [name for name in chosen if name.startswith("nvfp4")]
        if nvfp4 and device.arch not in PACKINGS:
            raise CommandError(f"{nvfp4[0]} has no kernel for {device.arch}: name the operators to tune.")
        measured_on = provenance.environment()
        messages.print(provenance.line(measured_on), style="dim", highlight=False, soft_wrap=True)
        allowed = Budget(budget)
        try:
            contents = {
                name: _tune_all_reduce(tp, device, allowed, out, provenance.environment(tp), messages)
                if name == QUICK_REDUCE
                else _tune(name, device, shapes, rows, allowed, out, measured_on, messages).content()
                for name, shapes in chosen.items()
            }
        except OSError as error:
            raise CommandError(f"what was measured cannot be kept ({error}): name another folder by --out.") from error
        if as_json:
            print_json(output, contents)


def _every() -> tuple[str, ...]:
    """What can be tuned."""
    from llm_quant_rocm.tune import OPERATORS, QUICK_REDUCE

    return (*OPERATORS, QUICK_REDUCE)


def _check(names: list[str] | None, model: Path | None) -> None:
    """What is wrong on any machine: it is said where no GPU is, too."""
    unknown = [name for name in names or [] if name not in _every()]
    if unknown:
        raise CommandError(f"{unknown[0]} is not one of {', '.join(_every())}.")
    if model is not None:
        config_at(model)


def _chosen(
    names: list[str] | None, model: Path | None, tp: int, patterns: list[str] | None, messages: Console
) -> dict[str, Shapes]:
    """By operator, the shapes to measure: of the all-reduce, whose sizes are fixed, none."""
    from llm_quant_rocm.comm.policy import MAX_WORLD_SIZE, WORLD_SIZES
    from llm_quant_rocm.tune import QUICK_REDUCE, tuner

    every = _every()
    found: dict[str, Shapes] = {}
    refusals: dict[str, CommandError] = {}
    for name in names or every:
        try:
            if name == QUICK_REDUCE:
                if tp not in WORLD_SIZES:
                    raise CommandError(
                        f"quick_reduce is between 2 and {MAX_WORLD_SIZE} GPUs, not {tp}: say how many by --tp."
                    )
                require_gpu(tp)
                found[name] = {}
            else:
                of = experts if tuner(name).experts else layers
                # The layers of well-known models are whole; --tp then says how many GPUs the all-reduce has.
                alone = model is None and QUICK_REDUCE in (names or every)
                found[name] = of(model, 1 if alone else tp, patterns)
        except CommandError as error:
            refusals[name] = error
    if refusals and (names or not found):
        raise next(iter(refusals.values()))
    for name, refusal in refusals.items():
        messages.print(f"{name} is left out: {refusal}", highlight=False, soft_wrap=True)
    return found


def _progress(messages: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=messages, transient=True, disable=not messages.is_terminal)


def _tune_all_reduce(
    tp: int,
    device: "Hardware",
    budget: Budget,
    out: Path | None,
    measured_on: dict[str, str],
    messages: Console,
) -> dict[str, Any]:
    """Measure the crossovers between `tp` GPUs, within the budget. What the file then says."""
    from llm_quant_rocm import tuning
    from llm_quant_rocm.measure.all_reduce import SIZES
    from llm_quant_rocm.tune import QUICK_REDUCE
    from llm_quant_rocm.tune.quick_reduce import tune
    from llm_quant_rocm.tune.record import loaded

    file = out / QUICK_REDUCE / f"{device.arch}.json" if out else tuning.cache_file(QUICK_REDUCE, device.arch)
    with ranks_reported(), _progress(messages) as progress:
        task = progress.add_task(f"{QUICK_REDUCE}: compiling", total=len(SIZES))

        def heard(word: str, what: Any) -> None:
            if word == "anew":
                _say_anew(what, messages)
            if word == "row":
                times = ", ".join(f"{who} {time_us:.1f}" for who, time_us in what["us"].items())
                line = f"{what['bytes']:>10} bytes, microseconds: {times}"
                messages.print(line, highlight=False, soft_wrap=True)
                progress.advance(task)
                budget.measured += 1
            progress.update(task, description=f"{QUICK_REDUCE}: timing between {tp} GPUs")

        left = tune(tp, file, measured_on, heard, budget.end - time.monotonic())
    messages.print(
        f"{QUICK_REDUCE}: {budget.ending(len(left), len(SIZES), 'sizes')}; {file}", highlight=False, soft_wrap=True
    )
    return loaded(file) or {}


def _tune(
    name: str,
    device: "Hardware",
    shapes: Shapes,
    ms: tuple[int, ...] | None,
    budget: Budget,
    out: Path | None,
    measured_on: dict[str, str],
    messages: Console,
) -> "Record":
    """Measure one operator; ends within the budget, or soon after."""
    from llm_quant_rocm import tuning
    from llm_quant_rocm.tune import tuner
    from llm_quant_rocm.tune.record import Record

    method = tuner(name)
    path = out / name / f"{device.arch}.json" if out else tuning.cache_file(name, device.arch)
    record = Record(path, measured_on)
    if record.others:
        _say_anew(record, messages)
    points = [Point(layer, shape, m) for layer, shape in shapes.items() for m in ms or method.ms]
    left = [point for point in points if not record.holds(method.key(point.shape, point.m))]
    if left:
        with _progress(messages) as progress:
            left = _measure(method, device, left, record, budget, progress, messages)
    messages.print(
        f"{name}: {budget.ending(len(left), len(points), 'shapes')}; {path}", highlight=False, soft_wrap=True
    )
    return record


def _say_anew(kept: "Measurements", messages: Console) -> None:
    what = " and ".join(kept.others)
    messages.print(f"{kept.path} was measured with {what}: it is measured anew", highlight=False, soft_wrap=True)


def _measure(
    method: "Tuner",
    device: "Hardware",
    points: list[Point],
    record: "Record",
    budget: Budget,
    progress: Progress,
    messages: Console,
) -> list[Point]:
    """Every point, layer by layer, written as it comes. Nothing compiles while something is timed. Returns those that
    the budget left; a point that no configuration fits is done, as it would be the next time."""
    from llm_quant_rocm.tune.search import Compiler, fastest

    task = progress.add_task(method.operator, total=len(points))
    layer, weights = "", None
    with Compiler(method.compile) as compiler:
        for number, point in enumerate(points):
            if time.monotonic() > budget.end:
                return points[number:]
            name = f"{point.layer} m={point.m}"
            progress.update(task, description=f"{method.operator} {name}: compiling")
            candidates = method.candidates(device, point.m, *point.shape)
            configs = compiler.fit(candidates)
            if not configs:
                reason = compiler.reasons[candidates[0]]
                messages.print(f"{name}: no configuration fits ({reason})", highlight=False, soft_wrap=True)
                continue
            progress.update(task, description=f"{method.operator} {name}: timing")
            if point.layer != layer:
                weights = None  # free before the next are made
                layer, weights = point.layer, method.weights(*point.shape)
            workload = method.workload(weights, point.m)
            winner, us = fastest({config: workload.ours(config) for config in configs}, workload.peers())
            record.add(method.key(point.shape, point.m), method.backend(point.m, us), winner)
            times = ", ".join(f"{who} {time_us:.1f}" for who, time_us in us.items())
            line = f"{name:28} microseconds: {times}  {winner}, the best of {len(configs)}"
            messages.print(line, highlight=False, soft_wrap=True)
            progress.advance(task)
            budget.measured += 1
    return []
