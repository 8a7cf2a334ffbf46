# SPDX-License-Identifier: Apache-2.0
"""Loading under ptpc_fp8 takes the memory of the quantized model and of little more, not that of the model in BF16."""

import multiprocessing
import os
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import checkpoints
import ports
import pytest
import servers
import torch
from memory import taken_by

METHODS = ("ptpc_fp8", None)


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Path:
    """Six layers, in 148 MiB of BF16."""
    torch.set_default_dtype(torch.bfloat16)  # halves the memory of making it
    try:
        heads = {"num_attention_heads": 16, "num_key_value_heads": 16}
        return checkpoints.dense(
            folder / "large", hidden_size=1024, intermediate_size=2816, num_hidden_layers=6, **heads
        )
    finally:
        torch.set_default_dtype(torch.float32)


def load(checkpoint: Path, results: Connection) -> None:
    """Sends the peak and the final memory of loading, by method, as an SGLang worker loads."""
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = servers.other_models()
    import sglang.srt.models.registry  # noqa: F401  # which takes memory of its own
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.model_loader.loader import get_model_loader
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    arguments = ServerArgs(model_path=str(checkpoint), device="cpu", attention_backend="torch_native")
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    init_distributed_environment(1, 0, f"tcp://127.0.0.1:{ports.free()}", 0, "gloo")
    initialize_model_parallel()
    initialize_dp_attention(arguments)
    for method in METHODS:
        config = ModelConfig(model_path=str(checkpoint), quantization=method, dtype="bfloat16")
        loader = get_model_loader(LoadConfig(), config)
        model, peak, final = taken_by(
            partial(loader.load_model, model_config=config, device_config=DeviceConfig("cpu", 0))
        )
        results.send((peak, final))
        del model, loader


def test_peak_is_the_quantized_model_and_about_a_layer(checkpoint: Path) -> None:
    context = multiprocessing.get_context("fork")  # SGLang's imports, which take longest, are this process's
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=load, args=(checkpoint, sender))
    process.start()
    sender.close()
    try:
        (peak, final), (bf16_peak, _) = (receiver.recv() for _ in METHODS)
    finally:
        process.join(30)
        process.kill()
    print(f"peak {peak:.0f} MiB, model {final:.0f} MiB; in BF16 {bf16_peak:.0f} MiB")
    # A layer is 24 MiB in BF16, its largest matrix 11.
    assert peak < final + 24
    assert peak < 0.75 * bf16_peak
