# SPDX-License-Identifier: Apache-2.0
"""A gated layer's activation in vLLM's compiled graphs, before the quantization that `ops.ptpc_linear` begins with.

vLLM writes `silu(x[..., :d]) * x[..., d:]` in torch, and Inductor has decomposed it when the fusion pass runs. What to
look for is not written down here: the same expression, traced with Inductor's decompositions, is the pattern.
"""

from functools import cache
from typing import Any

import torch
from torch import fx
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

import llm_quant_rocm.ops  # noqa: F401  # registers the operators
from llm_quant_rocm.reference.act_and_mul_quant import ACTIVATIONS
from llm_quant_rocm_vllm import graphs

FUSED = torch.ops.llm_quant_rocm.act_and_mul_quant_fp8.default


def fuse(quantization: fx.Node) -> str | None:
    """Puts our operator in the place of a quantization and of the activation before it, if that is what it quantizes
    and nobody else reads it. What it became, in words, or None."""
    if quantization.target is not graphs.QUANTIZE:
        return None
    product = quantization.args[0]
    if not isinstance(product, fx.Node) or len(product.users) > 1 or "val" not in product.meta:
        return None
    value = product.meta["val"]
    width = value.shape[-1]
    if value.dtype not in graphs.FLOATS or not isinstance(width, int):
        return None
    for activation in ACTIVATIONS:
        nodes = _match(product, _pattern(activation, value.dim(), width, value.dtype))
        if nodes is None:
            continue
        with quantization.graph.inserting_before(quantization):
            codes, scales = graphs.call(quantization.graph, FUSED, nodes.pop("x"), activation)
        graphs.replace_quantization(quantization, codes, scales)
        graphs.erase_unread((codes, scales, *sorted(nodes.values(), reverse=True)))
        return f"{activation}-and-mul + quantization"
    return None


@cache
def _pattern(activation: str, dims: int, width: int, dtype: torch.dtype) -> fx.Node:
    """The last node of the activation's graph, of x [..., 2 * width]."""

    def act_and_mul(x: torch.Tensor) -> torch.Tensor:
        return ACTIVATIONS[activation](x[..., :width]) * x[..., width:]

    x = torch.empty(*(2,) * (dims - 1), 2 * width, dtype=dtype, device="meta")
    graph = make_fx(act_and_mul, decomposition_table=select_decomp_table())(x).graph
    graph.eliminate_dead_code()
    return graph.output_node().args[0]  # type: ignore[return-value]


def _match(node: fx.Node, pattern: fx.Node) -> dict[str, fx.Node] | None:
    """By name of the pattern's nodes those of the graph that compute the same up to `node`, and as "x" what they
    compute it of; None where they do not."""
    found: dict[str, fx.Node] = {}

    def same(given: Any, wanted: Any) -> bool:
        if not isinstance(wanted, fx.Node):
            return type(given) is type(wanted) and given == wanted
        name = "x" if wanted.op == "placeholder" else wanted.name
        if not isinstance(given, fx.Node) or found.setdefault(name, given) is not given:
            return False
        if wanted.op == "placeholder":
            return given.meta["val"].shape[-1] == wanted.meta["val"].shape[-1]
        return (
            given.target is wanted.target
            and len(given.args) == len(wanted.args)
            and given.kwargs == wanted.kwargs
            and all(map(same, given.args, wanted.args))
        )

    return found if same(node, pattern) else None
