# SPDX-License-Identifier: Apache-2.0
"""The tensor-parallel group of this process, made known to `ops.reduce_norm_quant` by vLLM's name of it."""

import weakref
from typing import Any

from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.distributed.parallel_state import GroupCoordinator, in_the_same_node_as
from vllm.distributed.utils import get_distributed_timeout_or_none
from vllm.platforms import current_platform

from llm_quant_rocm.comm import norm_ranks
from llm_quant_rocm.comm.group import Members
from llm_quant_rocm.comm.policy import Settings

# By group, the name under which it is connected, or None.
_connected: "weakref.WeakKeyDictionary[GroupCoordinator, str | None]" = weakref.WeakKeyDictionary()


def connect(vllm_config: VllmConfig, obstacle: str | None = None) -> str | None:
    """The name by which `ops.reduce_norm_quant` knows this process's tensor-parallel group; None where there is one
    rank alone, and where the group is better served by vLLM, which one line says. All ranks of the group call, also
    one that has an `obstacle` of its own."""
    group = get_tp_group()
    if group not in _connected:
        _connected[group] = _connect(group, vllm_config, obstacle) if group.world_size > 1 else None
    return _connected[group]


def members(group: Any, **more: Any) -> Members:
    """One of vLLM's groups, or a group's communicator, as the library knows groups."""
    return Members(
        engine="vLLM",
        name=group.unique_name,
        cpu_group=group.cpu_group,
        device_group=getattr(group, "device_group", group.cpu_group),
        device=group.device,
        same_host=in_the_same_node_as,
        visible_devices=current_platform.device_control_env_var,
        timeout=get_distributed_timeout_or_none(),
        **more,
    )


def _connect(group: GroupCoordinator, vllm_config: VllmConfig, obstacle: str | None) -> str | None:
    transport = getattr(getattr(group.device_communicator, "quantized", None), "transport", None)
    all_reduce = getattr(group.device_communicator, "all_reduce", None)
    refusal = obstacle or _refusal(vllm_config, transport)
    name = norm_ranks.connect(members(group), Settings.from_environment(), refusal, transport, all_reduce)
    if name is not None:
        norm_ranks.disconnect_with(group, name)
    return name


def _refusal(vllm_config: VllmConfig, transport: Any) -> str | None:
    """Why vLLM's all-reduces stay apart from its norms."""
    if vllm_config.parallel_config.use_ubatching:
        return "halves of a batch run at once, and calls need an order"
    if envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT is set, and which algorithm serves depends on the size of a batch"
    if vllm_config.model_config.enable_sleep_mode and not hasattr(transport, "mailbox"):
        # The quantized all-reduce has its memory from before the model is built.
        return "--enable-sleep-mode takes away what is allocated while a model is built, as its memory would be"
    return None
