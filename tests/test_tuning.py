# SPDX-License-Identifier: Apache-2.0
"""The shipped configurations, and how a shape finds its own."""

import json
import logging
from collections.abc import Iterator
from importlib import import_module, resources
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from llm_quant_rocm import __version__, hardware, provenance, tuning
from llm_quant_rocm.ops.ptpc_gemm import BACKENDS


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's cache, with nothing in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    functions = (tuning.shapes, tuning.lookup)
    for function in functions:
        function.cache_clear()
    yield tmp_path / "cache"
    for function in functions:
        function.cache_clear()


KNOWN = (
    *(tuning.Measured(n=8192, k=8192, m=m, backend="torch", config={"m": m}) for m in (256, 1, 16)),
    *(tuning.Measured(n=1280, k=8192, m=m, backend="triton", config={"m": m}) for m in (1, 64)),
)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "shapes", lambda operator, arch: KNOWN if arch == "here" else ())


def lookup(m: int, n: int, k: int, arch: str = "here") -> tuning.Measured | None:
    return tuning.lookup.__wrapped__("ptpc_gemm", arch, m, n, k)


@pytest.mark.parametrize(("m", "nearest"), [(1, 1), (2, 16), (16, 16), (17, 256), (256, 256), (100_000, 256)])
def test_the_next_larger_m_or_the_largest(known: None, m: int, nearest: int) -> None:
    found = lookup(m, 8192, 8192)
    assert found is not None
    assert (found.n, found.m) == (8192, nearest)


@pytest.mark.parametrize(
    ("n", "k", "nearest"),
    [(8192, 8192, 8192), (1280, 8192, 1280), (640, 4097, 1280), (3000, 8192, 1280), (3500, 8192, 8192)],
)
def test_the_nearest_weight_in_log_size(known: None, n: int, k: int, nearest: int) -> None:
    found = lookup(1, n, k)
    assert found is not None
    assert found.n == nearest


@pytest.mark.parametrize(("m", "nearest"), [(1, (1280, 1)), (64, (1280, 64)), (65, (8192, 256)), (10**6, (8192, 256))])
def test_a_weight_answers_for_no_more_rows_than_it_was_measured_with(
    known: None, m: int, nearest: tuple[int, int]
) -> None:
    found = lookup(m, 2560, 8192)
    assert found is not None
    assert (found.n, found.m) == nearest


def test_the_largest_number_of_rows_where_no_neighbour_was_measured_with_more(known: None) -> None:
    found = lookup(65, 1280, 8192)
    assert found is not None
    assert (found.n, found.m) == (1280, 64)


@pytest.mark.parametrize("operator", ["ptpc_gemm", "nvfp4_gemm", "nvfp4_gemm_fp8"])
def test_what_is_shipped_for_few_rows_does_not_serve_many(operator: str) -> None:
    for weight in {shape.weight for shape in tuning.shapes(operator, "sm_90")}:
        assert tuning.lookup(operator, "sm_90", 4096, *weight).m >= 256, weight


@pytest.mark.parametrize(("n", "k"), [(1, 1), (1280, 2047), (319, 8192), (8192, 32769), (16385, 16384)])
def test_a_weight_far_from_all_that_was_measured_finds_nothing(known: None, n: int, k: int) -> None:
    assert lookup(1, n, k) is None


def test_where_defaults_were_measured_only_the_weight_itself_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "shapes", lambda operator, arch: KNOWN)
    monkeypatch.setattr(tuning, "OWN_WEIGHT", {"here"})
    assert lookup(1, 8192, 8191) is None
    assert lookup(1, 8192, 8192) is not None
    assert lookup(1, 8192, 8191, "elsewhere") is not None


@pytest.mark.parametrize("operator", ["ptpc_gemm", "nvfp4_gemm"])
def test_what_is_kept_of_a_servers_batches_is_bounded(operator: str) -> None:
    module = import_module(f"llm_quant_rocm.ops.{operator}")
    for kept in (tuning.lookup, module._choose, module._config):
        assert kept.cache_info().maxsize == tuning.KEPT


def test_where_defaults_were_measured_as_many_rows_count_or_a_few_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "OWN_WEIGHT", {"here"})
    found = tuning.Measured(n=8192, k=8192, m=256, backend="triton", config={})
    assert tuning.counts("here", found, 225) and tuning.counts("here", found, 300)
    assert not tuning.counts("here", found, 224)
    assert not tuning.counts("here", found, 64)
    assert tuning.counts("elsewhere", found, 129)


def test_nothing_where_nobody_measured(known: None) -> None:
    assert lookup(1, 8192, 8192, "elsewhere") is None


def test_shapes_of_an_unknown_architecture_or_operator_are_empty() -> None:
    assert tuning.shapes("ptpc_gemm", "gfx000") == ()
    assert tuning.shapes("no_such_operator", "sm_90") == ()


def test_shapes_reads_the_file(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"n": 1, "k": 2, "m": 3, "backend": "triton", "config": {"block_m": 16}}
    file = tmp_path / "configs" / "an_operator" / "gfx942.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"measured_on": {}, "shapes": [shape]}))
    monkeypatch.setattr(resources, "files", lambda package: tmp_path)
    assert tuning.shapes.__wrapped__("an_operator", "gfx942") == (tuning.Measured(**shape),)


