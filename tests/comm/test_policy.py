# SPDX-License-Identifier: Apache-2.0
"""Which all-reduce serves a message."""

import json
import os
import pwd
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from llm_quant_rocm.comm import policy as policy_module
from llm_quant_rocm.comm.policy import ENGINE, Algorithm, Choice, Policy, Settings
from llm_quant_rocm.formats.wire import CODECS
from llm_quant_rocm.tuning import cache_file

MIB = 1024 * 1024
PREFIX = "VLLM_ROCM_QUICK_REDUCE_"
FP, FP4, INT4, INT8 = (CODECS[name] for name in ("FP", "FP4", "INT4", "INT8"))
STEPS = [
    {"from_bytes": 0, "algorithm": "engine"},
    {"from_bytes": 1000, "algorithm": "one_shot", "codec": "FP"},
    {"from_bytes": 5000, "algorithm": "two_shot", "codec": "INT4"},
    {"from_bytes": 2 * MIB, "algorithm": "engine"},
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no variable of the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)
    return tmp_path


def measured(arch: str, **changes: Any) -> None:
    """Writes crossovers of INT4 on 4 ranks in bf16 into the cache."""
    entry = {"world_size": 4, "dtype": "bfloat16", "codec": "INT4", "steps": STEPS, "measured_on": {}} | changes
    file = cache_file("quick_reduce", arch)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"crossovers": [entry]}))


def settings(**variables: str) -> Settings:
    return Settings.from_environment({PREFIX + name: value for name, value in variables.items()})


# --- the environment


def test_nothing_set_means_never() -> None:
    assert settings() == Settings() == settings(QUANTIZATION="NONE") == settings(QUANTIZATION="")
    policy = Policy(settings(), 2, "gfx942")
    assert policy.choose(64 * MIB, torch.bfloat16) == ENGINE
    assert policy.describe() == f"quantized all-reduce: off; {PREFIX}QUANTIZATION is NONE"


@pytest.mark.parametrize("name", CODECS)
def test_every_codec_is_accepted(name: str) -> None:
    assert settings(QUANTIZATION=name).codec == CODECS[name]


