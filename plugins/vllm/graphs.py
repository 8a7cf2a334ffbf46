# SPDX-License-Identifier: Apache-2.0
"""What the fusion pass reads of the graphs that vLLM compiles, and how it changes them."""

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

import llm_quant_rocm.ops  # noqa: F401  # registers the operators

QUANTIZE = torch.ops.llm_quant_rocm.per_token_quant_fp8.default
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call of an operator by their names, defaults included."""
    values = {argument.name: argument.default_value for argument in node.target._schema.arguments}  # type: ignore[union-attr]
    return values | dict(zip(values, node.args, strict=False)) | node.kwargs


def items(node: fx.Node, index: int) -> list[fx.Node]:
    """The nodes that take result number `index` of `node`."""
    return [user for user in node.users if user.target is operator.getitem and user.args[1] == index]


def replace(nodes: list[fx.Node], by: fx.Node | None) -> None:
    """Lets those who read `nodes` read `by`, which may be None where there are no such readers."""
    for node in nodes:
        if by is not None:
            node.replace_all_uses_with(by)
        node.graph.erase_node(node)


def replace_quantization(quantization: fx.Node, codes: fx.Node | None, scales: fx.Node | None) -> None:
    """Lets those who read a quantization's results read these."""
    replace(items(quantization, 0), codes)
    replace(items(quantization, 1), scales)
    quantization.graph.erase_node(quantization)


def erase_unread(nodes: Iterable[fx.Node]) -> None:
    """Erases those of the nodes that nobody reads, one after the other."""
    for node in nodes:
        if not node.users:
            node.graph.erase_node(node)


def call(graph: fx.Graph, function: Any, *arguments: Any) -> list[fx.Node]:
    """The results of a new call, with the fake tensors that Inductor reads shapes and strides from."""
    node = graph.call_function(function, arguments)
    node.meta["val"] = function(*fx.map_arg(arguments, lambda argument: argument.meta["val"]))
    results = []
    for index, value in enumerate(node.meta["val"]):
        results.append(graph.call_function(operator.getitem, (node, index)))
        results[-1].meta["val"] = value
    return results


def same(shape: torch.Size, other: torch.Size) -> bool:
    """Whether two shapes are equal for every size of their dynamic dimensions."""
    return len(shape) == len(other) and all(statically_known_true(a == b) for a, b in zip(shape, other, strict=True))
