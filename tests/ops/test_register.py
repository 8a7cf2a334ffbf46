# SPDX-License-Identifier: Apache-2.0
"""What all registered operators have in common, on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from llm_quant_rocm import ops
from llm_quant_rocm.formats import nvfp4
from llm_quant_rocm.ops import _register


def test_every_operator_takes_a_tensor_first() -> None:
    """Its GPU is the one that the operator runs on."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("llm_quant_rocm::")]
    assert len(names) >= 8
    for name in names:
        assert str(torch._C._get_schema(name, "").arguments[0].type) == "Tensor", name


def test_the_operator_runs_on_the_device_of_its_first_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device, whichever has the tensors."""
    current: list[torch.Tensor] = []

    @contextmanager
    def device_of(tensor: torch.Tensor) -> Iterator[None]:
        current.append(tensor)
        yield
        current.pop()

    seen: list[torch.Tensor] = []

    def implementation(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen.extend(current)
        return x + y

    operator = _register.register(
        "test_device(Tensor x, Tensor y) -> Tensor", lambda x, y: None, implementation, lambda x, y: torch.empty_like(x)
    )
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(_register, "_elsewhere", lambda tensor: True)
    x, y = torch.ones(2), torch.ones(2)
    assert torch.equal(operator(x, y), x + y)
    assert len(seen) == 1 and seen[0].data_ptr() == x.data_ptr()
    assert not current


def test_autocast_and_gradients_stay_outside() -> None:
    """Sums are in fp32, and the references write into what they have made."""
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = ops.prepare_nvfp4_weight(nvfp4.quantize(x.float().repeat(4, 1)))
    xq, xscale = ops.per_token_quant_fp8(x)
    calls = (
        lambda x: ops.nvfp4_gemm(x, weight, batch_invariant=True),
        lambda x: ops.nvfp4_gemm(x, weight),
        lambda x: ops.ptpc_gemm(xq, xscale, xq, xscale, out_dtype=torch.float32),
    )
    for call in calls:
        expected = call(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(call(x), expected)
            with torch.no_grad():
                assert torch.equal(call(x), expected)
        assert torch.equal(call(x.clone().requires_grad_()), expected)


@pytest.mark.parametrize(("index", "elsewhere"), [(-1, False), (0, True), (1, False)], ids=["cpu", "other", "current"])
def test_elsewhere_is_a_gpu_that_is_not_the_current_one(
    monkeypatch: pytest.MonkeyPatch, index: int, elsewhere: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    tensor = SimpleNamespace(is_cuda=index >= 0, get_device=lambda: index)
    assert _register._elsewhere(tensor) is elsewhere  # type: ignore[arg-type]
