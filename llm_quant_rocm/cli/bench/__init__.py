# SPDX-License-Identifier: Apache-2.0
"""`llm-quant-rocm bench`: measurements on this machine, beside what else is installed on it."""

import typer

from llm_quant_rocm.cli.bench.collectives import all_reduce, reduce_norm_quant
from llm_quant_rocm.cli.bench.gemm import gemm
from llm_quant_rocm.cli.bench.moe import moe
from llm_quant_rocm.cli.bench.rows import rows
from llm_quant_rocm.cli.bench.serve import serve

app = typer.Typer(help="Measure speed on this machine, with its name, versions and commit.", no_args_is_help=True)
app.command()(gemm)
app.command()(moe)
app.command()(rows)
app.command("all_reduce")(all_reduce)
app.command("reduce_norm_quant")(reduce_norm_quant)
app.command()(serve)