EXPERTS = tuple(
    tuning.MeasuredExperts(
        experts=count, hidden=2048, inner=768, slots=slots, backend="triton", config={"slots": slots}
    )
    for count, slots in ((128, 8), (128, 1024), (8, 64))
)


@pytest.mark.parametrize(
    ("slots", "experts", "hidden", "nearest"),
    [(1, 128, 2048, (128, 8)), (9, 128, 2048, (128, 1024)), (10**6, 100, 2000, (128, 1024)), (8, 4, 2048, (8, 64))],
    ids=str,
)
def test_experts_by_the_rows_of_each(
    slots: int, experts: int, hidden: int, nearest: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows that an expert has on average count, also where there are more or fewer experts."""
    monkeypatch.setattr(tuning, "shapes", lambda operator, arch: EXPERTS)
    found = tuning.lookup.__wrapped__("nvfp4_moe", "here", slots / experts, experts, hidden, 768)
    assert (found.experts, found.slots) == nearest


def test_a_file_of_experts() -> None:
    shape = {"experts": 4, "hidden": 64, "inner": 32, "slots": 8, "backend": "triton", "config": {"block_m": 16}}
    file = tuning.cache_file("nvfp4_moe", "gfx000")
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"measured_on": HERE, "shapes": [shape]}))
    assert tuning.shapes("nvfp4_moe", "gfx000") == (tuning.MeasuredExperts(**shape),)


def cached(measured_on: dict[str, str | None], **changes: Any) -> tuning.Measured:
    """A file in the user's cache with one shape, that of a shipped one with another configuration."""
    shape = {"n": 8192, "k": 8192, "m": 256, "backend": "triton", "config": {"block_m": 1}} | changes
    file = tuning.cache_file("ptpc_gemm", "sm_90")
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"measured_on": measured_on, "shapes": [shape]}))
    return tuning.Measured(**shape)


HERE = {"llm-quant-rocm": __version__, "triton": provenance.triton_version()}


def test_the_users_measurements_come_before_the_shipped() -> None:
    before = tuning.shapes("ptpc_gemm", "sm_90")
    tuning.shapes.cache_clear()
    mine = cached(HERE)
    after = tuning.shapes("ptpc_gemm", "sm_90")
    assert len(after) == len(before)
    assert tuning.lookup("ptpc_gemm", "sm_90", 256, 8192, 8192) == mine
    assert tuning.lookup("ptpc_gemm", "sm_90", 512, 8192, 8192) in before


def test_a_weight_of_the_users_own_is_found() -> None:
    mine = cached(HERE, n=1234, k=5678)
    assert tuning.lookup("ptpc_gemm", "sm_90", 1, 1234, 5678) == mine


@pytest.mark.parametrize("name", ["llm-quant-rocm", "triton"])
def test_measurements_of_other_versions_are_left(name: str, caplog: pytest.LogCaptureFixture) -> None:
    mine = cached(HERE | {name: "0.0.1"})
    with caplog.at_level(logging.WARNING):
        assert mine not in tuning.shapes("ptpc_gemm", "sm_90")
    assert f"was measured with {name} 0.0.1: run llm-quant-rocm tune again" in caplog.text


def test_another_versions_file_may_have_another_form(caplog: pytest.LogCaptureFixture) -> None:
    file = tuning.cache_file("ptpc_gemm", "sm_90")
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"measured_on": HERE | {"llm-quant-rocm": "9.0"}, "shapes": [{"of": "another form"}]}))
    assert tuning.shapes("ptpc_gemm", "sm_90") == tuple(tuning.measured("ptpc_gemm", *shipped("ptpc_gemm")))
    assert "was measured with llm-quant-rocm 9.0" in caplog.text


def test_a_cache_that_may_not_be_read(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """As in containers that run under a number of their own with HOME=/root."""
    cached(HERE)

    def refuse(file: Path, *args: Any, **kwargs: Any) -> str:
        raise PermissionError(13, "Permission denied", str(file))

    shipped_alone = tuning.measured("ptpc_gemm", *shipped("ptpc_gemm"))
    file = tuning.cache_file("ptpc_gemm", "sm_90")
    monkeypatch.setattr(type(file), "read_text", refuse)
    assert tuning.text_of(file) is None
    assert f"{file} cannot be read ([Errno 13] Permission denied" in caplog.text
    monkeypatch.setattr(tuning, "measured", lambda operator, file, here=None: [] if here else shipped_alone)
    assert tuning.shapes("ptpc_gemm", "sm_90") == tuple(shipped_alone)


SHAPE = {"n": 32, "k": 32, "m": 4, "backend": "triton", "config": {}}
BROKEN = [
    *({**SHAPE, **change} for change in ({"n": "32"}, {"n": 0}, {"m": None}, {"m": 4.5}, {"config": []}, {"more": 1})),
    *({**SHAPE, "n": no_size} for no_size in ("triton", {}, True, 2**31, 10**400)),
    {"experts": 4, "hidden": 32, "inner": 32, "slots": 4, "backend": "triton", "config": {}},
    {"n": 1},
]


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", "null", '{"a":' * 100_000),
        *(json.dumps({"measured_on": HERE, "shapes": [shape]}) for shape in BROKEN),
        json.dumps({"measured_on": "here", "shapes": [SHAPE]}),
    ],
)
def test_a_broken_file_of_the_cache(text: str) -> None:
    file = tuning.cache_file("ptpc_gemm", "sm_90")
    file.parent.mkdir(parents=True)
    file.write_text(text)
    with pytest.raises(ValueError, match=f"{file} is no file of measured configurations .* delete it, and run"):
        tuning.shapes("ptpc_gemm", "sm_90")


