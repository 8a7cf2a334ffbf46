# SPDX-License-Identifier: Apache-2.0
"""Which all-reduce serves a message: by its bytes, its type and the number of ranks.

Crossovers are measured: configs/quick_reduce/<architecture>.json ships what was measured where, and a file of the same
form in the user's cache (`tuning.cache_file`) comes before it:

    {"crossovers": [
        {"world_size": 4, "dtype": "bfloat16", "codec": "INT4", "steps": [
            {"from_bytes": 0, "algorithm": "engine"},
            {"from_bytes": 131072, "algorithm": "one_shot", "codec": "FP"},
            {"from_bytes": 524288, "algorithm": "two_shot", "codec": "INT4"}],
         "measured_on": {"device": ..., "torch": ..., "triton": ..., "commit": ...}}, ...]}

A step serves messages from its size up to the next one's, by the codec the user chose or by FP. What was measured in
one of bf16 and fp16 serves the other: bytes and arithmetic are the same. Where nobody measured a number of ranks, the
two-shot serves from upstream's thresholds for fp16 on, which AMD measured on MI300X: for 3 ranks those for 4, for 5 and
more those for 8, for FP8 those of INT8, for FP4 those of INT4.

The environment is upstream's, with its meanings:

    VLLM_ROCM_QUICK_REDUCE_QUANTIZATION               codec; FP4 and FP8 are ours; NONE or unset: never
    VLLM_ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB          serve from this size on, whatever was measured
    VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB          and up to this one; 2048 where unset, and at most between GPUs
    VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB   below this size by FP
    VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16          1 or true: bf16 travels as fp16; else as it is

SGLang's have no VLLM_ before them.

We differ in the last one's default. Upstream casts because its arithmetic is in the type of the values, and slow in
bf16; that loses what is beyond fp16's range on either side. Our arithmetic is in fp32 and gains nothing by it, so where
it is unset bf16 stays bf16.
"""

import json
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, Self

import torch

from llm_quant_rocm.environment import QUICK_REDUCE as _PREFIX
from llm_quant_rocm.environment import SGLANG_QUICK_REDUCE, read
from llm_quant_rocm.formats.wire import CODECS, DTYPES, Codec, codec_named
from llm_quant_rocm.tuning import cache_file, text_of

_KIB, _MIB = 1024, 1024 * 1024
_KERNELS_MAX_BYTES = 2048 * _MIB  # they count values in 32 bits
MAX_WORLD_SIZE = 8
WORLD_SIZES = range(2, MAX_WORLD_SIZE + 1)
# From this size on a codec is worth its errors, where nobody measured otherwise.
CODEC_BYTES = _MIB
# Upstream's thresholds for fp16, MiB.
_UPSTREAM_MIN_MIB = {
    2: {"FP": 1, "INT8": 2, "INT6": 2, "INT4": 1, "INT3": 1},
    4: {"FP": 1, "INT8": 16, "INT6": 4, "INT4": 2, "INT3": 2},
    8: {"FP": 16, "INT8": 4, "INT6": 4, "INT4": 2, "INT3": 2},
}
_LIKE = {"FP8": "INT8", "FP4": "INT4"}


class Algorithm(StrEnum):
    """What serves a message."""

    ENGINE = "engine"  # the all-reduce that the engine would choose without us
    ONE_SHOT = "one_shot"
    TWO_SHOT = "two_shot"
    PROCESS_GROUP = "process_group"  # two shots over torch.distributed
    TWO_LEVEL = "two_level"  # the same inside hosts and between them


@dataclass(frozen=True)
class Choice:
    """An algorithm and, unless it is the engine's, its codec."""

    algorithm: Algorithm
    codec: Codec | None = None


ENGINE = Choice(Algorithm.ENGINE)


class WrongVariables(ValueError):
    """Variables of the environment that cannot be obeyed: `args` are a sentence each, with its cure."""

    def __str__(self) -> str:
        return "; ".join(self.args)


# (first size in bytes, what serves from there), rising from 0.
Steps = Sequence[tuple[int, Choice]]


def step_at(steps: Steps, nbytes: int) -> Choice:
    """What serves a message of `nbytes`."""
    return steps[bisect_right(steps, nbytes, key=lambda step: step[0]) - 1][1]


def steps_of(starts: Iterable[int], choose: Callable[[int], Choice]) -> Steps:
    """What `choose` says from each of `starts` on, but for those at which nothing changes."""
    steps: list[tuple[int, Choice]] = []
    for start in sorted(starts):
        choice = choose(start)
        if not steps or choice != steps[-1][1]:
            steps.append((start, choice))
    return steps


def described(steps: Steps) -> str:
    """For a log."""
    return ", ".join(f"{c.algorithm}{f' {c.codec.name}' if c.codec else ''} from {start} bytes" for start, c in steps)


