# SPDX-License-Identifier: Apache-2.0
"""`llm-quant-rocm bench moe`: the routed experts of a model in bf16, PTPC FP8 and NVFP4, and as vLLM computes them."""

import importlib.util
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from llm_quant_rocm.cli._arguments import experts as experts_of
from llm_quant_rocm.cli._arguments import numbers, require_gpu
from llm_quant_rocm.cli._errors import reported
from llm_quant_rocm.cli.bench._output import Panel, check_plot, show, times


def moe(
    model: Annotated[
        Path | None,
        typer.Option(help="A model's folder or config.json, for its experts; left out, well-known models'."),
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="GPUs that every expert is cut over; one of them measures.")] = 1,
    layers: Annotated[list[str] | None, typer.Option(help="Only experts of this name, * for anything.")] = None,
    ms: Annotated[str, typer.Option(help="Numbers of tokens.")] = "1,16,64,256,1024,4096",
    plot: Annotated[Path | None, typer.Option(help="A PNG to draw.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON instead of a table.")] = False,
) -> None:
    """Time routed experts in bf16 (torch's grouped product), PTPC FP8 and NVFP4, and by vLLM's where it is installed.

    Results are checked before they are timed."""
    output, messages = Console(markup=False), Console(stderr=True, markup=False)
    with reported("bench moe", messages):
        check_plot(plot)
        chosen, tokens = experts_of(model, tp, layers), numbers("--ms", ms)
        require_gpu()
        import torch

        from llm_quant_rocm import provenance
        from llm_quant_rocm.measure.experts import BASE

        environment = provenance.environment()
        absent: dict[str, str] = {}
        rows: list[dict[str, Any]] = []
        for number, (name, shape) in enumerate(chosen.items(), 1):
            with messages.status(f"{name} ({number} of {len(chosen)})"):
                rows += measure(name, shape, tokens, absent)
            torch.cuda.empty_cache()
        table = times("routed experts", {"model": "experts of", "tokens": "tokens"}, rows, BASE)
        panels = [_panel(name, [row for row in rows if row["model"] == name], BASE) for name in chosen]
        facts = {"unit": "microseconds a call", "absent": absent, "rows": rows}
        show(output, table, panels, facts, environment, plot, as_json)


def measure(
    name: str, shape: tuple[int, int, int, int], tokens: tuple[int, ...], absent: dict[str, str]
) -> list[dict[str, Any]]:
    """A row for each number of tokens; `absent` takes who cannot be measured at all, and why."""
    import torch

    from llm_quant_rocm.measure.experts import DENSE, PACKED, Layer

    dense, packed = dict(DENSE), dict(PACKED)
    if torch.version.hip:
        absent["vLLM"] = "its Marlin experts are for CUDA, and its Triton experts are tuned for other shapes"
    elif importlib.util.find_spec("vllm") is None:
        absent["vLLM"] = "it is not installed"
    else:
        from llm_quant_rocm.cli.bench import _peers

        dense |= {name: getattr(_peers, name) for name in ("vllm_bf16", "vllm_fp8", "vllm_cutlass")}
        packed["vllm_marlin"] = _peers.vllm_marlin
    layer = Layer(*shape, dense, packed)
    absent |= layer.absent
    return [{"model": name, "tokens": count, **layer.measure(count)} for count in tokens]


def _panel(name: str, rows: list[dict[str, Any]], base: str) -> Panel:
    """Speed-up by the number of tokens."""
    panel = Panel(f"{name}: times as fast as {base}", "tokens", level=1.0)
    for who in dict.fromkeys(who for row in rows for who in row["us"]):
        points = [(row["tokens"], row["us"][base] / row["us"][who]) for row in rows if {who, base} <= row["us"].keys()]
        if points and who != base:
            panel.lines[who] = points
    return panel