def test_a_file_of_the_cache_that_is_no_text() -> None:
    file = tuning.cache_file("ptpc_gemm", "sm_90")
    file.parent.mkdir(parents=True)
    file.write_bytes(b'{"measured_on": "\xff"}')
    with pytest.raises(ValueError, match=f"^{file} is no file of measured configurations .* delete it, and run"):
        tuning.shapes("ptpc_gemm", "sm_90")


@pytest.mark.skipif(not find_spec("triton"), reason="needs Triton")
@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
@pytest.mark.parametrize("fields", [{"tile": 1}, {"w13": 1, "w2": 2}, {"w13": {}, "w2": {"tile": 1}}], ids=str)
@pytest.mark.parametrize(
    ("operator", "function"),
    [("ptpc_gemm", "_config"), ("nvfp4_gemm", "_config"), ("nvfp4_gemm", "_fp8_config"), ("ptpc_moe", "_config"),
     ("nvfp4_moe", "_config")],
)  # fmt: skip
def test_a_configuration_of_other_fields(operator: str, function: str, fields: dict[str, Any], arch: str) -> None:
    """Nothing is known of them before the kernels are imported; then the file is named all the same."""
    name = f"{operator}_fp8" if function == "_fp8_config" else operator
    sizes = (4, 256, 256) if operator.endswith("_moe") else (256, 256)
    names = ("experts", "hidden", "inner", "slots") if operator.endswith("_moe") else ("n", "k", "m")
    shape = {**dict(zip(names, (*sizes, 256), strict=True)), "backend": "triton", "config": fields}
    file = tuning.cache_file(name, arch)
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"measured_on": HERE, "shapes": [shape]}))
    device = hardware.nvidia(9, 0) if arch == "sm_90" else hardware.amd(arch)
    config = getattr(import_module(f"llm_quant_rocm.ops.{operator}"), function).__wrapped__
    with pytest.raises(ValueError, match=f"^{file} is no file of measured configurations .* delete it, and run"):
        config(device, 256, *sizes)


def shipped(operator: str) -> list[Traversable]:
    folder = resources.files("llm_quant_rocm") / "configs" / operator
    return [file for file in folder.iterdir() if file.name.endswith(".json")] if folder.is_dir() else []


@pytest.mark.parametrize("file", shipped("ptpc_gemm"), ids=lambda file: file.name)
def test_shipped_configurations_of_ptpc_gemm(file: Traversable) -> None:
    content = json.loads(file.read_text())
    assert {"device", "torch", "triton", "commit"} <= content["measured_on"].keys()
    arch = file.name.removesuffix(".json")
    assert arch in hardware._AMD or arch.startswith("sm_")
    shapes = tuning.shapes("ptpc_gemm", arch)
    assert shapes
    assert len({(shape.n, shape.k, shape.m) for shape in shapes}) == len(shapes)
    for shape in shapes:
        assert min(shape.n, shape.k, shape.m) > 0
        assert shape.backend in {backend.name for backend in BACKENDS}
        # Nothing was measured of a weight if its own shape does not find it.
        assert tuning.lookup("ptpc_gemm", arch, shape.m, shape.n, shape.k) == shape


@pytest.mark.skipif(not find_spec("triton"), reason="needs Triton")
@pytest.mark.parametrize("file", shipped("ptpc_gemm"), ids=lambda file: file.name)
def test_shipped_configurations_are_launchable(file: Traversable) -> None:
    from llm_quant_rocm.kernels import ptpc_wgmma, ptpc_wgmma_few
    from llm_quant_rocm.ops.ptpc_gemm import kernels_of

    arch = file.name.removesuffix(".json")
    for shape in tuning.shapes("ptpc_gemm", arch):
        config = kernels_of(arch).config_of(shape.config)
        if isinstance(config, ptpc_wgmma_few.Config):
            assert config.block_n in ptpc_wgmma_few.BLOCK_NS and config.block_k in (128, 256)
            continue
        if isinstance(config, ptpc_wgmma.Config):
            assert (config.block_m, config.block_n) in ((128, 128), (128, 256), (256, 128)) and config.group_m >= 1
            continue
        for size in (config.block_m, config.block_n, config.block_k, config.warps):
            assert size & (size - 1) == 0 and size > 0
        assert min(config.block_m, config.block_n, config.block_k) >= 16
        assert config.split_k >= 1 and config.stages >= 1 and config.group_m >= 1 and config.programs >= 0