def test_all_variables() -> None:
    found = settings(
        QUANTIZATION="FP4",
        MIN_SIZE_BYTES_MB="3",
        MAX_SIZE_BYTES_MB="64",
        QUANTIZATION_MIN_SIZE_KB="512",
        CAST_BF16_TO_FP16="True",
    )
    assert found == Settings(FP4, 3 * MIB, 64 * MIB, 512 * 1024, True)
    # As vLLM reads it: what is none of these is off, and no reason to stop an engine that upstream starts.
    for text, cast in {"1": True, "TRUE": True, "0": False, "False": False, "": False, "yes": False}.items():
        assert settings(QUANTIZATION="FP4", CAST_BF16_TO_FP16=text).cast_bf16_to_fp16 is cast
    as_large = settings(QUANTIZATION="FP4", MIN_SIZE_BYTES_MB="8", MAX_SIZE_BYTES_MB="8")
    assert as_large == Settings(FP4, 8 * MIB, 8 * MIB)
    assert settings(MIN_SIZE_BYTES_MB="4096", MAX_SIZE_BYTES_MB="x") == Settings(), "upstream's, without a codec"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"QUANTIZATION": "FP3"}, "QUANTIZATION=FP3: it must be one of FP, INT8, INT6, INT4, INT3, FP8, FP4, NONE"),
        ({"QUANTIZATION": "fp4"}, "QUANTIZATION=fp4: it must be one of"),
        ({"MIN_SIZE_BYTES_MB": "-1"}, "MIN_SIZE_BYTES_MB=-1: it must be a whole number"),
        ({"MAX_SIZE_BYTES_MB": "1.5"}, "MAX_SIZE_BYTES_MB=1.5: it must be a whole number"),
        ({"QUANTIZATION_MIN_SIZE_KB": "x"}, "QUANTIZATION_MIN_SIZE_KB=x: it must be a whole number"),
        ({"MIN_SIZE_BYTES_MB": "9", "MAX_SIZE_BYTES_MB": "8"}, "MIN_SIZE_BYTES_MB is 9, above the maximum of 8"),
        ({"MIN_SIZE_BYTES_MB": "4096"}, "above the maximum of 2048"),
        ({"MIN_SIZE_BYTES_MB": "4096", "MAX_SIZE_BYTES_MB": "x"}, "^[^;]*MAX_SIZE_BYTES_MB=x: it must [^;]*$"),
        (
            {"QUANTIZATION": "FP3", "MIN_SIZE_BYTES_MB": "4096", "QUANTIZATION_MIN_SIZE_KB": "x"},
            "QUANTIZATION=FP3: .*; .*MIN_SIZE_KB=x: .*; .*MIN_SIZE_BYTES_MB is 4096",
        ),
    ],
)
def test_wrong_values_are_one_sentence(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        settings(**{"QUANTIZATION": "FP4"} | variables)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("variables", "codec", "min_bytes"),
    [
        ({}, None, None),
        ({"ROCM_QUICK_REDUCE_QUANTIZATION": "FP4", "ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB": "2"}, "FP4", 2 << 20),
        ({"VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "INT8"}, "INT8", None),
        ({"VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "INT8", "ROCM_QUICK_REDUCE_QUANTIZATION": "INT6"}, "INT6", None),
        ({"VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "INT8", "ROCM_QUICK_REDUCE_QUANTIZATION": ""}, "INT8", None),
    ],
    ids=["nothing", "sglang", "vllm", "both", "an empty one"],
)
def test_sglang_has_both_spellings(variables: dict[str, str], codec: str | None, min_bytes: int | None) -> None:
    found = Settings.for_sglang(variables)
    assert (found.codec and found.codec.name, found.min_bytes) == (codec, min_bytes)


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"ROCM_QUICK_REDUCE_QUANTIZATION": "INT5"}, "ROCM_QUICK_REDUCE_QUANTIZATION=INT5"),
        ({"VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "INT5"}, "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION=INT5"),
        (
            {"VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "INT5", "ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB": "1"},
            "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION=INT5",
        ),
        (
            {"ROCM_QUICK_REDUCE_QUANTIZATION": "FP4", "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB": "x"},
            "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB=x",
        ),
        (
            {
                "ROCM_QUICK_REDUCE_QUANTIZATION": "FP4",
                "ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB": "2",
                "ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB": "1",
            },
            "ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB is 2, .* raise ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB",
        ),
        (
            {"ROCM_QUICK_REDUCE_QUANTIZATION": "INT5", "VLLM_ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB": "x"},
            "ROCM_QUICK_REDUCE_QUANTIZATION=INT5: .*; VLLM_ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB=x: ",
        ),
    ],
    ids=["sglang", "vllm", "vllm among sglang", "longer name", "two names", "two errors"],
)
def test_an_error_in_sglang_names_the_variable_that_the_user_set(variables: dict[str, str], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}"):
        Settings.for_sglang(variables)


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in containers that run under a number of their own."""

    def nobody(number: int) -> None:
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.delenv("HOME", raising=False)
    assert cache_file("quick_reduce", "gfx942", {}).parts[-3:] == ("llm-quant-rocm", "quick_reduce", "gfx942.json")


# --- where nobody measured


@pytest.mark.parametrize(
    ("world", "codec", "mib"),
    [(2, "FP", 1), (2, "INT8", 2), (2, "FP4", 1), (3, "INT8", 16), (4, "FP8", 16), (4, "INT4", 2), (5, "FP", 16)]
    + [(6, "INT6", 4), (7, "FP4", 2), (8, "INT3", 2), (8, "INT8", 4)],
)
def test_upstreams_thresholds(world: int, codec: str, mib: int) -> None:
    policy = Policy(settings(QUANTIZATION=codec), world, "unheard_of")
    for dtype in (torch.bfloat16, torch.float16):
        assert policy.choose(mib * MIB - 2, dtype) == ENGINE
        assert policy.choose(mib * MIB, dtype) == Choice(Algorithm.TWO_SHOT, CODECS[codec])
        assert policy.choose(2048 * MIB, dtype) == Choice(Algorithm.TWO_SHOT, CODECS[codec])
        assert policy.choose(2048 * MIB + 2, dtype) == ENGINE
    assert policy.choose(64 * MIB, torch.float32) == ENGINE


@pytest.mark.parametrize(("peers", "mib"), [(True, 2048), (False, 4096)], ids=["kernels", "process_group"])
def test_the_largest_message(peers: bool, mib: int) -> None:
    """Kernels count in 32 bits, whatever the user allows."""
    policy = Policy(settings(QUANTIZATION="FP4", MAX_SIZE_BYTES_MB="4096"), 2, "unheard_of", peer_memory=peers)
    assert policy.choose(mib * MIB, torch.bfloat16).codec == FP4
    assert policy.choose(mib * MIB + 2, torch.bfloat16) == ENGINE
    assert f"engine above {mib * MIB} bytes" in policy.describe()


@pytest.mark.parametrize("world", [1, 9, 16])
def test_groups_that_are_not_served(world: int) -> None:
    policy = Policy(settings(QUANTIZATION="FP4"), world, "gfx942")
    assert policy.choose(64 * MIB, torch.bfloat16) == ENGINE
    assert f"off; the group has {world} ranks; it serves 2 to 8" in policy.describe()


def test_without_peer_memory_the_process_group_serves() -> None:
    measured("cpu")  # of kernels: no crossover of the process group
    policy = Policy(settings(QUANTIZATION="INT4"), 4, "cpu", peer_memory=False)
    assert policy.choose(2 * MIB - 2, torch.bfloat16) == ENGINE
    assert policy.choose(2 * MIB, torch.bfloat16) == Choice(Algorithm.PROCESS_GROUP, INT4)
    policy = Policy(settings(QUANTIZATION="INT4", MIN_SIZE_BYTES_MB="0"), 4, "cpu", peer_memory=False)
    assert policy.choose(2, torch.bfloat16) == Choice(Algorithm.PROCESS_GROUP, INT4)
    assert policy.choose(0, torch.bfloat16) == ENGINE


@pytest.mark.parametrize(
    ("world", "hosts", "mib"), [(2, 2, 1), (4, 2, 2), (16, 2, 2), (64, 8, 2)], ids=["2", "4", "16", "64"]
)
def test_several_hosts_are_served_by_two_levels(world: int, hosts: int, mib: int) -> None:
    measured("gfx942", world_size=world)  # of kernels
    policy = Policy(settings(QUANTIZATION="INT4"), world, "gfx942", hosts=hosts)
    assert policy.choose(mib * MIB - 2, torch.bfloat16) == ENGINE
    assert policy.choose(mib * MIB, torch.bfloat16) == Choice(Algorithm.TWO_LEVEL, INT4)
    assert not policy.measured


@pytest.mark.parametrize(("world", "hosts"), [(18, 2), (9, 9)], ids=["ranks", "hosts"])
def test_too_many_on_several_hosts(world: int, hosts: int) -> None:
    policy = Policy(settings(QUANTIZATION="INT4"), world, "gfx942", hosts=hosts)
    assert f"off; the group has {world} ranks on {hosts} hosts; it serves up to 8" in policy.describe()


# --- where somebody measured


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_measured_steps(dtype: torch.dtype) -> None:
    measured("sm_90")
    policy = Policy(settings(QUANTIZATION="INT4"), 4, "sm_90")
    for nbytes, expected in (
        (2, ENGINE),
        (998, ENGINE),
        (1000, Choice(Algorithm.ONE_SHOT, FP)),
        (4998, Choice(Algorithm.ONE_SHOT, FP)),
        (5000, Choice(Algorithm.TWO_SHOT, INT4)),
        (2 * MIB, ENGINE),
        (1024 * MIB, ENGINE),
    ):
        assert policy.choose(nbytes, dtype) == expected
    assert policy.describe() == (
        "quantized all-reduce: engine from 0 bytes, one_shot FP from 1000 bytes, two_shot INT4 from 5000 bytes, "
        f"engine from 2097152 bytes, engine above 2147483648 bytes (measured: {cache_file('quick_reduce', 'sm_90')})"
    )


def test_what_the_user_measured_comes_before_what_is_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured("sm_90", steps=[{"from_bytes": 0, "algorithm": "two_shot", "codec": "INT4"}])
    shipped = tmp_path / "package" / "configs" / "quick_reduce" / "sm_90.json"
    shipped.parent.mkdir(parents=True)
    cache_file("quick_reduce", "sm_90").rename(shipped)
    monkeypatch.setattr(policy_module.resources, "files", lambda package: tmp_path / "package")
    assert Policy(settings(QUANTIZATION="INT4"), 4, "sm_90").choose(2, torch.bfloat16).codec == INT4
    measured("sm_90", steps=[{"from_bytes": 0, "algorithm": "engine"}])
    assert Policy(settings(QUANTIZATION="INT4"), 4, "sm_90").choose(2, torch.bfloat16) == ENGINE


def test_what_was_not_measured_follows_upstream() -> None:
    measured("gfx950")
    for world, codec in ((2, "INT4"), (4, "INT8")):
        policy = Policy(settings(QUANTIZATION=codec), world, "gfx950")
        assert policy.choose(5000, torch.bfloat16) == ENGINE
        assert "upstream's thresholds" in policy.describe()


def test_a_dtype_of_its_own_comes_before_the_other() -> None:
    measured("sm_90")
    file = cache_file("quick_reduce", "sm_90")
    content = json.loads(file.read_text())
    content["crossovers"].append(
        content["crossovers"][0]
        | {"dtype": "float16", "steps": [{"from_bytes": 0, "algorithm": "two_shot", "codec": "INT4"}]}
    )
    file.write_text(json.dumps(content))
    policy = Policy(settings(QUANTIZATION="INT4"), 4, "sm_90")
    assert policy.choose(2, torch.float16) == Choice(Algorithm.TWO_SHOT, INT4)
    assert policy.choose(2, torch.bfloat16) == ENGINE


def test_the_users_sizes_come_before_what_was_measured() -> None:
    measured("sm_90")
    policy = Policy(settings(QUANTIZATION="INT4", MIN_SIZE_BYTES_MB="0", MAX_SIZE_BYTES_MB="4"), 4, "sm_90")
    assert policy.choose(2, torch.bfloat16) == Choice(Algorithm.TWO_SHOT, INT4)
    assert policy.choose(1000, torch.bfloat16) == Choice(Algorithm.ONE_SHOT, FP)
    assert policy.choose(4 * MIB, torch.bfloat16) == Choice(Algorithm.TWO_SHOT, INT4)
    assert policy.choose(4 * MIB + 2, torch.bfloat16) == ENGINE
    policy = Policy(settings(QUANTIZATION="INT4", MIN_SIZE_BYTES_MB="1"), 4, "sm_90")
    assert policy.choose(MIB - 2, torch.bfloat16) == ENGINE


def test_small_messages_by_fp() -> None:
    policy = Policy(settings(QUANTIZATION="FP4", QUANTIZATION_MIN_SIZE_KB="4096"), 2, "gfx950")
    assert policy.choose(MIB - 2, torch.bfloat16) == ENGINE  # the variable does not change what is served
    assert policy.choose(4 * MIB - 2, torch.bfloat16) == Choice(Algorithm.TWO_SHOT, FP)
    assert policy.choose(4 * MIB, torch.bfloat16) == Choice(Algorithm.TWO_SHOT, FP4)
    assert "two_shot FP from 1048576 bytes, two_shot FP4 from 4194304 bytes" in policy.describe()


@pytest.mark.parametrize(
    "variables",
    [{}, {"MIN_SIZE_BYTES_MB": "0"}, {"QUANTIZATION_MIN_SIZE_KB": "3"}, {"MAX_SIZE_BYTES_MB": "1"}]
    + [{"MIN_SIZE_BYTES_MB": "1", "MAX_SIZE_BYTES_MB": "2", "QUANTIZATION_MIN_SIZE_KB": "1536"}],
    ids=["measured", "from_0", "fp", "to_1", "all"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_steps_are_what_is_chosen(variables: dict[str, str], dtype: torch.dtype) -> None:
    measured("sm_90")
    policy = Policy(settings(QUANTIZATION="INT4", **variables), 4, "sm_90")
    assert policy.measured
    steps = policy.steps(dtype)
    assert steps[0][0] == 0
    assert all(before[1] != after[1] for before, after in pairwise(steps))
    edges = {size + nudge for size in (512, 1000, 3072, 5000, MIB, 1536 * 1024, 2 * MIB) for nudge in (-2, 0, 2)}
    for nbytes in sorted(size for size in edges if size <= policy.settings.max_bytes):
        chosen = next(choice for start, choice in reversed(steps) if start <= nbytes)
        assert policy.choose(nbytes, dtype) == chosen


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": []},
        {"steps": STEPS[1:]},
        {"steps": [STEPS[0], STEPS[2], STEPS[1]]},
        {"steps": [STEPS[0], {"from_bytes": 9, "algorithm": "three_shot", "codec": "INT4"}]},
        {"steps": [STEPS[0], {"from_bytes": 9, "algorithm": "two_shot", "codec": "INT3"}]},
        {"steps": [STEPS[0], {"from_bytes": 9, "algorithm": "two_shot"}]},
        {"dtype": "float32"},
    ],
)
def test_a_broken_file_is_named(changes: dict[str, Any]) -> None:
    measured("sm_90", **changes)
    with pytest.raises(ValueError, match=r"sm_90\.json is no file of crossovers .* measure them again, or delete it"):
        Policy(settings(QUANTIZATION="INT4"), 4, "sm_90")
    for content in (b"{", b"\xff"):
        cache_file("quick_reduce", "sm_90").write_bytes(content)
        with pytest.raises(ValueError, match=r"sm_90\.json is no file of crossovers"):
            Policy(settings(QUANTIZATION="INT4"), 4, "sm_90")


def test_every_shipped_file_can_be_read() -> None:
    folder = Path(sys.modules["llm_quant_rocm"].__path__[0]) / "configs" / "quick_reduce"
    for file in folder.glob("*.json"):
        for entry in json.loads(file.read_text())["crossovers"]:
            policy = Policy(Settings(CODECS[entry["codec"]]), entry["world_size"], file.stem)
            assert str(file) in policy.describe()
