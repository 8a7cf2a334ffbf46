# SPDX-License-Identifier: Apache-2.0
"""The tensor-parallel group of this process, made known to `ops.reduce_norm_quant` by vLLM's name of it."""

import logging
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from vllm.config import ParallelConfig
from vllm.distributed import get_tp_group
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.platforms import current_platform

from llm_quant_rocm.comm import reduce_norm_quant as comm
from llm_quant_rocm.comm.group import first_refusal
from llm_quant_rocm.comm.policy import WORLD_SIZES, Settings
from llm_quant_rocm.comm.watch import Watch
from llm_quant_rocm.formats.wire import CODECS
from llm_quant_rocm_vllm.communicator import hosts_of, unreachable

logger = logging.getLogger("llm_quant_rocm")

# By group, the name under which it is connected, or None. An engine that follows another one in this process has other
# groups of the same names.
_connected: "weakref.WeakKeyDictionary[GroupCoordinator, str | None]" = weakref.WeakKeyDictionary()


def connect(parallel_config: ParallelConfig) -> str | None:
    """The name by which `ops.reduce_norm_quant` knows this process's tensor-parallel group; None where there is one
    rank alone, and where the group is better served by vLLM, which one line says. All ranks of the group call."""
    group = get_tp_group()
    if group not in _connected:
        _connected[group] = _connect(group, parallel_config) if group.world_size > 1 else None
    return _connected[group]


def _connect(group: GroupCoordinator, parallel_config: ParallelConfig) -> str | None:
    name = group.unique_name
    comm.disconnect(name)
    refusal = first_refusal(_refusal(group, parallel_config), group.cpu_group)
    if refusal is None:
        codec = Settings.from_environment().codec or CODECS["FP"]
        shared = _memory_of(group)
        ranks = comm.connect(name, group.cpu_group, group.device, codec, shared, _all_reduce_of(group))
        # A CPU has no peer memory, and nothing better than the process group either.
        refusal = first_refusal(ranks.obstacle if group.device.type != "cpu" else None, group.cpu_group)
        if refusal is None:
            if ranks.memory is not None and shared is None:
                Watch(ranks.memory.check)
            return name
        comm.disconnect(name)
    if group.rank_in_group == 0:
        logger.info("norm fusion: vLLM's all-reduce of the group %s stays apart; %s", name, refusal)
    return None


def _refusal(group: GroupCoordinator, parallel_config: ParallelConfig) -> str | None:
    """Why the group is not served, as this rank sees it. All ranks call."""
    if parallel_config.use_ubatching:
        return "halves of a batch run at once, and calls need an order"
    if group.world_size not in WORLD_SIZES:
        return f"it has {group.world_size} ranks, and up to {WORLD_SIZES.stop - 1} are served"
    if len(hosts_of(group.cpu_group)) > 1:
        return "its ranks are on several hosts"
    if group.device.type == "cpu":
        return None
    facts = os.environ.get(current_platform.device_control_env_var), group.device.index
    everyone: list[tuple[str | None, int]] = [(None, 0)] * group.world_size
    dist.all_gather_object(everyone, facts, group.cpu_group)
    return unreachable(group.device, everyone)


def _all_reduce_of(group: GroupCoordinator) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The group's own all-reduce, whatever serves a message there."""
    return getattr(group.device_communicator, "all_reduce", None)


def _memory_of(group: GroupCoordinator) -> Any:
    """The peer memory of the group's quantized all-reduce, if it has one."""
    transport = getattr(getattr(group.device_communicator, "quantized", None), "transport", None)
    return transport if hasattr(transport, "mailbox") else None
