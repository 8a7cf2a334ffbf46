# SPDX-License-Identifier: Apache-2.0
"""A pass over vLLM's compiled graphs: RMSNorm and the per-token FP8 quantization that follows become one operator.

vLLM runs it behind its own passes, by its public hook `inductor_compile_config["post_grad_custom_post_pass"]`. The
platform's `get_pass_manager_cls` would let it run earlier, but takes a patch of the platform and is no part of the key
of vLLM's compile cache, which would then serve graphs of the other setting.

The fused operator adds the residual and quantizes with the rounding of the separate operators. It normalises in fp32
and rounds once, to the activation's dtype. So does vLLM's norm as Inductor compiles it, which is how vLLM runs it by
default, up to fp32's last bit; vLLM's own kernels (ir_op_priority "vllm_c") also round before they multiply by a 16-bit
weight.
"""

import hashlib
import logging
import operator
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

import llm_quant_rocm.ops  # noqa: F401  # registers the operators
from llm_quant_rocm_vllm.switches import switched_on

SWITCH = "LLM_QUANT_ROCM_FUSION"
HOOK = "post_grad_custom_post_pass"

_OURS = torch.ops.llm_quant_rocm
_QUANTIZE = _OURS.per_token_quant_fp8.default
_ACTIVATIONS = (torch.bfloat16, torch.float16, torch.float32)
# vLLM's norms, by the parameters that the pass reads.
_PARAMETERS = {
    "rms_norm": ("x", "weight", "epsilon", "variance_size"),
    "fused_add_rms_norm": ("x", "x_residual", "weight", "epsilon", "variance_size"),
}

logger = logging.getLogger("llm_quant_rocm")


def enable(vllm_config: Any) -> None:
    """Let vLLM run the pass when it compiles a model of this configuration, unless `SWITCH` is 0. May be called any
    number of times, before vLLM compiles."""
    passes = vllm_config.compilation_config.inductor_compile_config
    if isinstance(getattr(passes.get(HOOK), "callable", None), NormQuantFusion):
        return
    obstacle = _obstacle(vllm_config)
    if obstacle:
        _log(f"norm fusion: off, {obstacle}")
        return
    from vllm.compilation.passes.inductor_pass import CallableInductorPass

    fusion = NormQuantFusion()
    passes[HOOK] = CallableInductorPass(fusion, fusion.uuid())
    _log(f"norm fusion: on; {SWITCH}=0 switches it off")


def _obstacle(vllm_config: Any) -> str | None:
    """Why the pass cannot run."""
    if not switched_on(SWITCH):
        return f"by {SWITCH}=0"
    try:
        from vllm.compilation.passes.inductor_pass import CallableInductorPass  # noqa: F401
        from vllm.config import CompilationMode
        from vllm.ir import ops as ir

        moved = [name for name, parameters in _PARAMETERS.items() if _parameters(getattr(ir, name)) != parameters]
    except (ImportError, AttributeError) as error:
        return f"this vLLM has other parts: {error}"
    if moved:
        return f"this vLLM's {', '.join(moved)} has other parameters"
    compilation = vllm_config.compilation_config
    if compilation.mode != CompilationMode.VLLM_COMPILE or compilation.backend not in ("", "inductor"):
        return "as vLLM does not compile here with Inductor"
    if HOOK in compilation.inductor_compile_config:
        return f"as inductor_compile_config[{HOOK!r}] is another pass"
    return None


def _parameters(ir_op: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in ir_op.torch_op._schema.arguments)


@cache
def _log(line: str) -> None:
    logger.info(line)


class NormQuantFusion:
    """The pass. It holds no state, so it can be copied and pickled at any time."""

    def uuid(self) -> str:
        """Part of the key of vLLM's compile cache: another text of this file is another pass."""
        return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()

    def __call__(self, graph: fx.Graph) -> int:
        """Fuses what it can in a functional graph of ATen operators; the number of places fused."""
        fused = left = 0
        for node in list(graph.nodes):
            # One at a time: a norm's residual is often the sum of the norm before it, which fusing replaces.
            norm = _Norm.of(node)
            if norm is None or not norm.quantizations:
                continue
            if norm.is_fusible():
                norm.fuse()
                fused += 1
            else:
                left += 1
        if fused or left:
            _log(
                f"norm fusion: RMSNorm and quantization are one kernel in {fused} places of a compiled graph"
                + (f", not in {left}, where others read the norm's result too" if left else "")
                + " (layers alike share a graph)"
            )
        return fused


