# SPDX-License-Identifier: Apache-2.0
"""What all registered operators have in common, on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

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


@pytest.mark.parametrize(("index", "elsewhere"), [(-1, False), (0, True), (1, False)], ids=["cpu", "other", "current"])
def test_elsewhere_is_a_gpu_that_is_not_the_current_one(
    monkeypatch: pytest.MonkeyPatch, index: int, elsewhere: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    tensor = SimpleNamespace(is_cuda=index >= 0, get_device=lambda: index)
    assert _register._elsewhere(tensor) is elsewhere  # type: ignore[arg-type]
