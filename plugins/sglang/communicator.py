# SPDX-License-Identifier: Apache-2.0
"""The quantized all-reduce in SGLang's tensor-parallel groups: the hooks that patches.py sets.

SGLang asks an attribute of a group, `qr_comm`, for its QuickReduce. Where ours serves, it stands there, and is asked
before SGLang's other all-reduces; where it declines a message, because of its size or its type, they serve as ever.
Small ones it leaves to SGLang's custom all-reduce where that takes them (`GroupReduce`).
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.distributed.parallel_state import in_the_same_node_as
from sglang.srt.environ import envs
from sglang.srt.utils import is_hip

from llm_quant_rocm.comm.group import GroupReduce, Members, better_left_to, connect
from llm_quant_rocm.comm.policy import Policy, Settings
from llm_quant_rocm.environment import SGLANG_QUICK_REDUCE as _PREFIX
from llm_quant_rocm.environment import read

QUANTIZATION = f"{_PREFIX}QUANTIZATION"
# Codecs of SGLang's own QuickReduce, which reports others as a broken setting.
_KNOWN_TO_SGLANG = ("FP", "INT8", "INT6", "INT4", "NONE")

logger = logging.getLogger("llm_quant_rocm")


def members(group: Any) -> Members:
    """One of SGLang's groups, as the library knows groups."""
    return Members(
        engine="SGLang",
        name=group.unique_name,
        cpu_group=group.cpu_group,
        device_group=group.device_group,
        device=group.device,
        same_host=in_the_same_node_as,
        visible_devices="HIP_VISIBLE_DEVICES" if is_hip() else "CUDA_VISIBLE_DEVICES",
        custom=group.ca_comm,
    )


def attach(original: Callable[..., None], group: Any, *args: Any, **kwargs: Any) -> None:
    """`GroupCoordinator.__init__`: a tensor-parallel group gets our all-reduce as its `qr_comm`."""
    wishes = Settings.for_sglang()
    with _hidden_from_sglang(wishes):
        original(group, *args, **kwargs)
    if wishes.codec is None or group.world_size == 1 or group.unique_name.split(":")[0] != "tp":
        return

    def refuse(policy: Policy) -> str | None:
        if envs.SGLANG_ENABLE_DETERMINISTIC_INFERENCE.get():
            return "--enable-deterministic-inference is set, and which algorithm serves depends on the size of a batch"
        return better_left_to(group.qr_comm, policy, f"{_PREFIX}MIN_SIZE_BYTES_MB")

    ours = connect(members(group), wishes, refuse, GroupReduce)
    if ours is not None:
        group.qr_comm = ours


def resolve(original: Callable[..., str | None], group: Any, input_: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """`GroupCoordinator._resolve_outplace_all_reduce_method`: "qr", SGLang's name for `qr_comm`, for what is ours."""
    if _is_ours(group, input_):
        return "qr"
    return original(group, input_, *args, **kwargs)


def all_reduce(original: Callable[..., torch.Tensor], group: Any, input_: torch.Tensor) -> torch.Tensor:
    """`GroupCoordinator.all_reduce`, which adds tensors on a CPU before it asks which method serves."""
    if input_.is_cpu and _is_ours(group, input_):
        return group.qr_comm.quick_all_reduce(input_)
    return original(group, input_)


def _is_ours(group: Any, input_: torch.Tensor) -> bool:
    return isinstance(group.qr_comm, GroupReduce) and group.qr_comm.should_quick_allreduce(input_)


@contextmanager
def _hidden_from_sglang(wishes: Settings) -> Iterator[None]:
    """SGLang's QuickReduce, which reads the environment when it is made, is told of codecs that it knows alone."""
    before = read(QUANTIZATION)
    if wishes.codec is None or before is None or before in _KNOWN_TO_SGLANG:
        yield
        return
    os.environ[QUANTIZATION] = "NONE"
    try:
        yield
    finally:
        os.environ[QUANTIZATION] = before