class _Norm:
    """A call of one of vLLM's norms in a graph.

    Attributes:
        results: the nodes that are its normalised output.
        sums: the nodes that are its new residual.
        quantizations: the calls of our quantization of its normalised output.
    """

    def __init__(self, node: fx.Node, has_residual: bool) -> None:
        self.node = node
        schema = node.target._schema.arguments  # type: ignore[union-attr]  # an operator, by its caller
        values = {argument.name: argument.default_value for argument in schema}
        values |= dict(zip(values, node.args, strict=False)) | node.kwargs
        self.x, self.weight, self.epsilon = values["x"], values["weight"], values["epsilon"]
        self.residual = values["x_residual"] if has_residual else None
        self.variance_size = values["variance_size"]
        self.results = _items(node, 0) if has_residual else [node]
        self.sums = _items(node, 1) if has_residual else []
        self.quantizations = [user for result in self.results for user in result.users if user.target is _QUANTIZE]

    @classmethod
    def of(cls, node: fx.Node) -> "_Norm | None":
        ir = torch.ops.vllm_ir
        if node.op != "call_function" or node.target not in (ir.rms_norm.default, ir.fused_add_rms_norm.default):
            return None
        return cls(node, node.target is ir.fused_add_rms_norm.default)

    def is_fusible(self) -> bool:
        """Whether our operator computes this norm, and nobody but quantizations reads its normalised output."""
        users = {user for result in self.results for user in result.users}
        if users != set(self.quantizations) or self.variance_size is not None or self.weight is None:
            return False
        x, weight = self.x.meta["val"], self.weight.meta["val"]
        if x.dtype not in _ACTIVATIONS or weight.dtype not in _ACTIVATIONS or not _same(weight.shape, x.shape[-1:]):
            return False
        if self.residual is None:
            return True
        residual = self.residual.meta["val"]
        return residual.dtype == x.dtype and _same(residual.shape, x.shape)

    def fuse(self) -> None:
        graph = self.node.graph
        arguments: tuple[Any, ...] = (self.x, self.weight, self.epsilon)
        with graph.inserting_before(self.node):
            if self.residual is None:
                codes, scales = _call(graph, _OURS.rms_norm_quant_fp8.default, arguments)
            else:
                arguments += (self.residual,)
                codes, scales, total = _call(graph, _OURS.add_rms_norm_quant_fp8.default, arguments)
        for quantization in self.quantizations:
            _replace(_items(quantization, 0), codes)
            _replace(_items(quantization, 1), scales)
            graph.erase_node(quantization)
        if self.residual is not None:
            _replace(self.sums, total)
            for result in self.results:
                graph.erase_node(result)
        graph.erase_node(self.node)


def _items(node: fx.Node, index: int) -> list[fx.Node]:
    """The nodes that take result number `index` of `node`."""
    return [user for user in node.users if user.target is operator.getitem and user.args[1] == index]


def _replace(nodes: Iterable[fx.Node], by: fx.Node) -> None:
    for node in nodes:
        node.replace_all_uses_with(by)
        node.graph.erase_node(node)


def _call(graph: fx.Graph, function: Any, arguments: tuple[Any, ...]) -> list[fx.Node]:
    """The results of a new call, with the fake tensors that Inductor reads shapes and strides from."""
    node = graph.call_function(function, arguments)
    node.meta["val"] = function(*fx.map_arg(arguments, lambda argument: argument.meta["val"]))
    results = []
    for index, value in enumerate(node.meta["val"]):
        results.append(graph.call_function(operator.getitem, (node, index)))
        results[-1].meta["val"] = value
    return results


def _same(shape: torch.Size, other: torch.Size) -> bool:
    """Whether two shapes are equal for every size of their dynamic dimensions."""
    return len(shape) == len(other) and all(statically_known_true(a == b) for a, b in zip(shape, other, strict=True))
