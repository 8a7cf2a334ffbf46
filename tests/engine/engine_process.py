# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine, from start to answer, in a process of its own: `python engine_process.py REQUEST.json FOLDER`.

The request holds `settings` (arguments of vllm.LLM), `prompts` (texts), `max_tokens` and, if there is one, `adapter`,
a folder with a LoRA adapter. FOLDER receives answer.json and one weights-RANK.pt a rank with the tensors that the model
holds. With EMULATE_NVFP4 in the environment, vLLM's own NVFP4 emulation, which it has for ROCm, serves on the CPU too.
With COMPILE_AS_ON_A_GPU, the model is compiled piece by piece, with vLLM's passes and its cache, where the CPU has a
simpler way of its own.
"""

import json
import os
import sys
from pathlib import Path

import torch
from vllm import LLM, SamplingParams
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.lora.request import LoRARequest

from llm_quant_rocm.cli._evaluate_worker import _avoid_slow_products


class SaveWeights:
    """Saves what a worker's model holds. A class, not a closure: workers are other processes."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __call__(self, model: torch.nn.Module) -> None:
        # Codes are saved as bytes: not every operation of a comparison knows FP8.
        tensors = {
            name: tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
            for name, tensor in model.state_dict().items()
        }
        torch.save(tensors, f"{self.folder}/weights-{get_tensor_model_parallel_rank()}.pt")


def emulate_nvfp4() -> None:
    from vllm.model_executor.kernels.linear import EmulationNvFp4LinearKernel, register_linear_kernel
    from vllm.platforms import PlatformEnum

    register_linear_kernel(EmulationNvFp4LinearKernel, PlatformEnum.CPU, "nvfp4")


def compile_as_on_a_gpu() -> None:
    from vllm.config import CompilationMode, VllmConfig
    from vllm.platforms.cpu import CpuPlatform

    simplify = CpuPlatform.check_and_update_config

    def check_and_update_config(vllm_config: VllmConfig) -> None:
        simplify(vllm_config)
        compilation = vllm_config.compilation_config
        compilation.mode = CompilationMode.VLLM_COMPILE
        compilation.ir_enable_torch_wrap = True
        compilation.compile_sizes = []

    CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)


def main(request_file: str, folder: str) -> None:
    request = json.loads(Path(request_file).read_text())
    if "EMULATE_NVFP4" in os.environ:
        emulate_nvfp4()
    if "COMPILE_AS_ON_A_GPU" in os.environ:
        compile_as_on_a_gpu()
    _avoid_slow_products()  # which vLLM's fp8_per_channel makes
    llm = LLM(**request["settings"])
    llm.apply_model(SaveWeights(folder))
    params = SamplingParams(temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True, prompt_logprobs=0)
    answers = []
    adapter = LoRARequest("adapter", 1, request["adapter"]) if "adapter" in request else None
    for output in llm.generate(request["prompts"], params, lora_request=adapter):
        given = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        answers.append(
            {
                "prompt_token_ids": list(output.prompt_token_ids),
                "prompt_logprobs": [logprobs[token].logprob for token, logprobs in given],
                "token_ids": list(output.outputs[0].token_ids),
            }
        )
    (Path(folder) / "answer.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
