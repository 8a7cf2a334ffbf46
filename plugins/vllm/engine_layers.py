# SPDX-License-Identifier: Apache-2.0
"""vLLM's classes of layers and parameters, for the library's loaders of checkpoint tensors."""

from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.parameter import ModelWeightParameter

from llm_quant_rocm.checkpoint.linear_tensors import EngineLayers

ENGINE = EngineLayers(
    parameter=ModelWeightParameter,
    plain=(ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, ReplicatedLinear, RowParallelLinear),
    embedding=VocabParallelEmbedding,
)
