# SPDX-License-Identifier: Apache-2.0
"""One test for each hook into SGLang, which fails when SGLang moves, and what happens then."""

import logging
import pickle
import pkgutil
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from sglang.srt.layers import quantization
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import QUANTIZATION_CHOICES

from llm_quant_rocm.comm.group import GroupReduce
from llm_quant_rocm.comm.policy import CODEC_BYTES, Policy, Settings
from llm_quant_rocm.formats.wire import CODECS
from llm_quant_rocm_sglang import communicator, nvfp4, patches, processes, ptpc_fp8, register

GROUP = "sglang.srt.distributed.parallel_state.GroupCoordinator"


def patch(target: str) -> patches.Patch:
    return next(patch for patch in patches.PATCHES if patch.target == target)


@pytest.mark.parametrize("target", [patch.target for patch in patches.PATCHES])
def test_the_target_is_as_it_was(target: str) -> None:
    found, trouble = patches._find(patch(target))
    assert trouble is None
    assert found in (target, *patch(target).formerly)


def test_registering_twice() -> None:
    for _ in range(2):
        register()
    for name in (ptpc_fp8.NAME, nvfp4.NAME, nvfp4.ALIAS):
        assert QUANTIZATION_CHOICES.count(name) == 1
        for table in ("QUANTIZATION_METHODS", "BASE_QUANTIZATION_METHODS", "CPU_QUANTIZATION_METHODS"):
            assert getattr(quantization, table)[name].__module__.startswith("llm_quant_rocm_sglang")
    for one in patches.PATCHES:
        target, _ = patches._find(one)
        assert [hook for _, hook, _ in HookRegistry._hooks[target]].count(one.hook) == 1


@pytest.mark.parametrize(
    ("version", "warned"), [("0.5.16", True), ("0.5.17", False), ("0.5.23.post1", False), ("0.5.24", True)]
)
def test_one_warning_on_other_versions(version: str, warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        caplog.at_level(logging.WARNING, "llm_quant_rocm"),
    ):
        monkeypatch.setattr("sglang.__version__", version)
        register.__wrapped__()
    assert [f"this is SGLang {version}. Continuing" in line for line in caplog.messages] == [True] * warned


