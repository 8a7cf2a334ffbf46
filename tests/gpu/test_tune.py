# SPDX-License-Identifier: Apache-2.0
"""The tuner on a GPU: one small shape an operator, from the search to what the library then uses."""

from pathlib import Path

import pytest
import torch

from llm_quant_rocm import provenance, tuning
from llm_quant_rocm.hardware import detect
from llm_quant_rocm.tune import OPERATORS, tuner
from llm_quant_rocm.tune.record import Record
from llm_quant_rocm.tune.search import Compiler, fastest

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

N, K, M = 1024, 2048, 16


SHAPE = {False: (N, K), True: (8, 2, 512, 256)}


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_shape_is_measured_and_used(operator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    device, method = detect(torch.device("cuda")), tuner(operator)
    shape, m = SHAPE[method.experts], 128 if operator == "nvfp4_gemm_fp8" else M
    configs = method.candidates(device, m, *shape)[:6]
    with Compiler(method.compile) as compiler:
        fit = compiler.fit(configs)
    assert configs[0] in fit, "the default"
    workload = method.workload(method.weights(*shape), m)
    winner, us = fastest({config: workload.ours(config) for config in fit}, workload.peers())
    assert winner in fit and all(0 < time < 1e4 for time in us.values()), us
    record = Record(tuning.cache_file(operator, device.arch), provenance.environment())
    record.add(method.key(shape, m), method.backend(m, us), winner)
    tuning.shapes.cache_clear()
    tuning.lookup.cache_clear()
    rows, weight = (m * shape[1] / shape[0], (shape[0], *shape[2:])) if method.experts else (m, shape)
    found = tuning.lookup(operator, device.arch, rows, *weight)
    tuning.shapes.cache_clear()
    tuning.lookup.cache_clear()
    assert found is not None and (found.weight, found.rows) == (weight, rows)
