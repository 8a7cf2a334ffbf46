# SPDX-License-Identifier: Apache-2.0
"""Draws results/*.json: a PNG a file, results/README.md with every figure, losses included, the tables of figures in
README and docs, and README's picture.

python -m benchmarks.report
"""

import re
import sys
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import (
    _engine_report,
    _experts_report,
    _figures,
    _fusion_report,
    _nvfp4_report,
    _overview,
    _ptpc_report,
    _quick_reduce_report,
)
from benchmarks._markdown import RESULTS, load, measured_on, named_gpu, table

Section = Callable[[str, dict[str, Any]], str]
# In the page's order: names of files, and what makes a section (and a plot) of one. The first pattern that fits counts.
SECTIONS: tuple[tuple[str, tuple[tuple[str, Section], ...]], ...] = (
    (
        "Operators",
        (
            ("ptpc_gemm_*", _ptpc_report.gemm),
            ("nvfp4_gemm_*", _nvfp4_report.gemm),
            ("ptpc_moe_*", _experts_report.fp8),
            ("nvfp4_moe_*", _experts_report.nvfp4),
            ("routing_*", _ptpc_report.routing),
            ("row_quant_*", _ptpc_report.rows),
        ),
    ),
    (
        "Collectives",
        (
            ("quick_reduce_engine_*", _engine_report.quick_reduce),
            ("quick_reduce_*", _quick_reduce_report.section),
            ("reduce_norm_quant_*", _fusion_report.kernel),
        ),
    ),
    (
        "End to end",
        (
            ("vllm_engine_*", _engine_report.vllm),
            ("vllm_load_*", _engine_report.loading),
            ("nvfp4_engine_*", _nvfp4_report.engine),
            ("vllm_fusion_demo_*", _fusion_report.accuracy),
            ("vllm_fusion_*", _fusion_report.times),
            ("sglang_engine_*", _engine_report.sglang),
            ("demo_cpu", _engine_report.words),
            ("quantize_cpu", _engine_report.words),
        ),
    ),
)
# Sweeps of launch configurations are for those who set the defaults; no page shows them.
UNSHOWN = ("reduce_norm_quant_sweep_*", "nvfp4_configs_*")


def chosen(names: list[str]) -> Iterator[tuple[str, str, Section]]:
    """(part, name, what makes its section) of the files with these names, in the page's order.

    Raises:
        ValueError: nothing makes a section of a file.
    """
    order: list[tuple[int, str, str, Section]] = []
    patterns = [(part, pattern, make) for part, made in SECTIONS for pattern, make in made]
    for name in names:
        if any(fnmatchcase(name, pattern) for pattern in UNSHOWN):
            continue
        place = next((i for i, (_, pattern, _) in enumerate(patterns) if fnmatchcase(name, pattern)), None)
        if place is None:
            raise ValueError(f"results/{name}.json has no section: give it one in benchmarks/report.py")
        order.append((place, name, patterns[place][0], patterns[place][2]))
    for _, name, part, make in sorted(order, key=lambda each: (each[0], _natural(each[1]))):
        yield part, name, make


def _natural(name: str) -> list[tuple[int, str]]:
    """So that 16 comes after 2."""
    return [(int(digits or -1), other) for digits, other in re.findall(r"(\d+)|(\D+)", name)]


def page(names: list[str]) -> str:
    """The page of these files; draws their plots."""
    overview, parts = [], {part: [f"# {part}"] for part, _ in SECTIONS}
    for part, name, make in chosen(names):
        result = load(f"{name}.json")
        title, _, text = make(name, result).partition("\n")
        title = title.removeprefix("## ") + named_gpu(name, result)
        anchor = re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
        overview.append([f"[{title}](#{anchor})", f"[{name}.json]({name}.json)", measured_on(result)])
        parts[part].append(f"## {title}\n{text}")
    sections = "\n\n".join("\n\n".join(part) for part in parts.values() if len(part) > 1)
    return (
        "# Results\n\nMade by `python -m benchmarks.report` from the JSON files beside it, which `python "
        "benchmarks/regenerate.py` makes on a machine with GPUs. Microseconds a call, medians of CUDA-graph replays "
        "with weights rotated out of L2. Nothing here was measured on an AMD GPU.\n\n"
        f"{table(['what', 'file', 'measured on'], overview)}\n\n{sections}\n"
    )


def main() -> None:
    (RESULTS / "README.md").write_text(page([file.stem for file in RESULTS.glob("*.json")]))
    _figures.update()
    _overview.draw()


if __name__ == "__main__":
    main()
