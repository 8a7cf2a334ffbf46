# SPDX-License-Identifier: Apache-2.0
"""What stands between two quantized layers of a model becomes one operator, `ops.reduce_norm_quant`.

    norm, then quantization of its result            where one of our FP8 layers reads the norm
    all-reduce, norm, and quantization if any        where SGLang leaves an all-reduce to the norm that follows

SGLang runs its models eagerly, so there is no graph to rewrite. Norms get another `_forward_method`, which SGLang's
norms choose a kernel by, and learn from the first batches, before graphs are captured, whether an FP8 layer reads them:
such a norm hands its codes on with its result, and the layer takes them instead of quantizing again. The result itself
stays in 16 bits, for whoever else reads it.

SGLang leaves an all-reduce to the norm behind it in models that say where (LayerCommunicator in 0.5.17, layer_boundary
from 0.5.21 on), for kernels of FlashInfer's and AITER's that do both. One function says whether they may, and another
calls them: hooks on both let ours do it (patches.py).

Results are those of our separate operators in every bit. SGLang's own norm differs from ours in one rounding: it
normalises the sum of activation and residual before that is rounded to 16 bits.
"""

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.distributed import parallel_state
from sglang.srt.layers import layernorm
from sglang.srt.layers.layernorm import GemmaRMSNorm, RMSNorm
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils import is_flashinfer_available

from llm_quant_rocm import ops
from llm_quant_rocm.comm import norm_ranks
from llm_quant_rocm.comm.policy import Settings
from llm_quant_rocm.environment import FUSION as SWITCH
from llm_quant_rocm.environment import switched_on
from llm_quant_rocm.formats.norm_quant import Quantization
from llm_quant_rocm.formats.nvfp4 import BLOCK
from llm_quant_rocm.ops.reduce_norm_quant import MAX_COLUMNS
from llm_quant_rocm_sglang import communicator
from llm_quant_rocm_sglang.engine_layers import loading, server_arguments

_HALF = (torch.bfloat16, torch.float16)
# Where a norm's result keeps what FP8 layers want to know of it.
_MARK = "_llm_quant_rocm_norm"
# Attributes of SGLang's norms, with the values under which they compute what ours does.
_PLAIN = {
    "has_weight": True,
    "cast_x_before_out_mul": False,
    "fp32_residual": False,
    "override_orig_dtype": None,
    "variance_size_override": None,
    "x_pad_to_multiple": 0,
}

# By group, the name under which it is connected, or None.
_connected: "weakref.WeakKeyDictionary[Any, str | None]" = weakref.WeakKeyDictionary()

logger = logging.getLogger("llm_quant_rocm")


@dataclass(slots=True)
class _Mark:
    """What a norm's result carries.

    Attributes:
        norm: which norm.
        version: of the result when it was made: it counts the changes in place that torch knows of.
        codes, scales: the result per token in FP8, or None.
    """

    norm: "FusedNorm"
    version: int
    codes: torch.Tensor | None = None
    scales: torch.Tensor | None = None


def ptpc_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    layout: str,
    batch_invariant: bool,
) -> torch.Tensor:
    """`ops.ptpc_linear`, by the codes that x carries if it comes from a norm that has made them; not `batch_invariant`:
    a norm's bits would depend on whether one of its results was seen here before."""
    mark = None if batch_invariant or torch.compiler.is_compiling() else getattr(x, _MARK, None)
    if mark is not None and mark.version == x._version:
        if mark.codes is not None:
            return ops.ptpc_gemm(mark.codes, mark.scales, weight, scale, bias, x.dtype, layout)
        mark.norm.quantizes = True
    return ops.ptpc_linear(x, weight, scale, bias, layout, batch_invariant=batch_invariant)


