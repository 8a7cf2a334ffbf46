# SPDX-License-Identifier: Apache-2.0
"""The quantized all-reduce behind vLLM's communicators, for tensor-parallel groups.

`class_over` makes a subclass of whichever communicator the platform chose. It asks `QuantizedAllReduce.quantized`
first, and where that declines a message, because of its size or its type, vLLM's own order of all-reduces serves it.
Small ones it leaves to vLLM's custom all-reduce where that takes them (`GroupReduce`).
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.device_communicators.quick_all_reduce import QuickReduceRegime
from vllm.utils.import_utils import resolve_obj_by_qualname

from llm_quant_rocm.comm import group
from llm_quant_rocm.comm.group import GroupReduce, better_left_to
from llm_quant_rocm.comm.policy import Policy, Settings
from llm_quant_rocm.environment import QUICK_REDUCE, read
from llm_quant_rocm_vllm.patches import QUANTIZATION
from llm_quant_rocm_vllm.reduce_norm import members

# Codecs of ours alone: vLLM's QuickReduce would report each as a broken setting.
_UNKNOWN_TO_VLLM = ("FP4", "FP8")

logger = logging.getLogger("llm_quant_rocm")


@cache
def class_over(name: str) -> str:
    """The name of a class of this module: the communicator called `name`, with the quantized all-reduce before it."""
    base = resolve_obj_by_qualname(name)
    ours = type(f"Quantized{base.__name__}", (QuantizedAllReduce, base), {"__module__": __name__})
    globals()[ours.__name__] = ours
    return f"{__name__}.{ours.__name__}"


class QuantizedAllReduce:
    """What `class_over` puts before a communicator of vLLM.

    Attributes:
        quantized: None where it stepped aside, and in groups other than tensor parallelism's.
    """

    device: torch.device
    unique_name: str
    quantized: "QuickReduceComm | None" = None

    def __init__(
        self,
        cpu_group: dist.ProcessGroup,
        device: torch.device | None = None,
        device_group: dist.ProcessGroup | None = None,
        unique_name: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> None:
        settings = Settings.from_environment()
        with _hidden_from_vllm(settings):
            super().__init__(cpu_group, device, device_group, unique_name, *args, **kwargs)  # type: ignore[call-arg]
        if unique_name.split(":")[0] == "tp":
            self.quantized = connect(self, settings)
        vllms = getattr(self, "qr_comm", None)
        if self.quantized is not None and (vllms is None or vllms.disabled):
            # Read by vLLM's fusion of the all-reduce with AITER's RMSNorm, which may otherwise send what is ours.
            self.qr_comm = self.quantized
            self._aiter_qr_rmsnorm_comm = False  # no AITER kernel of its own for codecs that it does not know

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """The sum over the group; a new tensor."""
        if self.quantized is None:
            return super().all_reduce(input_)  # type: ignore[misc]
        if torch.compiler.is_compiling():
            # Only on CPUs are communicators traced: this operator of vLLM's, which ends up here, hides what follows.
            return torch.ops.vllm.all_reduce(input_, group_name=self.unique_name)
        if self.quantized.should_quick_allreduce(input_):
            return self.quantized.quick_all_reduce(input_)
        # On CPUs vLLM adds in place, which the operator may not.
        return super().all_reduce(input_.clone() if self.device.type == "cpu" else input_)  # type: ignore[misc]

    def destroy(self) -> None:
        if self.quantized is not None:
            self.quantized.close()
            self.quantized = None
        super().destroy()  # type: ignore[misc]


class QuickReduceComm(GroupReduce):
    """The quantized all-reduce of one group, with the names of vLLM's `QuickAllReduce`.

    Attributes:
        qr_quant_level: vLLM's own for the codec; None for FP4 and FP8.
        use_fp16_kernels: whether bf16 travels as fp16.
    """

    @property
    def qr_quant_level(self) -> QuickReduceRegime | None:
        assert self.policy.settings.codec is not None
        return QuickReduceRegime.__members__.get(self.policy.settings.codec.name)

    @property
    def use_fp16_kernels(self) -> bool:
        return self.policy.settings.cast_bf16_to_fp16

    def uses_flydsl_int4(self, inp: torch.Tensor) -> bool:
        """True for what is ours: to AITER's fusion it means that an all-reduce and an RMSNorm apart serve `inp`."""
        return self.should_quick_allreduce(inp)

    def _get_qr_quant_level(self, inp: torch.Tensor) -> int:
        """The level that AITER's fused kernel would send by: FP. It serves nothing of ours."""
        return QuickReduceRegime.FP.value


def connect(communicator: Any, settings: Settings) -> QuickReduceComm | None:
    """The quantized all-reduce of a communicator's group, whose ranks all call, or None (`comm.group.connect`).

    Raises:
        ValueError: a file of measured crossovers is broken.
    """
    config = get_current_vllm_config_or_none()
    dtype = getattr(config.model_config, "dtype", None) if config is not None else None

    def refuse(policy: Policy) -> str | None:
        if envs.VLLM_BATCH_INVARIANT:
            return "VLLM_BATCH_INVARIANT is set, and which algorithm serves depends on the size of a batch"
        own = getattr(communicator, "qr_comm", None)
        return better_left_to(own, policy, f"{QUICK_REDUCE}MIN_SIZE_BYTES_MB")

    given = members(communicator, dtype=dtype, custom=_custom(communicator))
    quantized = group.connect(given, settings, refuse, QuickReduceComm)
    if quantized is not None and config is not None and config.compilation_config.pass_config.fuse_allreduce_rms:
        log = logger.info if dist.get_rank(communicator.cpu_group) == 0 else logger.debug
        log("quantized all-reduce: what vLLM fuses with an RMSNorm (fuse_allreduce_rms) it may send unquantized")
    return quantized


def _custom(communicator: Any) -> Any:
    """vLLM's custom all-reduce, its own or AITER's, or None; its communicator of CPUs has none."""
    custom = getattr(communicator, "ca_comm", None)
    if getattr(communicator, "use_aiter_allreduce", False):
        custom = communicator.aiter_ar_comm or custom
    return custom


@contextmanager
def _hidden_from_vllm(settings: Settings) -> Iterator[None]:
    """vLLM's QuickReduce, which reads the environment when it is made, is not told of codecs that it does not know."""
    if settings.codec is None or settings.codec.name not in _UNKNOWN_TO_VLLM:
        yield
        return
    before = read(QUANTIZATION) or "NONE"
    os.environ[QUANTIZATION] = "NONE"
    try:
        yield
    finally:
        os.environ[QUANTIZATION] = before
