# SPDX-License-Identifier: Apache-2.0
"""What `llm-quant-rocm doctor MODEL` foretells, against what vLLM then does with the same checkpoints."""

from pathlib import Path

import checkpoints
import engines
import nvfp4_checkpoints
import pytest

from llm_quant_rocm.cli.doctor import model

GIB = 2**30
# Of embeddings and output head, both of 258 tokens, padded, and 128 features; a CPU keeps the latter elsewhere.
OUTER = 2 * 320 * 128 * 2


def foretold(path: Path, scheme: str, ranks: int = 1) -> float:
    """Bytes of weights on a rank; nothing may be found that would not work."""
    parts = model.examine(path, ranks)
    assert [problem for part in parts for problem in part.problems] == []
    return next(plan.memory for plan in parts[0].rows if plan.scheme == scheme) * GIB


def held(result: engines.Result) -> int:
    """Bytes of parameters that the first rank holds, but for embeddings and output head."""
    outer = ("embed_tokens", "lm_head")
    return sum(weight.nbytes for name, weight in result.weights[0].items() if not any(part in name for part in outer))


def test_memory_of_ptpc(dense_checkpoint: Path, dense: engines.Result) -> None:
    assert foretold(dense_checkpoint, "PTPC FP8") - OUTER == pytest.approx(held(dense), rel=0.005)


def test_memory_of_experts_in_ptpc(moe_checkpoint: Path, moe: engines.Result) -> None:
    assert foretold(moe_checkpoint, "PTPC FP8") - OUTER == pytest.approx(held(moe), rel=0.005)


def test_memory_of_nvfp4(nvfp4_modelopt: Path, nvfp4_served: engines.Result) -> None:
    assert foretold(nvfp4_modelopt, "NVFP4") - OUTER == pytest.approx(held(nvfp4_served), rel=0.005)


def test_checkpoints_that_are_served_are_found_whole(
    tmp_path: Path, nvfp4_dense: nvfp4_checkpoints.Quantized, nvfp4_moe: nvfp4_checkpoints.Quantized
) -> None:
    """Those of the other tests here, written by compressed-tensors' own quantizer."""
    mla = nvfp4_checkpoints.Quantized(checkpoints.mla(tmp_path / "mla"))
    kept = ("lm_head", "mlp.gate", "q_a_proj", "kv_a_proj_with_mqa")
    for path in (
        nvfp4_dense.write_mixed(tmp_path / "mixed"),
        nvfp4_dense.write_modelopt(tmp_path / "legacy", legacy=True),
        nvfp4_dense.write_compressed_tensors(tmp_path / "dense", activations=True),
        nvfp4_moe.write_modelopt(tmp_path / "moe-modelopt"),
        nvfp4_moe.write_compressed_tensors(tmp_path / "moe", activations=False, ignore=("lm_head", "o_proj")),
        mla.write_modelopt(tmp_path / "mla-modelopt", ignore=kept),
    ):
        for ranks in (1, 2):
            assert foretold(path, "NVFP4", ranks) < foretold(path, "16 bits", ranks)


def test_half_of_what_latent_attention_fuses_is_seen(tmp_path: Path) -> None:
    mla = nvfp4_checkpoints.Quantized(checkpoints.mla(tmp_path / "mla"))
    problems = model.examine(mla.write_modelopt(tmp_path / "modelopt"), 1)[0].problems
    assert any("kv_a_proj_with_mqa (16 bits) are stored in different ways" in problem.what for problem in problems)
