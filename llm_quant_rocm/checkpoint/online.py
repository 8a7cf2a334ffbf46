# SPDX-License-Identifier: Apache-2.0
"""Quantization while a checkpoint loads: checks of its 16-bit tensors, and their FP8 codes."""

import zlib
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from llm_quant_rocm.formats import fp8

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def refusing_other_dtypes(
    loader: Callable[..., Any],
    name: Callable[..., str],
    arrives: Callable[..., None] = lambda *args, **kwargs: None,
) -> Callable[..., Any]:
    """The engine's weight loader `loader`, refusing what its copy would convert to the model's dtype in silence.

    `name` gets the loader's arguments after the tensor and returns the tensor's name. `arrives` gets a tensor that is
    not refused, and the same arguments after it.
    """

    @wraps(loader)  # vLLM binds arguments by the loader's signature
    def load(param: torch.nn.Parameter, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if loaded_weight.dtype not in _DTYPES:
            raise TypeError(
                f"{name(*args, **kwargs)} is {loaded_weight.dtype} in the checkpoint, and ptpc_fp8 quantizes bf16, "
                "fp16 and fp32 weights: serve the unquantized checkpoint, or this one with its own method"
            )
        arrives(loaded_weight, *args, **kwargs)
        return loader(param, loaded_weight, *args, **kwargs)

    return load


def refuse_missing(names: Iterable[str], cure: str = "fetch or export the checkpoint again") -> None:
    """ValueError where there are `names`, of tensors that never arrived: their rows would be whatever was in memory."""
    for name in names:
        raise ValueError(f"{name} is missing from the checkpoint: {cure}")


def why_not_again(name: str, cure: str = "start the server again with the new checkpoint") -> str:
    """Why nothing can be loaded over `name`, a weight or a layer that is served."""
    return (
        f"{name} was prepared for its kernels when the checkpoint was loaded, and no other can be loaded over it: "
        f"{cure}"
    )


def refusing_again(name: str, *cure: str) -> Callable[..., None]:
    """The weight loader of a weight that is served: what comes then would be copied into codes as they are."""

    def load(*args: Any, **kwargs: Any) -> None:
        raise ValueError(why_not_again(name, *cure))

    return load


def quantize_weight(
    weight: torch.Tensor,
    name: str,
    name_of_row: Callable[[int], str],
    group: dist.ProcessGroup | None,
    device_type: str,
    amax: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [..., N, K] and fp32 scales [..., N, 1] of weight [..., N, K], in the flavour of its device.

    `group` holds the ranks among which K is sharded: the scales are then those of the whole rows, whatever the
    number of ranks. `name` is the weight's, `name_of_row` that of the checkpoint tensor of a row (of all leading
    dimensions flattened). The engine computes on `device_type`. `amax` [..., N, 1] is that of the whole rows, where
    the caller has seen them: no rank then asks another.

    Raises:
        ValueError: the weight is not where the engine computes, or a row holds NaN or inf (on every rank of `group`),
            or ranks that must ask each other are at different weights.
    """
    if weight.device.type != device_type:
        raise ValueError(
            f"{name} is on {weight.device}, and this engine computes on {device_type}: "
            "it must be there to be quantized; load without a device of your own choice"
        )
    known = amax is not None
    amax = fp8.row_amax(weight) if amax is None else amax
    # Collectives need not carry NaN through a maximum; they do carry inf.
    amax = torch.where(amax.isfinite(), amax, torch.inf)
    if group is not None and not known:
        _refuse_another_order(name, group, weight.device)
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
    broken = amax.isinf().flatten().nonzero()
    if broken.numel():
        raise ValueError(
            f"{name_of_row(int(broken[0]))} holds NaN or inf (in {broken.numel()} rows), which FP8 cannot carry: "
            "the checkpoint is broken, or its values overflow the model's dtype; fetch it again, or try another --dtype"
        )
    return fp8.quantize_rows(weight, fp8.for_device(weight.device), amax)


def _refuse_another_order(name: str, group: dist.ProcessGroup, device: torch.device) -> None:
    """ValueError, on every rank of `group`, where one is not at the weight `name`."""
    number = zlib.crc32(name.encode())
    extremes = torch.tensor([number, -number], dtype=torch.int64, device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    if extremes[0] != -extremes[1]:
        raise ValueError(
            f"{name} is quantized here while another rank is at another weight, and their scales are those of all "
            "ranks: load the checkpoint in one order on all, without threads (enable_multithread_load)"
        )
