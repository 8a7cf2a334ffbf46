# SPDX-License-Identifier: Apache-2.0
"""The command line `llm-quant-rocm`. Importing it imports neither torch nor an engine."""

from typing import Annotated

import typer

from llm_quant_rocm import __version__
from llm_quant_rocm.cli import bench
from llm_quant_rocm.cli.demo import demo
from llm_quant_rocm.cli.doctor import doctor
from llm_quant_rocm.cli.evaluate import evaluate
from llm_quant_rocm.cli.quantize import quantize
from llm_quant_rocm.cli.tune import tune

app = typer.Typer(
    name="llm-quant-rocm",
    help="Quantized inference for AMD Instinct GPUs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(doctor)
app.command()(quantize)
app.command("eval")(evaluate)
app.command()(tune)
app.add_typer(bench.app, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"llm-quant-rocm {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Quantized inference for AMD Instinct GPUs."""
