# SPDX-License-Identifier: Apache-2.0
"""How an operator becomes a torch.library operator: one definition for every device, with a fake for tracing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_LIBRARY = torch.library.Library("llm_quant_rocm", "FRAGMENT")


def register(
    schema: str, validate: Callable[..., None], implementation: Callable[..., Any], fake: Callable[..., Any]
) -> Any:
    """Registers llm_quant_rocm::NAME by its `schema` and returns the operator.

    All three functions take the operator's arguments. `validate` raises on arguments that do not fit, before either of
    the others; inside the operator, so that torch.compile does not trace it. `fake` gives outputs of the right shape,
    dtype and device without data. The operator stays one node of a traced graph; but for the experts' references,
    nothing in it synchronizes, so it can be captured in a CUDA graph. The first argument is a tensor, and its GPU is
    the current one meanwhile. It has no gradient, and torch.autocast does not reach into it (`isolated`).
    """

    def checked(*args: Any) -> Any:
        validate(*args)
        x = args[0]
        # To ask costs less than to switch off what is off, or to make the current GPU current.
        if not (torch.is_grad_enabled() or _in_autocast(x) or _elsewhere(x)):
            return implementation(*args)
        with isolated(x):
            return implementation(*args)

    def checked_fake(*args: Any) -> Any:
        validate(*args)
        return fake(*args)

    name = schema.split("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, checked, "CompositeExplicitAutograd")
    torch.library.register_fake(f"llm_quant_rocm::{name}", checked_fake, lib=_LIBRARY)
    return getattr(torch.ops.llm_quant_rocm, name).default


@contextmanager
def isolated(x: torch.Tensor) -> Iterator[None]:
    """What an operator on x runs in, whatever is on around it: without gradients, without torch.autocast, which would
    multiply in 16 bits what is to be summed in fp32, and with x's GPU as the current one, because Triton launches on
    the current device and its stream, wherever the tensors are."""
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False), torch.cuda.device_of(x):
        yield


def _in_autocast(x: torch.Tensor) -> bool:
    """Whether torch.autocast is on for x's device. Of a GPU that is asked without naming it, in a third of the time."""
    return torch.is_autocast_enabled() if x.is_cuda else torch.is_autocast_enabled(x.device.type)


def _elsewhere(x: torch.Tensor) -> bool:
    """Whether x is on a GPU that is not the current one."""
    return x.is_cuda and x.get_device() != torch.cuda.current_device()