class FusedNorm:
    """Stands in for the forward method of one RMSNorm of SGLang's.

    Attributes:
        is_plain: whether our operator computes this norm. Another one stays SGLang's, and marks its results all the
            same: SGLang's kernels norm in place, and the mark of what they overwrite must not outlive it.
        quantizes: whether an FP8 layer was seen to read the norm's result.
    """

    def __init__(self, norm: Any, plain: Callable[..., Any]) -> None:
        self._norm, self._plain = norm, plain
        self._weight_bias = 1.0 if isinstance(norm, GemmaRMSNorm) else 0.0
        self.is_plain = _is_plain(norm)
        self.quantizes = False

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        post_residual_addition: torch.Tensor | None = None,
        **options: Any,
    ) -> Any:
        """What SGLang's method gives: the norm of x [..., K], or that of x + residual and this sum."""
        if torch.compiler.is_compiling():
            return self._plain(x, residual, post_residual_addition, **options)
        if self.quantizes and self._takes(x, residual):
            return self.run(x, residual, post_residual_addition, "")
        result = self._plain(x, residual, post_residual_addition, **options)
        _mark(result if residual is None else result[0], self)
        return result

    def takes_sums(self, x: torch.Tensor, residual: torch.Tensor | None) -> bool:
        """Whether `run` computes the norm of an all-reduce of x."""
        return residual is not None and self._takes(x, residual)

    def run(
        self, x: torch.Tensor, residual: torch.Tensor | None, post_residual_addition: torch.Tensor | None, group: str
    ) -> Any:
        """The norm by our operator, in new tensors; of the sum of x over the ranks of `group`."""
        if residual is not None and post_residual_addition is not None:
            residual = residual + post_residual_addition
        total, normed, codes, scales = ops.reduce_norm_quant(
            x,
            self._norm.weight.data,
            residual,
            group=group,
            eps=self._norm.variance_epsilon,
            weight_bias=self._weight_bias,
            quantization=Quantization.FP8_PER_TOKEN if self.quantizes else Quantization.NONE,
            normed=True,
        )
        _mark(normed, self, codes, scales)
        return normed if residual is None else (normed, total)

    def _takes(self, x: torch.Tensor, residual: torch.Tensor | None) -> bool:
        if not self.is_plain or x.dtype not in _HALF or x.shape[-1:] != self._norm.weight.shape or x.shape[0] == 0:
            return False
        return residual is None or (residual.dtype == x.dtype and residual.shape == x.shape)


def _mark(result: Any, norm: FusedNorm, codes: torch.Tensor | None = None, scales: torch.Tensor | None = None) -> None:
    # An inference tensor does not count its changes; others than tensors are SGLang's own codes.
    if isinstance(result, torch.Tensor) and not result.is_inference():
        setattr(result, _MARK, _Mark(norm, result._version, codes, scales))


