# SPDX-License-Identifier: Apache-2.0
"""Loads a checkpoint as a vLLM worker does and prints what memory that took.

`python load_process.py CHECKPOINT METHOD` ("none" for no quantization) prints JSON: `peak_mib` and `final_mib`,
above the memory of the process before the load.
"""

import json
import sys
from functools import partial

import torch
from memory import taken_by
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.utils.network_utils import get_distributed_init_method, get_open_port


def main(checkpoint: str, method: str) -> None:
    arguments = EngineArgs(
        model=checkpoint, quantization=None if method == "none" else method, enforce_eager=True, max_model_len=128
    )
    config = arguments.create_engine_config()
    torch.accelerator.empty_cache = lambda: None  # as vLLM's CPU worker has it: there is no accelerator
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, get_distributed_init_method("127.0.0.1", get_open_port()), 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        model, peak, final = taken_by(partial(get_model, vllm_config=config))
    print(json.dumps({"peak_mib": peak, "final_mib": final}))
    del model


if __name__ == "__main__":
    main(*sys.argv[1:])
