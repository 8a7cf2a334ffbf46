# SPDX-License-Identifier: Apache-2.0
"""The zeros by which programs tell each other what is done: left as zeros, a stream's own, sound in graphs."""

import pytest
import torch

from llm_quant_rocm import hardware, ops
from llm_quant_rocm.formats import nvfp4

HOPPER = torch.cuda.is_available() and hardware.detect(torch.device("cuda")).arch == "sm_90"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]


def operands() -> tuple[torch.Tensor, ops.PreparedNvFp4Weight]:
    """Of a product whose tiles are several programs'."""
    weight = ops.prepare_nvfp4_weight(nvfp4.quantize(torch.randn(512, 8192, device="cuda")))
    return torch.randn(16, 8192, device="cuda").bfloat16(), weight


def test_a_stream_has_zeros_of_its_own_and_kernels_leave_them() -> None:
    from llm_quant_rocm.kernels import flags

    x, weight = operands()
    expected = ops.nvfp4_gemm(x, weight)
    torch.cuda.synchronize()
    seen = {}
    for stream in [torch.cuda.Stream() for _ in range(3)]:
        with torch.cuda.stream(stream):
            assert all(torch.equal(ops.nvfp4_gemm(x, weight), expected) for _ in range(5))
            seen[stream.cuda_stream] = flags.flags_of(x.device)
        stream.synchronize()
    assert len({zeros.data_ptr() for zeros in seen.values()}) == len(seen)
    assert not any(zeros.any() for zeros in seen.values())


def test_streams_beyond_those_that_have_zeros() -> None:
    from llm_quant_rocm.kernels import flags

    known = dict(flags._flags)
    try:
        others = range(1, flags.STREAMS + 1)
        flags._flags.update({(torch.device("cuda", 0), -number): torch.empty(0) for number in others})
        stream = torch.cuda.Stream()
        flags._flags.pop((torch.device("cuda", 0), stream.cuda_stream), None)
        with torch.cuda.stream(stream):
            first, second = flags.flags_of(torch.device("cuda", 0)), flags.flags_of(torch.device("cuda", 0))
        stream.synchronize()
        assert first.data_ptr() != second.data_ptr()
        assert not first.any() and not second.any()
    finally:
        flags._flags.clear()
        flags._flags.update(known)


def test_graphs_of_streams_that_nothing_ran_on_before() -> None:
    x, weight = operands()
    expected = ops.nvfp4_gemm(x, weight)
    torch.cuda.synchronize()
    graphs, results = [], []
    for _ in range(3):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            results += [ops.nvfp4_gemm(x, weight) for _ in range(2)]
        graphs.append(graph)
    for _ in range(10):
        for graph in graphs:
            graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(result, expected) for result in results)
