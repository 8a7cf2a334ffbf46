# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of whole engines, from their command line to their figures, around engines that serve nothing."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import _random_checkpoint, nvfp4_engine, sglang_engine, vllm_engine
from benchmarks._engines import ROOT
from llm_quant_rocm.comm.policy import CODEC_BYTES, Policy, Settings
from llm_quant_rocm.comm.reduce_norm_quant import Plan
from llm_quant_rocm.formats.wire import CODECS

STAND_INS = Path(__file__).parent / "stand_ins"


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The made-up engines, a lock of the test's own, and figures beside them."""
    for name, value in {
        "PYTHONPATH": STAND_INS,
        "TMPDIR": tmp_path,
        "OUT": tmp_path,
        "LLM_QUANT_ROCM_COMMIT": "abc1234",
    }.items():
        monkeypatch.setenv(name, str(value))


def narrow(monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    """Two narrow layers, on the CPU, instead of what the benchmarks measure."""
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 128}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    if "num_experts" in nvfp4_engine.SHAPES[shape]:
        small |= {"num_experts": 2, "moe_intermediate_size": 64}
    write = _random_checkpoint.write
    monkeypatch.setitem(nvfp4_engine.SHAPES, shape, nvfp4_engine.SHAPES[shape] | small)
    monkeypatch.setattr(_random_checkpoint, "write", lambda *how, **more: write(*how, **more, device="cpu"))


def script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("task", ["llama", "demo"])
def test_every_method_of_sglang(task: str) -> None:
    """One that fails stops no other."""
    done = script("sglang_engine.py", task, "--methods", *sglang_engine.METHODS)
    assert done.returncode == 0, done.stdout + done.stderr
    results = [json.loads(line[line.index("{") :]) for line in done.stdout.splitlines() if line.endswith("}")]
    assert [list(one) for one in results] == [[method] for method in sglang_engine.METHODS]
    for number, (result,) in enumerate(one.values() for one in results):
        if "failed" in result:
            assert results[number].keys() == {"sglang_w8a8_fp8"}
            assert result["failed"] == "ended with status 1, before it was up"
            assert "is not for this model" in result["log"]
        elif task == "llama":
            assert set(result) == {"10 prompts", "64 prompts"} and result["10 prompts"]["total_s"] < 1
        else:
            assert result == {"perplexity": 1.6487, "agreement": 1.0}


@pytest.mark.parametrize("method", ["bf16", "nvfp4", "nvfp4_compressed_tensors"])
def test_experts_of_sglang(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written has the layout that a method wants, and what is said of it is compared with BF16's."""
    narrow(monkeypatch, "qwen3-30b-a3b")
    layout = sglang_engine.METHODS[method][1]
    sglang_engine.write_checkpoints("experts", [layout], tmp_path)
    model = sglang_engine.checkpoint("experts", layout, tmp_path)
    assert len(list(model.glob("*.safetensors"))) == 3
    config = json.loads((model / "config.json").read_text())
    assert ("quantization_config" in config) == bool(layout)
    if layout:
        assert config["quantization_config"]["quant_method"] == layout
    monkeypatch.syspath_prepend(str(STAND_INS))
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    result = sglang_engine.experts(str(model), method)()
    del sys.modules["sglang"]
    sglang_engine.compare(result, {"logprobs": [-0.25, -0.25]})
    assert set(result) == {"10 prompts", "64 prompts", "difference"} and result["difference"] == 0.25


def test_variants_of_the_fusion_pass(tmp_path: Path) -> None:
    """One that fails stops no other."""
    done = script("vllm_engine.py", "fusion", "--ranks", "2")
    assert done.returncode and "apart_quick_reduce ended with status 1, before it was up" in done.stderr
    found = json.loads((tmp_path / "vllm_fusion_2_ranks_cpu.json").read_text())["variants"]
    assert {name: one["log"] for name, one in found.items() if one["commit"] == "abc1234"} == {
        "apart": ["norm fusion: 0"],
        "fused": ["norm fusion: on"],
        "fused_quick_reduce": ["norm fusion: on", "quantized all-reduce: FP4 over 2"],
    }
    assert found["fused"]["kernels_of_a_prefill"] == {"norm_kernel": 1} and "1 prompt" in found["fused"]


def test_methods_of_vllm(tmp_path: Path) -> None:
    done = script("vllm_engine.py")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "vllm_engine_cpu.json").read_text())
    assert found["demo_model"]["ptpc_fp8"] == {"perplexity": 1.6487, "agreement": 1.0}
    assert list(found["llama_3_70b_8_layers"]) == list(vllm_engine.LLAMA_METHODS)


