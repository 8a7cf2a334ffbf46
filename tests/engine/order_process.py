# SPDX-License-Identifier: Apache-2.0
"""Loads a checkpoint as one of two vLLM workers does, with `ptpc_fp8` in fp16; the second from its last tensor on.

`python order_process.py CHECKPOINT RANK PORT FILE` saves the scales that its model holds.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

RANKS = 2


def main(checkpoint: str, rank: int, port: str, file: str) -> None:
    arguments = EngineArgs(
        model=checkpoint, quantization="ptpc_fp8", dtype="float16", enforce_eager=True, max_model_len=128,
        tensor_parallel_size=RANKS,
    )  # fmt: skip
    config = arguments.create_engine_config()
    torch.accelerator.empty_cache = lambda: None  # as vLLM's CPU worker has it: there is no accelerator
    in_order = DefaultModelLoader.get_all_weights

    def backwards(*args: Any) -> Iterator[tuple[str, torch.Tensor]]:
        yield from reversed(list(in_order(*args)))

    if rank == 1:
        DefaultModelLoader.get_all_weights = backwards
    with set_current_vllm_config(config):
        init_distributed_environment(RANKS, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
        ensure_model_parallel_initialized(RANKS, 1)
        model = get_model(vllm_config=config)
    torch.save({name: tensor for name, tensor in model.state_dict().items() if name.endswith("weight_scale")}, file)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