@pytest.mark.parametrize(
    ("target", "parameters", "words"),
    [
        (f"{GROUP}.gone", ("self",), "is gone"),
        ("sglang.srt.gone.Gone.gone", ("self",), "is gone"),
        (f"{GROUP}.all_reduce", ("self", "tensor"), "takes self, input_, not self, tensor"),
    ],
    ids=["attribute", "module", "parameters"],
)
def test_a_hook_that_fits_no_more_is_one_line(
    target: str,
    parameters: tuple[str, ...],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    moved = patches.Patch(target, parameters, MagicMock(), "the thing it is for", "")
    monkeypatch.setattr(patches, "PATCHES", (moved,))
    with caplog.at_level(logging.ERROR, "llm_quant_rocm"):
        patches.apply()
    (record,) = caplog.records
    assert words in record.getMessage()
    assert "Without it does not work: the thing it is for." in record.getMessage()
    assert moved.hook not in [hook for _, hook, _ in HookRegistry._hooks.get(target, [])]


def test_a_target_with_an_argument_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever gives it would end in the hook, unless that passes on what it does not know."""

    def all_reduce(self: Any, input_: torch.Tensor, op: str = "sum") -> torch.Tensor: ...

    monkeypatch.setattr(pkgutil.resolve_name(GROUP), "all_reduce", all_reduce)
    _, trouble = patches._find(patch(f"{GROUP}.all_reduce"))
    assert trouble == f"{GROUP}.all_reduce takes self, input_, op, and its hook not as many"
    passing_on = patches.Patch(f"{GROUP}.all_reduce", ("self", "input_"), communicator.resolve, "", "")
    assert patches._find(passing_on) == (passing_on.target, None)


def test_a_target_of_an_older_name() -> None:
    for newer, older in ((f"{GROUP}.gone", f"{GROUP}.all_reduce"), (f"{GROUP}.all_reduce", f"{GROUP}.gone")):
        moved = patches.Patch(newer, ("self",), MagicMock(), "", "", formerly=(older,))
        assert patches._find(moved) == (f"{GROUP}.all_reduce", None)


def test_tokenizers_load_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    processes.write_data(lambda *data: written.append(pickle.dumps(data)), "ports", "arguments", {"max": 7})
    loaded = MagicMock()
    monkeypatch.setattr("sglang.srt.plugins.load_plugins", loaded)
    found = pickle.loads(written[0])
    assert found == ("ports", "arguments", {"max": 7})
    assert type(found[2]) is dict
    loaded.assert_called_once_with()


class Ours(GroupReduce):
    """Serves two-dimensional messages."""

    def __init__(self) -> None:
        pass

    def should_quick_allreduce(self, inp: torch.Tensor) -> bool:
        return inp.dim() == 2

    def quick_all_reduce(self, inp: torch.Tensor) -> torch.Tensor:
        return inp * 2


def coordinator(qr_comm: Any) -> Any:
    """A group of SGLang's, as far as it chooses a way, whose custom all-reduce takes everything."""
    made = object.__new__(pkgutil.resolve_name(GROUP))
    custom = SimpleNamespace(disabled=False, should_custom_ar=lambda tensor: True)
    vars(made).update(dict.fromkeys(("pymscclpp_comm", "pcie_ipc_comm", "torch_symm_mem_comm", "pynccl_comm")))
    vars(made).update(qr_comm=qr_comm, ca_comm=custom, world_size=2)
    return made


def test_ours_is_asked_before_the_custom_all_reduce() -> None:
    original = pkgutil.resolve_name(GROUP)._resolve_outplace_all_reduce_method
    original = getattr(original, "__wrapped__", original)
    for qr_comm, shape, method in ((Ours(), (2, 8), "qr"), (Ours(), (8,), "ca"), (None, (2, 8), "ca")):
        assert communicator.resolve(original, coordinator(qr_comm), torch.ones(shape)) == method
    assert pkgutil.resolve_name(GROUP)._all_reduce_out_place(coordinator(Ours()), torch.ones(2, 8), "qr").sum() == 32


@pytest.mark.parametrize("disabled", [False, True])
def test_small_messages_are_left_to_the_custom_all_reduce(disabled: bool) -> None:
    original = pkgutil.resolve_name(GROUP)._resolve_outplace_all_reduce_method
    original = getattr(original, "__wrapped__", original)
    group = coordinator(None)
    group.ca_comm.disabled = disabled
    group.cpu_group = group.device_group = group.device = None
    group.unique_name = "tp:0"
    policy = Policy(Settings(CODECS["FP4"]), 2, "sm_90")
    assert policy.measured
    group.qr_comm = GroupReduce(MagicMock(), policy, None, communicator.members(group).custom)
    large = torch.empty(CODEC_BYTES // 2, dtype=torch.bfloat16, device="meta")
    assert communicator.resolve(original, group, large) == "qr"
    assert communicator.resolve(original, group, large[8:]) == ("qr" if disabled else "ca")


def test_tensors_on_a_cpu_go_by_ours() -> None:
    def original(group: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.add_(5)

    assert communicator.all_reduce(original, coordinator(Ours()), torch.ones(2, 2)).tolist() == [[2, 2], [2, 2]]
    assert communicator.all_reduce(original, coordinator(Ours()), torch.ones(2)).tolist() == [6, 6]
    assert communicator.all_reduce(original, coordinator(None), torch.ones(2, 2)).tolist() == [[6, 6], [6, 6]]


def test_sglangs_own_methods_ask_ours_once_they_are_hooked() -> None:
    register()
    HookRegistry.apply_hooks()
    group = coordinator(Ours())
    assert group.all_reduce(torch.ones(2, 2)).tolist() == [[2, 2], [2, 2]]
    assert [group._resolve_outplace_all_reduce_method(torch.ones(shape)) for shape in ((2, 8), (8,))] == ["qr", "ca"]


def test_a_codec_that_sglang_does_not_know_is_hidden_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def original(group: Any, *args: Any) -> None:
        seen.append(communicator.os.environ[communicator.QUANTIZATION])
        group.world_size, group.unique_name, group.qr_comm = 1, "tp:0", None

    for name in ("FP4", "INT8"):
        monkeypatch.setenv(communicator.QUANTIZATION, name)
        communicator.attach(original, SimpleNamespace(), [[0]], 0)
        assert communicator.os.environ[communicator.QUANTIZATION] == name
    assert seen == ["NONE", "INT8"]


def attach(monkeypatch: pytest.MonkeyPatch, group: Any) -> MagicMock:
    """`communicator.connect`, which was called if `group` was connected, with FP4; it gives `Ours`."""
    monkeypatch.setenv(communicator.QUANTIZATION, "FP4")
    monkeypatch.setattr(communicator, "members", MagicMock())
    monkeypatch.setattr(communicator, "connect", connect := MagicMock(return_value=Ours()))
    communicator.attach(MagicMock(), group, [[0, 1]], 0)
    return connect


def test_a_tensor_parallel_group_gets_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, gets_ours in (("tp:0", True), ("pp:0", False), ("moe_tp:0", False)):
        group = SimpleNamespace(world_size=2, unique_name=name, qr_comm=None)
        assert attach(monkeypatch, group).called is gets_ours
        assert isinstance(group.qr_comm, Ours) is gets_ours


@pytest.mark.parametrize("min_bytes", [None, 0], ids=["nothing asked", "asked for"])
@pytest.mark.parametrize("serves", [True, False], ids=["sglang serves", "sglang does not"])
def test_sglangs_quick_reduce_stays_until_ours_is_measured(
    serves: bool, min_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = SimpleNamespace(world_size=2, unique_name="tp:0", qr_comm=SimpleNamespace(disabled=not serves))
    connect, own = attach(monkeypatch, group), SimpleNamespace(disabled=not serves)
    group.qr_comm = own  # as it is while ours connects
    _, _, refuse, _ = connect.call_args.args
    reason = refuse(SimpleNamespace(measured=False, settings=SimpleNamespace(min_bytes=min_bytes)))
    assert (reason is not None) is (serves and min_bytes is None)
    assert reason is None or reason.endswith("set ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB for ours")


@pytest.mark.parametrize("hip", [False, True], ids=["cuda", "rocm"])
def test_which_devices_a_process_sees(hip: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicator, "is_hip", lambda: hip)
    variable = communicator.members(MagicMock()).visible_devices
    assert variable == ("HIP_VISIBLE_DEVICES" if hip else "CUDA_VISIBLE_DEVICES")


def test_a_wrong_wish_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(communicator.QUANTIZATION, "INT5")
    with pytest.raises(ValueError, match="QUANTIZATION=INT5: it must be one of"):
        communicator.attach(MagicMock(), SimpleNamespace(), [[0]], 0)


@pytest.mark.parametrize(
    ("method", "model", "shape"),
    [
        (nvfp4.NAME, "Glm4MoeLiteForCausalLMNextN", (1,)),
        (nvfp4.NAME, "DeepseekV3ForCausalLM", ()),
        ("modelopt_fp4", "Glm4MoeLiteForCausalLM", ()),
    ],
)
def test_scalars_that_a_model_joins(method: str, model: str, shape: tuple[int, ...]) -> None:
    """GLM-4.7-Flash's cannot join those of MLA's first projections as they are in ModelOpt's checkpoints."""
    names = [f"model.layers.0.self_attn.{name}.weight_scale_2" for name in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")]
    tensors = [(name, torch.tensor(0.5)) for name in names] + [(names[0].removesuffix("_2"), torch.ones(2, 3))]
    target = "sglang.srt.model_loader.loader.DefaultModelLoader._get_all_weights"
    config, given = SimpleNamespace(quantization=method), MagicMock(return_value=iter(tensors))
    found = list(patch(target).hook(given, None, config, type(model, (), {})()))
    assert [(name, tuple(tensor.shape)) for name, tensor in found] == [
        (names[0], shape), (names[1], shape), (names[2], ()), (names[0].removesuffix("_2"), (2, 3)),
    ]  # fmt: skip


@pytest.mark.parametrize("columns", [128, 64, 8, 1], ids=["weight", "codes", "scales of blocks", "scales of rows"])
@pytest.mark.parametrize("projection", ["q_proj", "k_proj", "v_proj"])
def test_rows_that_a_model_reorders(projection: str, columns: int) -> None:
    """Llama-4's knows 16-bit weights alone: it ended in an error of shapes, or left codes as they were."""
    from sglang.srt.models.mllama4 import Llama4ForConditionalGeneration

    facts = {"head_dim": 32, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes: Any = SimpleNamespace(**facts, original_num_attention_heads=4, original_total_num_kv_heads=2)
    model = object.__new__(Llama4ForConditionalGeneration)
    torch.nn.Module.__init__(model)
    vars(model)["language_model"] = SimpleNamespace(config=sizes)
    order = torch.arange(128 if projection == "q_proj" else 64).float()
    name = f"language_model.model.layers.0.self_attn.{projection}"
    _, expected = model.permute_qk_weight_for_rotary(f"{name}.weight", order[:, None].expand(-1, 128))

    target = "sglang.srt.model_loader.loader.DefaultModelLoader._get_all_weights"
    patch(target).hook(MagicMock(), None, SimpleNamespace(quantization=nvfp4.NAME), model)
    for leaf in ("weight",) if columns == 128 else ("weight", "weight_packed", "weight_scale"):
        found = model.permute_qk_weight_for_rotary(f"{name}.{leaf}", order[:, None].expand(-1, columns))
        assert found[0] == f"{name}.{leaf}"
        assert torch.equal(found[1], expected[:, :columns])
    scalar = torch.tensor(0.5)
    assert model.permute_qk_weight_for_rotary(f"{name}.weight_scale_2", scalar)[1] is scalar
