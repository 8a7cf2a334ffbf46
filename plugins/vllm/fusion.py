# SPDX-License-Identifier: Apache-2.0
"""A pass over vLLM's compiled graphs: what stands between two quantized layers becomes one operator.

    norm, then quantization of its result                       ops.rms_norm_quant_fp8
    the same, where a router or another layer reads the norm    ops.reduce_norm_quant of one rank
    all-reduce, norm, and quantization if there is one          ops.reduce_norm_quant
    a gated layer's activation, then quantization (gated.py)    ops.act_and_mul_quant_fp8

A norm is vLLM's RMSNorm, with or without a residual, in the form that it has before vLLM chooses a kernel for it; a
quantization is the per-token one that `ops.ptpc_linear` begins with, and belongs to us, so the pattern needs no more.

vLLM runs the pass behind its own, by its public hook `inductor_compile_config["post_grad_custom_post_pass"]`. The
platform's `get_pass_manager_cls` would let it run earlier, but takes a patch of the platform and is no part of the key
of vLLM's compile cache, which would then serve graphs of the other setting.

Results are those of our separate operators in every bit. vLLM's norm differs from ours in its roundings: it normalises
the sum of activation and residual before that is rounded to 16 bits, where we, like its own CUDA kernels, read the
rounded sum, which is what the next layer will see. And its definition rounds before it multiplies by a 16-bit weight,
which we do not, and which it does not do either as Inductor compiles it.
"""

import hashlib
import logging
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx
from vllm import envs
from vllm.distributed.parallel_state import is_local_first_rank

import llm_quant_rocm.ops  # noqa: F401  # registers the operators
from llm_quant_rocm.environment import FUSION as SWITCH
from llm_quant_rocm.environment import switched_on
from llm_quant_rocm.formats.norm_quant import Quantization, ScaleLayout
from llm_quant_rocm.formats.nvfp4 import BLOCK
from llm_quant_rocm_vllm import gated, graphs

HOOK = "post_grad_custom_post_pass"

_OURS = torch.ops.llm_quant_rocm
_FUSED, _ADD_FUSED = _OURS.rms_norm_quant_fp8.default, _OURS.add_rms_norm_quant_fp8.default
_REDUCE_FUSED = _OURS.reduce_norm_quant.default
_HALF = (torch.bfloat16, torch.float16)
# vLLM's norms, by the parameters that the pass reads.
_PARAMETERS = {
    "rms_norm": ("x", "weight", "epsilon", "variance_size"),
    "fused_add_rms_norm": ("x", "x_residual", "weight", "epsilon", "variance_size"),
}

logger = logging.getLogger("llm_quant_rocm")


def enable(vllm_config: Any) -> None:
    """Let vLLM run the pass when it compiles a model of this configuration, unless `SWITCH` is 0, or a row's bits may
    not depend on the rows beside it: which kernel norms depends on how many there are. May be called any number of
    times, before vLLM compiles."""
    passes = vllm_config.compilation_config.inductor_compile_config
    if isinstance(getattr(passes.get(HOOK), "callable", None), NormQuantFusion):
        return
    off, obstacle = _switched_off(), _obstacle(vllm_config)
    if obstacle or off:
        _log(f"norm fusion: off, {f'by {off}' if off else obstacle}")
    if obstacle:
        return
    # Here, not above: whatever vLLM has moved elsewhere, `_obstacle` has found out.
    from vllm.compilation.passes.inductor_pass import CallableInductorPass

    from llm_quant_rocm_vllm import reduce_norm

    # Also where it is off: ranks with another environment would wait for this one.
    group = reduce_norm.connect(vllm_config, off and f"{off} on one of its ranks")
    if off:
        return
    fusion = NormQuantFusion(group)
    passes[HOOK] = CallableInductorPass(fusion, fusion.uuid())
    _log(f"norm fusion: on; {SWITCH}=0 switches it off")
    config = vllm_config.compilation_config.pass_config
    if fusion.group and config.fuse_allreduce_rms:
        config.fuse_allreduce_rms = False
        _log("norm fusion: takes the place of vLLM's fuse_allreduce_rms, which does not quantize per token")


def _switched_off() -> str | None:
    """The variable by which the pass is off."""
    if envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT=1"
    return None if switched_on(SWITCH) else f"{SWITCH}=0"


def _obstacle(vllm_config: Any) -> str | None:
    """Why the pass cannot run, on all ranks alike."""
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
    """Once, and of the ranks of a host only one."""
    logger.log(logging.INFO if is_local_first_rank() else logging.DEBUG, line)


