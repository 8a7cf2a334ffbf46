# SPDX-License-Identifier: Apache-2.0
"""A platform for SGLang without sgl_kernel, and what the tests want to know of a worker.

SGLang's own CPU platform calls operators of sgl_kernel, of which the registry has no build for CPUs. SGLang lets others
bring a platform (the entry point group sglang.srt.platforms): this one has torch's operators for all there is.
"""

import os
from typing import Any

import torch


def platform() -> str | None:
    """The name of the platform's class, for SGLang; None where there is a GPU, on which SGLang needs no other's."""
    if torch.cuda.is_available():
        return None
    _make_class()
    return f"{__name__}.Platform"


def _make_class() -> None:
    # Not above: SGLang's logic of platforms is being imported when it asks for ours.
    from sglang.srt.platforms.cpu import CpuDeviceMixin
    from sglang.srt.platforms.device_mixin import PlatformEnum
    from sglang.srt.platforms.interface import SRTPlatform

    class Platform(CpuDeviceMixin, SRTPlatform):
        _enum = PlatformEnum.OOT

        def get_default_attention_backend(self) -> str:
            return "torch_native"

        def get_mha_kv_pool_cls(self) -> type:  # up to 0.5.20
            from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

            return MHATokenToKVPool

        def get_paged_allocator_cls(self) -> type:
            from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

            return PagedTokenToKVPoolAllocator

        def get_dispatch_key_name(self) -> str:
            return "native"

        def supports_fp8(self) -> bool:
            return True

    globals()["Platform"] = Platform


def register() -> None:
    """With SAVE_WEIGHTS set, every worker saves what its model holds as SAVE_WEIGHTS/weights-RANK.pt."""
    if folder := os.environ.get("SAVE_WEIGHTS"):
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        def save(result: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
            # Codes are saved as bytes: not every operation of a comparison knows FP8.
            tensors = {
                name: tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
                for name, tensor in runner.model.state_dict().items()
            }
            torch.save(tensors, f"{folder}/weights-{torch.distributed.get_rank()}.pt")

        target = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
        HookRegistry.register(target, save, HookType.AFTER)
