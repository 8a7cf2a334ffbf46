# SPDX-License-Identifier: Apache-2.0
"""`llm-quant-rocm bench gemm`: the linear layers of a model in bf16, PTPC FP8 and NVFP4, and as vLLM computes them."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from llm_quant_rocm.cli._arguments import layers as layers_of
from llm_quant_rocm.cli._arguments import numbers, require_gpu
from llm_quant_rocm.cli._errors import reported
from llm_quant_rocm.cli.bench._output import Panel, check_plot, show, times

if TYPE_CHECKING:
    import torch

    Product = Callable[[torch.Tensor], torch.Tensor]

BASE = "bf16"
# The largest relative errors, from the product of the 16-bit weight in fp32, that count as right. NVFP4 rounds normal
# weights by 9.5%, E4M3 both operands by 2.6% each.
TOLERANCE = {BASE: 0.006, "ptpc_linear": 0.05, "nvfp4_gemm": 0.12, "nvfp4_gemm_fp8": 0.13, "vllm_fp8": 0.05}


def gemm(
    model: Annotated[
        Path | None, typer.Option(help="A model's folder or config.json, for its layers; left out, well-known models'.")
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="GPUs that the model is cut over; one of them measures.")] = 1,
    layers: Annotated[list[str] | None, typer.Option(help="Only layers of this name, * for anything.")] = None,
    ms: Annotated[str, typer.Option(help="Numbers of tokens.")] = "1,16,64,256,1024,4096",
    plot: Annotated[Path | None, typer.Option(help="A PNG to draw.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON instead of a table.")] = False,
) -> None:
    """Time linear layers in bf16 (cuBLAS, hipBLASLt), PTPC FP8 and NVFP4, and by vLLM's FP8 where it is installed.

    Results are checked before they are timed."""
    output, messages = Console(markup=False), Console(stderr=True, markup=False)
    with reported("bench gemm", messages):
        check_plot(plot)
        chosen, tokens = layers_of(model, tp, layers), numbers("--ms", ms)
        require_gpu()
        import torch

        from llm_quant_rocm import provenance

        environment = provenance.environment()
        absent: dict[str, str] = {}
        rows: list[dict[str, Any]] = []
        for number, (layer, (n, k)) in enumerate(chosen.items(), 1):
            with messages.status(f"{layer} ({number} of {len(chosen)})"):
                rows += measure(layer, n, k, tokens, torch.device("cuda"), absent)
            torch.cuda.empty_cache()
        facts = {"unit": "microseconds a call", "absent": absent, "rows": rows}
        show(output, table(rows), panels(rows), facts, environment, plot, as_json)


def measure(
    layer: str, n: int, k: int, ms: tuple[int, ...], device: "torch.device", absent: dict[str, str]
) -> list[dict[str, Any]]:
    """A row for each number of tokens: {"us": ..., "error": ..., "failed": ...} of everyone by name.

    Args:
        absent: takes who cannot be measured at all, and why.
    """
    import torch

    from llm_quant_rocm import timing
    from llm_quant_rocm.ops.nvfp4_gemm import DECODE_ROWS

    count = timing.copies(n * k * 9 // 16)
    dense = [torch.randn(n, k, device=device, dtype=torch.bfloat16) for _ in range(count)]
    everyone = products(dense, absent)
    rows = []
    for m in ms:
        x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        variants = {
            name: [partial(product, x) for product in found]
            for name, found in everyone.items()
            if name != "nvfp4_gemm_fp8" or m > DECODE_ROWS
        }
        found = timing.measure(variants, x.float() @ dense[0].float().t(), TOLERANCE)
        rows.append({"layer": layer, "n": n, "k": k, "m": m, **found})
    return rows


def products(dense: "list[torch.Tensor]", absent: dict[str, str]) -> "dict[str, list[Product]]":
    """By name, what multiplies x by each of the bf16 weights [N, K], each arranged as a server keeps it."""
    import torch

    from llm_quant_rocm import ops, timing
    from llm_quant_rocm.formats import nvfp4

    found: dict[str, list[Product]] = {
        BASE: [partial(torch.nn.functional.linear, weight=weight) for weight in dense],
        "ptpc_linear": [_ptpc(weight) for weight in dense],
    }
    try:
        prepared = [ops.prepare_nvfp4_weight(nvfp4.quantize(weight)) for weight in dense]
        for name, prefill in (("nvfp4_gemm", "exact"), ("nvfp4_gemm_fp8", "fp8")):
            found[name] = [partial(ops.nvfp4_gemm, weight=weight, prefill=prefill) for weight in prepared]
    except ValueError as error:
        absent["nvfp4_gemm"] = str(error)
    if torch.version.hip:
        absent["vllm_fp8"] = "vLLM's own kernel is for CUDA; on ROCm it calls aiter and torch, as ptpc_linear does"
        return found
    try:
        from vllm import _custom_ops

        quantized = [ops.per_token_quant_fp8(weight) for weight in dense]
        found["vllm_fp8"] = [partial(_vllm_fp8, _custom_ops, *pair) for pair in quantized]
    except Exception as error:  # one for another torch fails in many ways
        absent["vllm_fp8"] = timing.in_a_cell(error)
    return found


def _ptpc(weight: "torch.Tensor") -> "Product":
    from llm_quant_rocm import ops

    codes, scale = ops.per_token_quant_fp8(weight)
    codes, layout = ops.prepare_ptpc_weight(codes)
    return partial(ops.ptpc_linear, wq=codes, wscale=scale, layout=layout)


def _vllm_fp8(vllm_ops: Any, codes: "torch.Tensor", scale: "torch.Tensor", x: "torch.Tensor") -> "torch.Tensor":
    """vLLM's linear layer for `fp8_per_channel`: its quantization of x, and its CUTLASS product."""
    xq, xscale = vllm_ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
    return vllm_ops.cutlass_scaled_mm(xq, codes.t(), scale_a=xscale, scale_b=scale.t(), out_dtype=x.dtype)


def table(rows: list[dict[str, Any]]) -> Table:
    """A row a layer and number of tokens."""
    return times("linear layers", {"layer": "layer", "n": "N", "k": "K", "m": "M"}, rows, BASE)


def panels(rows: list[dict[str, Any]]) -> list[Panel]:
    """Speed-up by the number of tokens: a panel for each who was timed, a line a layer."""
    found = {}
    for who in dict.fromkeys(name for row in rows for name in row["us"] if name != BASE):
        found[who] = Panel(f"{who}: times as fast as {BASE}", "tokens", level=1.0)
        for row in rows:
            if {who, BASE} <= row["us"].keys():
                point = (row["m"], row["us"][BASE] / row["us"][who])
                found[who].lines.setdefault(row["layer"], []).append(point)
    return [panel for panel in found.values() if panel.lines]
