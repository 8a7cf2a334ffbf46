# SPDX-License-Identifier: Apache-2.0
"""Tokens that only fill up a batch to a size that was captured in a CUDA graph have no experts.

vLLM pads 10 tokens to 16, say, and reads experts for the other 6 too, by whatever their rows last held. Its later
releases leave those out by themselves (VLLM_MOE_SKIP_PADDING, on by default). For the earlier ones they are found here,
by their places in the KV cache, which are negative.
"""

import torch
from vllm import envs
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.platforms import current_platform


def is_to_find(config: VllmConfig) -> bool:
    """Whether vLLM leaves padding in, and a token without a place in the KV cache is padding."""
    model, parallel = config.model_config, config.parallel_config
    # Of those, some tokens' places are on other ranks.
    ranks = parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
    in_part = ranks > 1 or config.cache_config.kv_sharing_fast_prefill
    # A state of Mamba or its like has one place for a sequence: its group's mapping is never written, and a stage of
    # pipeline parallelism may have no other.
    of_tokens = not (model.is_hybrid or model.is_attention_free or in_part)
    return current_platform.is_cuda_alike() and not getattr(envs, "VLLM_MOE_SKIP_PADDING", False) and of_tokens


def places(tokens: int) -> torch.Tensor | None:
    """The places of so many tokens in the KV cache, [T], negative for padding; None where vLLM does not say."""
    if not is_forward_context_available():
        return None
    context = get_forward_context()
    # Graphs in pieces leave the attention out, so nobody keeps its tensors in one place for them. Microbatches have a
    # list of mappings or a slice for each layer, and models with several kinds of cache one for each kind.
    if context.cudagraph_runtime_mode == CUDAGraphMode.PIECEWISE or not isinstance(context.slot_mapping, dict):
        return None
    found = {id(mapping): mapping for mapping in context.slot_mapping.values()}
    if [len(mapping) for mapping in found.values()] != [tokens]:
        return None
    return next(iter(found.values()))
