# SPDX-License-Identifier: Apache-2.0
"""`llm-quant-rocm bench rows`: what is done to every row of activations, against what memory allows."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from llm_quant_rocm.cli._arguments import numbers, require_gpu
from llm_quant_rocm.cli._errors import reported
from llm_quant_rocm.cli.bench._output import Panel, check_plot, show


def rows(
    columns: Annotated[str, typer.Option(help="Widths of rows.")] = "4096,5120,7168,8192,28672",
    ms: Annotated[str, typer.Option(help="Numbers of rows.")] = "1,16,64,256,1024,4096",
    plot: Annotated[Path | None, typer.Option(help="A PNG to draw.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON instead of a table.")] = False,
) -> None:
    """Time per-token FP8 quantization, alone and behind RMSNorm or an activation, beside memory traffic and vLLM's.

    The traffic is that of every operand once, at the bandwidth of a large copy."""
    output, messages = Console(markup=False), Console(stderr=True, markup=False)
    with reported("bench rows", messages):
        check_plot(plot)
        widths, counts = numbers("--columns", columns), numbers("--ms", ms)
        require_gpu()
        import torch

        from llm_quant_rocm import provenance, timing
        from llm_quant_rocm.measure.rows import measure

        environment = provenance.environment()
        absent: dict[str, str] = {}
        with_vllm = _vllm_is_there(absent)
        bandwidth = timing.copy_bandwidth()
        found = []
        for width in widths:
            with messages.status(f"rows of {width}"):
                found += [measure(count, width, bandwidth, with_vllm) for count in counts]
            torch.cuda.empty_cache()
        table = Table(title="rows: microseconds a call (times the limit of memory traffic)")
        names = list(found[0]["us"])
        for heading in ("columns", "rows", *names):
            table.add_column(heading, justify="right")
        for row in found:
            limits = {name: row["limit_us"][name.removeprefix("vllm_")] for name in names}
            cells = [f"{row['us'][name]:.1f} ({row['us'][name] / limits[name]:.2f})" for name in names]
            table.add_row(str(row["k"]), str(row["m"]), *cells)
        panels = [
            Panel(
                f"{name}: times the limit of memory traffic", "rows",
                {str(k): [(r["m"], r["us"][name] / r["limit_us"][name]) for r in found if r["k"] == k] for k in widths},
                level=1.0, log=True,
            )
            for name in found[0]["limit_us"]
        ]  # fmt: skip
        facts = {
            "unit": "microseconds a call", "copy_gb_s": round(bandwidth / 1e9), "absent": absent, "rows": found,
        }  # fmt: skip
        show(output, table, panels, facts, environment, plot, as_json)


def _vllm_is_there(absent: dict[str, str]) -> bool:
    """Whether torch.ops._C holds vLLM's kernels, and they run here; `absent` takes why not."""
    from llm_quant_rocm import timing
    from llm_quant_rocm.measure.rows import variants

    try:
        from vllm import _custom_ops  # noqa: F401  # loads them

        for name, calls in variants(1, 64, with_vllm=True).items():
            if name.startswith("vllm_"):
                calls[0]()
    except Exception as error:  # one for another torch fails in many ways
        absent["vLLM"] = timing.in_a_cell(error)
        return False
    return True
