# SPDX-License-Identifier: Apache-2.0
"""Loading under ptpc_fp8 takes no more memory than under vLLM's fp8_per_channel.

`LLM_QUANT_ROCM_LARGE_LOAD=1` makes the checkpoint 1.4 GB instead of 150 MB.
"""

import json
import os
import subprocess
from pathlib import Path

import checkpoints
import engines
import forks
import torch

LARGE = os.environ.get("LLM_QUANT_ROCM_LARGE_LOAD") == "1"
SIZES = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 14} if LARGE else {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6
}  # fmt: skip


def load(checkpoint: Path, method: str) -> dict[str, float]:
    process = subprocess.run(
        [forks.python(), str(Path(__file__).with_name("load_process.py")), str(checkpoint), method],
        env=engines.environment(),
        text=True,
        capture_output=True,
        timeout=engines.LIMIT,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return json.loads(process.stdout.splitlines()[-1])


def test_peak_is_no_higher_than_that_of_fp8_per_channel(tmp_path: Path) -> None:
    torch.set_default_dtype(torch.bfloat16)  # halves the memory of making it
    try:
        checkpoint = checkpoints.dense(tmp_path / "checkpoint", num_attention_heads=16, num_key_value_heads=16, **SIZES)
    finally:
        torch.set_default_dtype(torch.float32)
    size = (checkpoint / "model.safetensors").stat().st_size / 2**20
    results = {method: load(checkpoint, method) for method in ("none", "fp8_per_channel", "ptpc_fp8")}
    print(f"checkpoint {size:.0f} MiB: {results}")
    ours = results["ptpc_fp8"]["peak_mib"]
    assert ours <= results["fp8_per_channel"]["peak_mib"]
    assert ours < 0.6 * results["none"]["peak_mib"]  # half the bytes, a layer in BF16, and the embeddings
