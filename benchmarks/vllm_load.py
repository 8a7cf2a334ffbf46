# SPDX-License-Identifier: Apache-2.0
"""What loading a checkpoint takes of one GPU and of the clock in vLLM, and what stays on the GPU.

    python benchmarks/vllm_load.py

The shape of Llama-3-70B cut to eight layers and of Qwen3-30B-A3B cut to twelve, as random checkpoints in bf16 and in
ModelOpt's NVFP4 (_random_checkpoint.py). Methods are those of nvfp4_engine.py: `ptpc_fp8` and vLLM's `fp8_per_channel`
quantize the bf16 checkpoint, `ours` and `marlin` serve the NVFP4 one.

Each method loads once in a process of its own, a worker of vLLM with no engine around it. Memory is that of torch's
allocator: "allocated" is what tensors take, "reserved" what is kept from others, freed pieces included. Seconds are
from the call to the whole model with all kernels that we compile ahead. In the first of two rounds these are compiled
in them, in the second read from disk. Files are in memory where it has the room (`scratch_folder`). Figures are written
after each load.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import _engines as engines
from benchmarks import nvfp4_engine, vllm_engine

LLAMA = {**nvfp4_engine.SHAPES["llama-3-70b"], "num_hidden_layers": 8}
SHAPES = {"llama-3-70b": LLAMA, "qwen3-30b-a3b": nvfp4_engine.QWEN3}
METHODS = ("bf16", "ptpc_fp8", "fp8_per_channel", "ours", "marlin")
OF_NVFP4 = ("ours", "marlin")
ROUNDS = ("first", "again")
GIB = 2**30


def load(method: str, checkpoint: str, folder: str) -> Callable[[], dict[str, float]]:
    """In a process of its own: a worker of vLLM without weights, and what loads and measures them."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.worker.gpu_worker import Worker

    arguments = EngineArgs(
        model=checkpoint, quantization=method if method in nvfp4_engine.ONLINE else None, skip_tokenizer_init=True,
        attention_backend="TRITON_ATTN", enforce_eager=True, max_model_len=2048, gpu_memory_utilization=0.01,
        max_num_batched_tokens=8192,  # as `vllm serve` has it on such a GPU
    )  # fmt: skip
    address = f"file://{folder}/ranks"  # of several that start at once, two may find the same port free
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        worker = Worker(config, 0, 0, address, is_driver_worker=True)
        worker.init_device()

    def measure() -> dict[str, float]:
        torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        with patch("torch.cuda.reset_peak_memory_stats"):  # vLLM's, when the weights are there
            worker.load_model()
        ahead = sys.modules.get("llm_quant_rocm.kernels.compile_ahead")
        if ahead:
            ahead.finish()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        stats = torch.cuda.memory_stats()
        memory = {
            f"{when}_{what}_gib": round(stats[f"{what}_bytes.all.{key}"] / GIB, 2)
            for when, key in (("peak", "peak"), ("final", "current"))
            for what in ("allocated", "reserved")
        }
        return {"seconds": round(seconds, 2), **memory}

    return measure


def write_checkpoints(shape: str, folder: Path) -> None:
    import torch

    from benchmarks import _random_checkpoint

    for layout in ("", "modelopt"):
        _random_checkpoint.write(folder / (layout or "bf16"), SHAPES[shape], layout)
    torch.cuda.empty_cache()


def measure(shape: str, at_once: int, start_s: float) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Load a shape by every method: method, round, and what that took, of one after the other."""
    with (
        tempfile.TemporaryDirectory(dir=nvfp4_engine.scratch_folder()) as checkpoints,
        tempfile.TemporaryDirectory() as scratch,
    ):
        loads = [(turn, method) for turn in ROUNDS for method in METHODS]
        jobs = []
        for turn, method in loads:
            checkpoint = Path(checkpoints) / ("modelopt" if method in OF_NVFP4 else "bf16")
            # Where nothing is compiled yet in the first round.
            variables = nvfp4_engine.METHODS[method] | {"TRITON_CACHE_DIR": f"{scratch}/triton"}
            name, arguments = f"{shape}-{method}-{turn}", (method, str(checkpoint))
            jobs.append(vllm_engine.job(name, __file__, arguments, Path(scratch), variables))
        prepare = partial(write_checkpoints, shape, Path(checkpoints))
        for (turn, method), (result, _) in zip(loads, engines.run(jobs, at_once, start_s, prepare), strict=True):
            yield method, turn, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--run", nargs=3, metavar=("METHOD", "CHECKPOINT", "FOLDER"), help=argparse.SUPPRESS)
    engines.add_options(parser, str(len(METHODS)))
    args = parser.parse_args()
    if args.run:
        method, checkpoint, folder = args.run
        import vllm  # noqa: F401  while the checkpoint is made

        engines.serve(Path(folder), lambda: load(method, checkpoint, folder))
    else:
        from benchmarks import _harness as harness

        found: dict[str, Any] = {"vllm": version("vllm"), "shapes": {}}
        for shape in args.shapes:
            methods: dict[str, dict[str, Any]] = found["shapes"].setdefault(shape, {})
            for method, turn, result in measure(shape, args.at_once or len(METHODS), args.start_seconds):
                methods.setdefault(method, {})[turn] = result
                print(json.dumps({f"{shape} {method} {turn}": result}), flush=True)
                written = harness.write(f"vllm_load_{harness.gpu()}", found)
        print("written to", written)


if __name__ == "__main__":
    main()
