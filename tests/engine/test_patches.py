# SPDX-License-Identifier: Apache-2.0
"""The one patch to vLLM, and that vLLM is still what it was made for."""

import ast
import inspect
import os
from types import ModuleType, SimpleNamespace

import pytest
import torch
from vllm import _aiter_ops, envs
from vllm.distributed import parallel_state, stateless_coordinator
from vllm.distributed.device_communicators import cuda_communicator
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname

import llm_quant_rocm_vllm
from llm_quant_rocm.formats.wire import CODECS
from llm_quant_rocm_vllm import patches
from llm_quant_rocm_vllm.communicator import QuantizedAllReduce, QuickReduceComm, class_over

PREFIX = "VLLM_ROCM_QUICK_REDUCE_"
CPU = "vllm.distributed.device_communicators.cpu_communicator.CpuCommunicator"
CUDA = "vllm.distributed.device_communicators.cuda_communicator.CudaCommunicator"


@pytest.fixture(autouse=True)
def no_variable_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)


def attributes_of(name: str, module: ModuleType) -> set[str]:
    """What a module reads of the variable or attribute called `name`."""
    found = set()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Attribute):
            owner = node.value
            if getattr(owner, "id", getattr(owner, "attr", None)) == name:
                found.add(node.attr)
    return found


def calls_of(name: str, module: ModuleType) -> list[ast.Call]:
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.Call)]
    return [call for call in calls if getattr(call.func, "id", getattr(call.func, "attr", None)) == name]


# --- what the patch does


def test_it_can_be_made_again() -> None:
    patches.apply()
    patches.apply()
    llm_quant_rocm_vllm.register()
    replaced = type(current_platform).get_device_communicator_cls.replaces
    assert replaced() == CPU
    assert not hasattr(replaced, "replaces")


@pytest.mark.parametrize("value", [None, "NONE"])
def test_without_a_codec_the_answer_is_the_platforms_own(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if value:
        monkeypatch.setenv(f"{PREFIX}QUANTIZATION", value)
    patches.apply()
    assert current_platform.get_device_communicator_cls() == CPU
    assert envs.VLLM_ROCM_QUICK_REDUCE_QUANTIZATION == "NONE"


@pytest.mark.parametrize("codec", CODECS)
def test_with_a_codec_it_is_a_subclass_of_the_platforms(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{PREFIX}QUANTIZATION", codec)
    patches.apply()
    assert codec == envs.VLLM_ROCM_QUICK_REDUCE_QUANTIZATION
    ours = resolve_obj_by_qualname(current_platform.get_device_communicator_cls())
    assert ours.__mro__[1:3] == (QuantizedAllReduce, resolve_obj_by_qualname(CPU))


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"QUANTIZATION": "FP5"}, "QUANTIZATION=FP5: it must be one of FP, INT8, INT6, INT4, INT3, FP8, FP4, NONE"),
        ({"QUANTIZATION": "FP4", "MIN_SIZE_BYTES_MB": "a few"}, "MIN_SIZE_BYTES_MB=a few: it must be a whole number"),
        ({"QUANTIZATION": "FP4", "MAX_SIZE_BYTES_MB": "-1"}, "MAX_SIZE_BYTES_MB=-1: it must be a whole number"),
    ],
    ids=["codec", "words", "negative"],
)
def test_a_mistake_is_one_sentence_before_anything_starts(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(PREFIX + name, value)
    with pytest.raises(ValueError, match=message) as raised:
        llm_quant_rocm_vllm.register()
    assert "\n" not in str(raised.value)


def test_what_nobody_wished_for_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{PREFIX}MIN_SIZE_BYTES_MB", "-1")
    llm_quant_rocm_vllm.register()


# --- what it takes for granted of vLLM


def test_the_platform_is_asked_for_a_name_and_the_class_gets_keywords_of_ours() -> None:
    (asked,) = calls_of("get_device_communicator_cls", parallel_state)
    assert not asked.args and not asked.keywords
    (made,) = calls_of("device_comm_cls", parallel_state)
    assert not made.args
    assert {"cpu_group", "device", "device_group", "unique_name"} <= {keyword.arg for keyword in made.keywords}


def test_groups_of_tensor_parallelism_are_called_tp() -> None:
    names = [
        keyword.value.value
        for call in calls_of("init_model_parallel_group", parallel_state)
        for keyword in call.keywords
        if keyword.arg == "group_name" and isinstance(keyword.value, ast.Constant)
    ]
    assert names.count("tp") >= 1
    assert parallel_state._get_unique_name("tp").split(":")[0] == "tp"


def test_elastic_expert_parallelism_takes_no_subclass(monkeypatch: pytest.MonkeyPatch) -> None:
    """If vLLM no longer compares classes there, the exception in the patch can go."""
    assert "assert device_comm_cls == CudaCommunicator" in inspect.getsource(stateless_coordinator)
    monkeypatch.setenv(f"{PREFIX}QUANTIZATION", "FP4")
    config = SimpleNamespace(parallel_config=SimpleNamespace(enable_elastic_ep=True))
    monkeypatch.setattr(patches, "get_current_vllm_config_or_none", lambda: config)
    patches.apply()
    assert current_platform.get_device_communicator_cls() == CPU


def test_ours_answers_all_that_vllm_asks_its_quick_reduce() -> None:
    """On GPUs `qr_comm` may be ours."""
    asked = attributes_of("qr_comm", cuda_communicator) | attributes_of("qr_comm", _aiter_ops)
    assert {"disabled", "should_quick_allreduce", "quick_all_reduce"} <= asked
    assert asked <= set(dir(QuickReduceComm))


def test_the_kernel_of_aiter_can_be_switched_off() -> None:
    source = inspect.getsource(_aiter_ops)
    assert ("qr_all_reduce_rmsnorm" in source) == ("_aiter_qr_rmsnorm_comm" in source)


def test_vllm_s_operator_reduces_through_the_communicator() -> None:
    assert hasattr(torch.ops.vllm, "all_reduce")
    assert "_all_reduce_out_place" in inspect.getsource(parallel_state.all_reduce)


def test_graphs_are_captured_with_subclasses_of_cuda_s_communicator() -> None:
    ours = resolve_obj_by_qualname(class_over(CUDA))
    assert issubclass(ours, cuda_communicator.CudaCommunicator)
    assert class_over(CUDA) == "llm_quant_rocm_vllm.communicator.QuantizedCudaCommunicator"