@dataclass(frozen=True)
class Settings:
    """The user's wishes.

    Attributes:
        codec: None: the engine's all-reduce serves everything.
        min_bytes: serve from here on; None: from the measured crossover on.
        max_bytes: serve up to here.
        quantization_min_bytes: smaller messages travel by FP.
        cast_bf16_to_fp16: bf16 travels as fp16.
    """

    codec: Codec | None = None
    min_bytes: int | None = None
    max_bytes: int = 2048 * _MIB
    quantization_min_bytes: int = 0
    cast_bf16_to_fp16: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """The settings of upstream's variables, of which the others are not read where no codec is set.

        Raises:
            WrongVariables: an unknown codec, sizes that are no numbers or negative, or a minimum above the maximum.
        """
        wrong: list[str] = []

        def size(name: str, unit: int, default: int | None) -> int | None:
            text = read(_PREFIX + name, environment)
            if not text:
                return default
            if text.isdecimal():
                return int(text) * unit
            wrong.append(f"{_PREFIX}{name}={text}: it must be a whole number, 0 or more")
            return None

        name = read(f"{_PREFIX}QUANTIZATION", environment) or "NONE"
        if name == "NONE":
            return cls()
        if name not in CODECS:
            wrong.append(f"{_PREFIX}QUANTIZATION={name}: it must be one of {', '.join(CODECS)}, NONE")
        min_bytes, max_bytes = size("MIN_SIZE_BYTES_MB", _MIB, None), size("MAX_SIZE_BYTES_MB", _MIB, cls.max_bytes)
        quantization_min_bytes = size("QUANTIZATION_MIN_SIZE_KB", _KIB, 0)
        if min_bytes is not None and max_bytes is not None and min_bytes > max_bytes:
            wrong.append(
                f"{_PREFIX}MIN_SIZE_BYTES_MB is {min_bytes // _MIB}, above the maximum of {max_bytes // _MIB}: lower "
                f"it, or raise {_PREFIX}MAX_SIZE_BYTES_MB"
            )
        if wrong:
            raise WrongVariables(*wrong)
        assert max_bytes is not None
        assert quantization_min_bytes is not None
        return cls(
            codec_named(name),
            min_bytes,
            max_bytes,
            quantization_min_bytes,
            (read(f"{_PREFIX}CAST_BF16_TO_FP16", environment) or "").lower() in ("1", "true"),
        )

    @classmethod
    def for_sglang(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """The settings of SGLang's variables (ROCM_QUICK_REDUCE_...), else of vLLM's (VLLM_ROCM_QUICK_REDUCE_...).

        Raises:
            WrongVariables: as of `from_environment`, with the names that the user gave, else SGLang's.
        """
        own = {
            f"VLLM_{name}": value
            for name, value in environment.items()
            if value and name.startswith(SGLANG_QUICK_REDUCE)  # an empty one is as good as unset
        }
        upstream = {name: value for name, value in environment.items() if name.startswith(_PREFIX)}
        theirs = upstream.keys() - own.keys()

        def given(name: re.Match[str]) -> str:
            return name[0] if name[0] in theirs else name[0].removeprefix("VLLM_")

        try:
            return cls.from_environment({**upstream, **own})
        except WrongVariables as error:
            raise WrongVariables(*(re.sub(rf"{_PREFIX}\w+", given, reason) for reason in error.args)) from None


class Policy:
    """The choice for one group of ranks. Every rank of it must be given the same arguments and files."""

    def __init__(
        self, settings: Settings, world_size: int, arch: str, peer_memory: bool = True, hosts: int = 1
    ) -> None:
        """
        Args:
            world_size: ranks of the group.
            arch: `hardware.Hardware.arch` of their devices.
            peer_memory: whether every rank reaches the others' memory. If not, messages travel by the process group.
            hosts: on which the ranks are. Several never share memory.

        Raises:
            ValueError: a file of crossovers is broken; the message names it.
        """
        self.settings = settings
        self.refusal = _refusal(settings, world_size, hosts)
        self.source = "upstream's thresholds"
        self.measured = False
        # What serves instead of the kernels.
        self._instead = Algorithm.TWO_LEVEL if hosts > 1 else None if peer_memory else Algorithm.PROCESS_GROUP
        self._max_bytes = settings.max_bytes if self._instead else min(settings.max_bytes, _KERNELS_MAX_BYTES)
        self._steps: dict[torch.dtype, Steps] = {}
        if self.refusal is None and settings.codec is not None:
            found = None if self._instead else measured(arch, world_size, settings.codec)
            if found is None:
                default = _upstream_steps(world_size, settings.codec)
                self._steps = dict.fromkeys(DTYPES, default)
            else:
                self.measured = True
                self.source, self._steps = found

    def choose(self, nbytes: int, dtype: torch.dtype) -> Choice:
        """What serves a message of `nbytes` bytes of `dtype`."""
        settings = self.settings
        if self.refusal is not None or dtype not in self._steps or not 0 < nbytes <= self._max_bytes:
            return ENGINE
        if settings.min_bytes is not None and nbytes < settings.min_bytes:
            return ENGINE
        choice = step_at(self._steps[dtype], nbytes)
        algorithm, codec = choice.algorithm, choice.codec or settings.codec
        if algorithm is Algorithm.ENGINE:
            if settings.min_bytes is None:
                return ENGINE
            algorithm = Algorithm.TWO_SHOT
        if self._instead:
            algorithm = self._instead
        if nbytes < settings.quantization_min_bytes:
            codec = CODECS["FP"]
        return Choice(algorithm, codec)

    def forced(self, nbytes: int) -> Choice:
        """What serves a message that `choose` leaves to the engine, where somebody wants it from us all the same."""
        codec = CODECS["FP"] if nbytes < self.settings.quantization_min_bytes else self.settings.codec
        return Choice(self._instead or Algorithm.TWO_SHOT, codec)

    def steps(self, dtype: torch.dtype) -> Steps:
        """What `choose` says for `dtype`, from 0 to the largest size that is served: where it changes, and to what."""
        settings = self.settings
        starts = {0, settings.min_bytes or 0, settings.quantization_min_bytes}
        starts |= {start for start, _ in self._steps.get(dtype, [])}
        served = [start for start in starts if start <= self._max_bytes]
        return steps_of(served, lambda start: self.choose(max(start, 1), dtype))

    def describe(self) -> str:
        """One line for a log: from which size on which algorithm and codec serve, and why."""
        if self.refusal is not None:
            return f"quantized all-reduce: off; {self.refusal}"
        served = described(self.steps(DTYPES[0]))
        return f"quantized all-reduce: {served}, engine above {self._max_bytes} bytes ({self.source})"


def _refusal(settings: Settings, world_size: int, hosts: int) -> str | None:
    """Why no message can be served, or None."""
    if settings.codec is None:
        return f"{_PREFIX}QUANTIZATION is NONE"
    if hosts == 1 and world_size not in WORLD_SIZES:
        return f"the group has {world_size} ranks; it serves {WORLD_SIZES.start} to {MAX_WORLD_SIZE}"
    if hosts > MAX_WORLD_SIZE or world_size > hosts * MAX_WORLD_SIZE:
        most = f"up to {MAX_WORLD_SIZE} ranks on each of {MAX_WORLD_SIZE}"
        return f"the group has {world_size} ranks on {hosts} hosts; it serves {most}"
    return None


def _upstream_steps(world_size: int, codec: Codec) -> Steps:
    row = _UPSTREAM_MIN_MIB[next((size for size in _UPSTREAM_MIN_MIB if size >= world_size), 8)]
    return [(0, ENGINE), (row[_LIKE.get(codec.name, codec.name)] * _MIB, Choice(Algorithm.TWO_SHOT, codec))]


def measured(
    arch: str, world_size: int, codec: Codec, operator: str = "quick_reduce"
) -> tuple[str, dict[torch.dtype, Steps]] | None:
    """The first file that knows this number of ranks and codec, and its steps for each dtype."""
    wanted = world_size, codec.name
    for file in _files(arch, operator):
        found = _read(file, {wanted}).get(wanted)
        if found:
            first = next(iter(found.values()))
            return f"measured: {file}", {dtype: found.get(dtype, first) for dtype in DTYPES}
    return None


def known(arch: str, operator: str = "quick_reduce") -> set[tuple[int, str]]:
    """The numbers of ranks and names of codecs that `measured` finds in a file, each file read once."""
    every = {(world, codec) for world in WORLD_SIZES for codec in CODECS}
    return {pair for file in _files(arch, operator) for pair in _read(file, every)}


def _files(arch: str, operator: str) -> list[Traversable]:
    """The user's file and the one that ships, which need not be there."""
    return [cache_file(operator, arch), resources.files("llm_quant_rocm") / "configs" / operator / f"{arch}.json"]


def _read(file: Traversable, wanted: Set[tuple[int, str]]) -> dict[tuple[int, str], dict[torch.dtype, Steps]]:
    """The steps of one file by number of ranks and name of codec, of those that are wanted, and by dtype."""
    names = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
    found: dict[tuple[int, str], dict[torch.dtype, Steps]] = {}
    try:
        text = text_of(file)
        if text is None:
            return found
        for entry in json.loads(text)["crossovers"]:
            pair = entry["world_size"], entry["codec"]
            if pair in wanted:
                steps = _steps(entry["steps"], codec_named(entry["codec"]))
                found.setdefault(pair, {})[names[entry["dtype"]]] = steps
        return found
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no file of crossovers ({error!r}): measure them again, or delete it") from error


def _steps(entries: list[dict[str, Any]], codec: Codec) -> Steps:
    """Steps as a file has them, checked."""
    steps = [(entry["from_bytes"], Choice(Algorithm(entry["algorithm"]), _codec_of(entry, codec))) for entry in entries]
    sizes = [size for size, _ in steps]
    if not sizes or sizes[0] != 0 or sizes != sorted(set(sizes)):
        raise ValueError(f"sizes {sizes} do not rise from 0")
    return steps


def _codec_of(entry: dict[str, Any], codec: Codec) -> Codec | None:
    """A step's codec: what the user chose, or FP, which is exact; none for the engine's all-reduce."""
    if Algorithm(entry["algorithm"]) is Algorithm.ENGINE:
        return None
    if entry["codec"] not in ("FP", codec.name):
        raise ValueError(f"a step of {codec.name} by {entry['codec']}")
    return codec_named(entry["codec"])