@pytest.mark.parametrize("shape", nvfp4_engine.SHAPES)
def test_nvfp4(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a checkpoint of two narrow layers."""
    narrow(monkeypatch, shape)
    monkeypatch.setattr(nvfp4_engine, "scratch_folder", lambda *_: str(tmp_path))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    nvfp4_engine.measure(shape, ["bf16", "ours", "marlin", "ptpc_fp8"], 2, 240)
    found = json.loads((tmp_path / f"nvfp4_engine_{shape}_cpu.json").read_text())["methods"]
    assert found["ours"]["difference"] == found["marlin"]["difference"] == 0.0
    assert found["ptpc_fp8"]["quantization"] == "ptpc_fp8" and found["ours"]["quantization"] == "none"
    assert set(found["bf16"]) == {"quantization", "alone", "1 prompt", "10 prompts", "64 prompts", "steps"} | (
        {"difference"} if "qwen3" in shape else set()
    )


def test_nvfp4_in_any_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are asked for results that do not depend on the batch say whether they have them."""
    narrow(monkeypatch, "llama-3-70b")
    monkeypatch.setattr(nvfp4_engine, "scratch_folder", lambda *_: str(tmp_path))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    for batch_invariant, name in ((True, "llama-3-70b_batch_invariant"), (False, "llama-3-70b")):
        nvfp4_engine.measure("llama-3-70b", ["ours"], 1, 240, batch_invariant=batch_invariant)
        found = json.loads((tmp_path / f"nvfp4_engine_{name}_cpu.json").read_text())["methods"]
        prompts = len(nvfp4_engine.LENGTHS)
        assert found["ours"]["alone"] == {"prompts": prompts, "same": prompts if batch_invariant else 0}


def test_nvfp4_over_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a file of its own, with what the plugin said."""
    narrow(monkeypatch, "llama-3-70b")
    monkeypatch.setattr(nvfp4_engine, "scratch_folder", lambda *_: str(tmp_path))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    nvfp4_engine.measure("llama-3-70b", ["ours", "ours_fp4_sums"], 2, 240, ranks=2)
    found = json.loads((tmp_path / "nvfp4_engine_llama-3-70b_2_ranks_cpu.json").read_text())
    assert found["ranks"] == 2 and {name: one["log"] for name, one in found["methods"].items()} == {
        "ours": ["norm fusion: on"],
        "ours_fp4_sums": ["norm fusion: on", "quantized all-reduce: FP4 over 2"],
    }


@pytest.mark.parametrize("shape", nvfp4_engine.SHAPES)
def test_sums_of_the_compared_prompt_travel_by_fp4(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two Hopper GPUs, fused with a norm and alone, where vLLM's custom all-reduce takes none of them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fp4, nbytes = CODECS["FP4"], nvfp4_engine.COMPARED_TOKENS * nvfp4_engine.SHAPES[shape]["hidden_size"] * 2
    assert nbytes >= CODEC_BYTES
    assert Plan.of(2, fp4, "sm_90", engine=True).choose(nbytes).codec is fp4
    assert Policy(Settings(fp4), 2, "sm_90").choose(nbytes, torch.bfloat16).codec is fp4


def test_more_ranks_than_gpus() -> None:
    done = script("nvfp4_engine.py", "llama-3-70b", "--ranks", "99")
    assert done.returncode == 2
    assert re.search(r"error: 99 ranks on \d+ GPUs: each rank needs a GPU$", done.stderr.strip())


def test_the_cache_holds_what_is_asked_of_it() -> None:
    """64 prompts of 1024 tokens and 256 more, in blocks of 16 tokens: 5 GiB and some blocks of 1 MiB."""
    options = vllm_engine.memory(nvfp4_engine.SHAPES["llama-3-70b"], 1024 + 256)
    assert 64 * 80 < options["kv_cache_memory_bytes"] / 2**20 <= 64 * 82
    halved = vllm_engine.memory(nvfp4_engine.SHAPES["llama-3-70b"], 1024 + 256, ranks=2)
    assert 2 * halved["kv_cache_memory_bytes"] == options["kv_cache_memory_bytes"]