@dataclass(frozen=True)
class NormQuantFusion:
    """The pass.

    Attributes:
        group: vLLM's name of the group whose all-reduces are fused with the norms that follow; None: no group's are.
    """

    group: str | None = None

    def uuid(self) -> str:
        """Part of the key of vLLM's compile cache: another text of the pass, or another signature of an operator that
        cached graphs call, is another pass."""
        key = [repr(self), *(str(target._schema) for target in (_FUSED, _ADD_FUSED, _REDUCE_FUSED, gated.FUSED))]
        text = b"".join(Path(file).read_bytes() for file in (__file__, gated.__file__, graphs.__file__))
        return hashlib.sha256(text + "\n".join(key).encode()).hexdigest()

    def __call__(self, graph: fx.Graph) -> list[str]:
        """Fuses what it can in a functional graph of ATen operators; for each place, what became one operator."""
        fused = []
        for node in list(graph.nodes):
            # One at a time: a norm's residual is often the sum of the norm before it, which fusing replaces.
            norm = _Norm.of(node, self.group)
            if norm is not None and norm.is_fusible():
                fused.append(norm.describe())
                norm.fuse(self.group)
            elif activation := gated.fuse(node):
                fused.append(activation)
        if fused:
            counts = ", ".join(f"{count} x {what}" for what, count in Counter(fused).items())
            _log(f"norm fusion: in a compiled graph became one kernel each: {counts} (layers alike share a graph)")
        return fused


class _Norm:
    """A call of one of vLLM's norms in a graph.

    Attributes:
        results: the nodes that are its normalised output.
        sums: the nodes that are its new residual.
        quantizations: the calls of our quantization of its normalised output.
        others: who else reads its normalised output.
        reduction: the all-reduce that gives its input and can be fused with it, or None.
    """

    def __init__(self, node: fx.Node, group: str | None) -> None:
        self.node = node
        has_residual = node.target is torch.ops.vllm_ir.fused_add_rms_norm.default
        values = graphs.arguments(node)
        self.x, self.weight, self.epsilon = values["x"], values["weight"], values["epsilon"]
        self.residual = values["x_residual"] if has_residual else None
        self.variance_size = values["variance_size"]
        self.results = graphs.items(node, 0) if has_residual else [node]
        self.sums = graphs.items(node, 1) if has_residual else []
        readers = dict.fromkeys(user for result in self.results for user in result.users)
        self.quantizations = [user for user in readers if user.target is graphs.QUANTIZE]
        self.others = [user for user in readers if user.target is not graphs.QUANTIZE]
        self.reduction = self.x if group is not None and self._ends(self.x, group) else None

    @classmethod
    def of(cls, node: fx.Node, group: str | None) -> "_Norm | None":
        ir = torch.ops.vllm_ir
        is_norm = node.op == "call_function" and node.target in (ir.rms_norm.default, ir.fused_add_rms_norm.default)
        return cls(node, group) if is_norm else None

    def _ends(self, x: fx.Node, group: str) -> bool:
        """Whether x is an all-reduce over `group` that nobody needs once the norm has read it. Without a residual its
        result is the norm's new residual, and may be read later."""
        if x.target is not torch.ops.vllm.all_reduce.default or graphs.arguments(x)["group_name"] != group:
            return False
        if x is self.residual:
            return False
        return all(user is self.node or (self.residual is None and self.node < user) for user in x.users)

    @property
    def is_simple(self) -> bool:
        """Whether only quantizations follow, and no all-reduce precedes."""
        return self.reduction is None and not self.others

    def is_fusible(self) -> bool:
        """Whether there is something to fuse the norm with, and our operators compute it."""
        if not (self.quantizations or self.reduction) or self.variance_size is not None or self.weight is None:
            return False
        if not (self.quantizations or self.others):  # its sum alone is read
            return False
        x, weight = self.x.meta["val"], self.weight.meta["val"]
        if weight.dtype not in graphs.FLOATS or not graphs.same(weight.shape, x.shape[-1:]):
            return False
        if x.dtype not in (graphs.FLOATS if self.is_simple else _HALF) or (not self.is_simple and x.shape[-1] % BLOCK):
            return False
        if self.residual is None:
            return True
        residual = self.residual.meta["val"]
        return residual.dtype == x.dtype and graphs.same(residual.shape, x.shape)

    def describe(self) -> str:
        parts = (
            ["all-reduce"] * (self.reduction is not None) + ["RMSNorm"] + ["quantization"] * bool(self.quantizations)
        )
        return " + ".join(parts)

    def fuse(self, group: str | None) -> None:
        """Puts our operator in the norm's place. What nobody reads afterwards is gone, all-reduce included."""
        graph, reduction = self.node.graph, self.reduction
        total = normed = codes = scales = None
        with graph.inserting_before(self.node):
            if not self.is_simple:
                total, normed, codes, scales = graphs.call(
                    graph,
                    _REDUCE_FUSED,
                    graphs.arguments(reduction)["tensor"] if reduction else self.x,
                    self.residual,
                    self.weight,
                    None,
                    self.epsilon,
                    0.0,
                    (reduction and group) or "",
                    str(Quantization.FP8_PER_TOKEN if self.quantizations else Quantization.NONE),
                    str(ScaleLayout.LINEAR),
                    bool(self.others),
                )
            elif self.residual is None:
                codes, scales = graphs.call(graph, _FUSED, self.x, self.weight, self.epsilon)
            else:
                operands = self.x, self.weight, self.epsilon, self.residual
                codes, scales, total = graphs.call(graph, _ADD_FUSED, *operands)
        for quantization in self.quantizations:
            graphs.replace_quantization(quantization, codes, scales)
        graphs.replace(self.sums, total)
        graphs.replace(self.results, normed)
        if self.residual is not None:
            graph.erase_node(self.node)
        if reduction is not None:
            graphs.replace([reduction], total)
        graphs.erase_unread(result for result in (total, normed, codes, scales) if result is not None)