def load_model(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """`ModelRunner.load_model`, behind which the model's norms are ours where one of its layers is."""
    with loading(runner):
        result = original(runner, *args, **kwargs)
    install(runner.model)
    return result


def install(model: torch.nn.Module) -> None:
    """Let the norms of a loaded model be fused with what stands around them, unless `SWITCH` is 0."""
    from llm_quant_rocm_sglang.fp8_linear import Fp8LinearMethod
    from llm_quant_rocm_sglang.nvfp4_linear import NvFp4LinearMethod
    from llm_quant_rocm_sglang.ptpc_linear import PtpcFp8LinearMethod

    methods: set[type] = {type(getattr(module, "quant_method", None)) for module in model.modules()}
    quantizes = not methods.isdisjoint((PtpcFp8LinearMethod, Fp8LinearMethod))
    tensor_parallel = parallel_state.get_tp_group()
    # Activations of NVFP4 layers stay in 16 bits: on one rank there is nothing to fuse.
    if not quantizes and (NvFp4LinearMethod not in methods or tensor_parallel.world_size == 1):
        return
    if not switched_on(SWITCH):
        _log(f"norm fusion: off, by {SWITCH}=0")
        _group_name(tensor_parallel, f"{SWITCH}=0 on one of its ranks")  # others would wait for this one
        return
    norms: list[Any] = [module for module in model.modules() if isinstance(module, RMSNorm | GemmaRMSNorm)]
    for norm in norms:
        norm._forward_method = FusedNorm(norm, norm._forward_method or norm._resolve_forward_method())
    name = _group_name(tensor_parallel)
    what = ["quantization, where an FP8 layer reads them"] * quantizes
    what += ["the all-reduce, where the model leaves it to them"] * (name is not None)
    count = sum(norm._forward_method.is_plain for norm in norms)
    _log(f"norm fusion: on for {count} norms, with {' and '.join(what) or 'nothing'}; {SWITCH}=0 switches it off")


def _is_plain(norm: Any) -> bool:
    columns = norm.weight.numel()
    if type(norm) not in (RMSNorm, GemmaRMSNorm) or columns % BLOCK or columns > MAX_COLUMNS:
        return False
    return all(getattr(norm, name, value) == value for name, value in _PLAIN.items())


def may_fuse(original: Callable[[int], bool], batch_size: int) -> bool:
    """`flashinfer_ar_fusion_applies`: whether SGLang may leave an all-reduce to the norm that follows."""
    if original(batch_size):
        return True
    return not torch.compiler.is_compiling() and batch_size > 0 and _serving() is not None


def reduce_and_norm(
    original: Callable[..., Any],
    norm: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    post_residual_addition: torch.Tensor | None,
    weight: torch.Tensor,
    use_attn_tp_group: bool = True,
) -> Any:
    """`_forward_with_allreduce_fusion`: the norm of the sum over all tensor-parallel ranks of x, plus the residual."""
    name = None if residual is None or torch.compiler.is_compiling() else _serving()
    if name is None:
        return original(norm, x, residual, post_residual_addition, weight, use_attn_tp_group)
    fused = norm._forward_method
    if isinstance(fused, FusedNorm) and fused.takes_sums(x, residual):
        return fused.run(x, residual, post_residual_addition, name)
    # A norm that is not ours: SGLang has left the sum to us all the same, and expects a residual of its own.
    total = parallel_state.get_tp_group().all_reduce(x)
    return norm.forward(total, residual.clone(), post_residual_addition)  # type: ignore[union-attr]


def _serving() -> str | None:
    return _connected.get(parallel_state.get_tp_group())


def _group_name(group: Any, obstacle: str | None = None) -> str | None:
    """The name by which `ops.reduce_norm_quant` knows the tensor-parallel group. All its ranks call, also one that has
    an `obstacle` of its own."""
    if group.world_size == 1:
        return None
    if group not in _connected:
        transport = getattr(group.qr_comm, "transport", None)
        members, settings, refusal = communicator.members(group), Settings.for_sglang(), obstacle or _refusal()
        name = norm_ranks.connect(members, settings, refusal, transport, _all_reduce_of(weakref.ref(group)))
        _connected[group] = name
        if name is not None:
            norm_ranks.disconnect_with(group, name)
    return _connected[group]


def _all_reduce_of(group: "weakref.ref[Any]") -> Callable[[torch.Tensor], torch.Tensor]:
    """The group's own, in new tensors: on CPUs, and where none of SGLang's kernels serves, it adds in place."""

    def all_reduce(x: torch.Tensor) -> torch.Tensor:
        return group().all_reduce(x.clone())  # type: ignore[union-attr]  # who calls has the group

    return all_reduce


def _refusal() -> str | None:
    """Why SGLang's all-reduces stay apart from its norms."""
    if not hasattr(getattr(layernorm, "_forward_with_allreduce_fusion", None), "__wrapped__"):
        return "its norms could not be hooked"
    arguments, parallel = server_arguments(), get_parallel()
    # SGLang sets it by itself for some models, and then does without where FlashInfer is not there.
    if getattr(arguments, "flashinfer_allreduce_fusion_backend", None) is not None and is_flashinfer_available():
        return "--flashinfer-allreduce-fusion-backend serves"
    if getattr(arguments, "enable_aiter_allreduce_fusion", False):
        return "--enable-aiter-allreduce-fusion serves"
    if getattr(arguments, "enable_deterministic_inference", False):
        return "--enable-deterministic-inference is set, and which algorithm serves depends on the size of a batch"
    for option in ("enable_two_batch_overlap", "enable_single_batch_overlap", "enable_pdmux"):
        if getattr(arguments, option, False):
            return f"--{option.replace('_', '-')} lets batches run at once, and calls need an order"
    if parallel.attn_tp_size != parallel.tp_size or parallel.tp_size not in (
        parallel.moe_ep_size,
        parallel.moe_tp_size,
    ):
        return "attention or experts add up over other groups than tensor parallelism's"
    return None


@cache
def _log(line: str) -> None:
    """Once, and of the ranks only one."""
    group = parallel_state.get_tp_group()
    is_first = group.world_size == 1 or dist.get_rank(group.cpu_group) == 0
    logger.log(logging.INFO if is_first else logging.DEBUG, line)
