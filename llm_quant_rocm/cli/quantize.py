# SPDX-License-Identifier: Apache-2.0
"""`llm-quant-rocm quantize`: a quantized checkpoint made of a 16-bit one."""

import importlib.util
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from llm_quant_rocm.cli._arguments import name_of
from llm_quant_rocm.cli._errors import CommandError, reported, sentence
from llm_quant_rocm.cli._json import print_json

if TYPE_CHECKING:
    from llm_quant_rocm.checkpoint.quantize import Report

WORST = 10  # layers in the table
PLOT = "quantization_error.png"


class Scheme(StrEnum):
    PTPC_FP8 = "ptpc_fp8"
    NVFP4 = "nvfp4"


class Format(StrEnum):
    COMPRESSED_TENSORS = "compressed-tensors"
    MODELOPT = "modelopt"


class BlockScales(StrEnum):
    NEAREST = "nearest"
    SEARCH = "search"


class GlobalScales(StrEnum):
    SHARED = "shared"
    SEPARATE = "separate"


def quantize(
    model: Annotated[Path, typer.Argument(help="The folder of a Hugging Face checkpoint in bf16, fp16 or fp32.")],
    out: Annotated[Path, typer.Argument(help="The folder to write; one that an interrupted run left is gone on with.")],
    scheme: Annotated[Scheme, typer.Option(help="FP8 with a scale a channel, or 4 bits.")],
    format: Annotated[Format, typer.Option(help="Whose tensors and description.")] = Format.COMPRESSED_TENSORS,
    ignore: Annotated[
        list[str] | None,
        typer.Option(help="A module to keep in 16 bits, * for anything, beside lm_head, embeddings and routers."),
    ] = None,
    block_scales: Annotated[
        BlockScales | None,
        typer.Option(
            help="NVFP4: map a block's largest value to 6, or take the best of eight scales (search, where left out)."
        ),
    ] = None,
    global_scales: Annotated[
        GlobalScales | None,
        typer.Option(help="NVFP4: one for layers that engines fuse (shared, where left out), or each its own."),
    ] = None,
    device: Annotated[str, typer.Option(help="Where to compute: cpu, or a GPU, cuda, which is faster.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON instead of a table.")] = False,
) -> None:
    """Write a quantized checkpoint that vLLM and SGLang load. When it is stopped, the same command goes on."""
    output, messages = Console(markup=False), Console(stderr=True, markup=False)
    with reported("quantize", messages, goes_on=True):
        report = _run(model, out, scheme, format, ignore or [], block_scales, global_scales, device, messages)
        plot = _plot(report, out, f"{name_of(model)}: {scheme}, {format}", messages)
        if as_json:
            print_json(output, figures(report, out))
            return
        output.print(table(report))
        output.print(summary(report, out), highlight=False, soft_wrap=True)
        if plot:
            output.print(f"errors of all layers: {plot}", highlight=False, soft_wrap=True)


def _run(
    model: Path,
    out: Path,
    scheme: Scheme,
    format: Format,
    ignore: list[str],
    block_scales: BlockScales | None,
    global_scales: GlobalScales | None,
    device: str,
    messages: Console,
) -> "Report":
    needed = ["safetensors", *(["compressed_tensors"] if format is Format.COMPRESSED_TENSORS else [])]
    for package in needed:
        if importlib.util.find_spec(package) is None:
            raise CommandError(f"{package} is not installed: pip install 'llm-quant-rocm[tools]'")
    if not model.is_dir():
        raise CommandError(f"{model} is no folder: download the checkpoint, and name the folder that has config.json.")
    if scheme is not Scheme.NVFP4 and (block_scales or global_scales):
        raise CommandError(f"--block-scales and --global-scales are for --scheme nvfp4, not {scheme}: leave them out.")
    _check_device(device)
    import torch

    from llm_quant_rocm.checkpoint.kept import IGNORE
    from llm_quant_rocm.checkpoint.quantize import quantize_checkpoint

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(True), TimeRemainingColumn())
    try:
        with Progress(*columns, console=messages, transient=True, disable=not messages.is_terminal) as progress:
            task = progress.add_task(f"quantizing {name_of(model)}", total=None)
            return quantize_checkpoint(
                model,
                out,
                format,
                (*IGNORE, *ignore),
                global_scales is not GlobalScales.SEPARATE,
                scheme=scheme,
                search=scheme is Scheme.NVFP4 and block_scales is not BlockScales.NEAREST,
                device=device,
                on_progress=lambda done, whole: progress.update(task, completed=done, total=whole),
            )
    except torch.OutOfMemoryError as error:
        raise CommandError(f"{device} is out of memory: end what fills it, and the same command goes on.") from error
    except (ValueError, TypeError) as error:
        raise CommandError(f"{error}.") from error


def _check_device(device: str) -> None:
    import torch

    try:
        torch.ones((), device=device).item()  # which a device without memory, as meta, cannot say
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise CommandError(f"--device {device} cannot be used here ({reason}): leave it out, or name cpu.") from error


def table(report: "Report") -> Table:
    """The layers with the largest errors."""
    worst = sorted(report.errors.items(), key=lambda item: -item[1])[:WORST]
    rendered = Table(title=f"the worst {len(worst)} of {len(report.errors)} weights")
    rendered.add_column("layer", overflow="fold")
    rendered.add_column("relative error", justify="right")
    for module, error in worst:
        rendered.add_row(module, f"{100 * error:.3f}%")
    return rendered


def summary(report: "Report", out: Path) -> str:
    """One line: what became of the checkpoint."""
    mean = sum(report.errors.values()) / max(1, len(report.errors))
    before, after = (f"{nbytes / 2**20:.1f} MiB" for nbytes in (report.bytes_before, report.bytes_after))
    return (
        f"{len(report.quantized)} weights are quantized, with a mean error of {100 * mean:.3f}%, and "
        f"{len(report.kept)} stayed; {before} became {after} in {out}"
        + (", which was complete already" if report.found else "")
    )


def figures(report: "Report", out: Path) -> dict[str, object]:
    """The figures for --json; errors are worst first."""
    return {
        "out": str(out),
        "bytes_before": report.bytes_before,
        "bytes_after": report.bytes_after,
        "quantized": len(report.quantized),
        "kept": report.kept,
        "errors": dict(sorted(report.errors.items(), key=lambda item: -item[1])),
    }


def _plot(report: "Report", out: Path, title: str, messages: Console) -> Path | None:
    """The picture of all errors in `out`, if matplotlib is here to draw it."""
    if importlib.util.find_spec("matplotlib") is None:
        messages.print("matplotlib is not installed: no plot. pip install 'llm-quant-rocm[tools]'", highlight=False)
        return None
    from llm_quant_rocm.cli._error_plot import draw

    try:
        draw(report.errors, out / PLOT, title)
    except OSError as error:  # the checkpoint is whole
        messages.print(f"no plot: {sentence(error)}", highlight=False, soft_wrap=True)
        return None
    return out / PLOT
