# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of routed experts, without a GPU: who is compared, what a row says, and what reaches the file."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import _experts, nvfp4_moe, ptpc_moe
from llm_quant_rocm import hardware, timing


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "time_graphs", lambda graphs: dict.fromkeys(graphs, 2.0))
    monkeypatch.setattr(timing, "capture", lambda calls: [call() for call in calls])


def refuse(w13: Any, w2: Any) -> Any:
    raise RuntimeError("no kernel\nfor this")


def compared(module: Any, **peers: Any) -> _experts.Comparison:
    """What a benchmark compares, of which these peers stand in for vLLM's."""
    everyone = {name: peers.get(name, prepare) for name, prepare in module.EVERYONE.items()}
    return _experts.Comparison(**{**vars(module.COMPARED), "everyone": everyone})


@pytest.mark.parametrize(
    ("module", "peers", "timed", "nbytes"),
    [
        (ptpc_moe, ("bf16", "vllm_fp8", "vllm_cutlass"), {"bf16_grouped", "ptpc_moe"}, 3 * 64 * 48 + 4 * (96 + 64)),
        (nvfp4_moe, ("bf16", "marlin"), {"nvfp4_moe"}, 3 * 64 * 48 * 9 // 16 + 4 * (96 + 64)),
    ],
    ids=["ptpc", "nvfp4"],
)
def test_a_row(module: Any, peers: tuple[str, ...], timed: set[str], nbytes: int) -> None:
    layer = _experts.Layer(compared(module, **dict.fromkeys(peers, refuse)), 4, 4, 64, 48, device="cpu")
    row = layer.measure(3, "skewed", 1e9, 1e30)
    assert row["us"] == dict.fromkeys(timed, 2.0) and row["error"].keys() == timed
    assert row["failed"] == dict.fromkeys(peers, "RuntimeError: no kernel")
    assert row["experts_chosen"] == 4.0, "every token chooses all four"
    assert row["limit_us"] == pytest.approx((4 * nbytes + 4 * 3 * 64) / 1e9 * 1e6, abs=0.01)
    row = layer.measure(3, "fair", 1e30, 1e9)
    assert row["limit_us"] == pytest.approx(6 * 3 * 4 * 64 * 48 / 1e9 * 1e6, abs=0.01)


def test_who_is_wrong_is_not_timed() -> None:
    wrong = lambda w13, w2: lambda x, *routing: lambda: 1.2 * x  # noqa: E731
    peers = {"bf16": wrong, "vllm_fp8": wrong, "vllm_cutlass": wrong}
    row = _experts.Layer(compared(ptpc_moe, **peers), 4, 2, 64, 48, device="cpu").measure(3, "fair", 1e9, 1e9)
    assert row["us"].keys() == {"bf16_grouped", "ptpc_moe"} and row["failed"].keys() == peers.keys()
    assert "exceeds 0.1" in row["failed"]["vllm_fp8"] and "exceeds 0.02" in row["failed"]["bf16"]


def test_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(_experts, "Layer", partial(_experts.Layer, device="cpu"))
    monkeypatch.setattr(_experts, "WELL_KNOWN_EXPERTS", {"one": (4, 2, 64, 48), "other": (4, 2, 64, 48)})
    monkeypatch.setattr(timing, "copy_bandwidth", lambda: 3e12)
    monkeypatch.setitem(_experts.RATES, "fp8", lambda: 1.3e15)
    monkeypatch.setattr(hardware, "detect", lambda device: hardware.CPU)
    monkeypatch.setenv("OUT", str(tmp_path))
    options = ["--models", "o*r", "--tokens", "1", "5", "--routers", "skewed"]
    monkeypatch.setattr(sys, "argv", ["ptpc_moe.py", *options])
    peers = dict.fromkeys(("bf16", "vllm_fp8", "vllm_cutlass"), refuse)
    _experts.main("ptpc_moe", compared(ptpc_moe, **peers), "what it does")
    found = json.loads((tmp_path / "ptpc_moe_cpu.json").read_text())
    assert (found["copy_gb_s"], found["fp8_tflop_s"]) == (3000, 1300)
    assert [(row["model"], row["router"], row["tokens"]) for row in found["rows"]] == [
        ("other", "skewed", 1), ("other", "skewed", 5),
    ]  # fmt: skip
    assert "FAILED vllm_cutlass: RuntimeError: no kernel" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["ptpc_moe.py", "--models", "none"])
    with pytest.raises(SystemExit):
        _experts.main("ptpc_moe", compared(ptpc_moe), None)
    assert "--models names none of one, other" in capsys.readouterr().err


def test_without_vllm_its_experts_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", None)
    layer = _experts.Layer(ptpc_moe.COMPARED, 4, 2, 64, 48, device="cpu")
    assert layer.failed.keys() == {"bf16", "vllm_fp8", "vllm_cutlass"}
    assert all("vllm" in reason for reason in layer.failed.values())
    assert torch.isfinite(
        layer.runners["ptpc_moe"][0](torch.ones(1, 64), torch.ones(1, 2), torch.tensor([[0, 1]]))()
    ).all()
