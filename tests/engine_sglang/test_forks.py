# SPDX-License-Identifier: Apache-2.0
"""What servers are forks of: tests/engine/test_forks.py has the rest."""

import subprocess
from pathlib import Path

import forks


def test_what_has_been_imported_holds_nothing_of_ours(tmp_path: Path) -> None:
    """A plugin is found, imported and registered by each fork."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys; print([name for name in sys.modules if 'quant_rocm' in name], 'sglang' in sys.modules)"
    )
    done = subprocess.run([forks.python(), str(program)], capture_output=True, text=True, check=True)
    assert done.stdout == "[] True\n"
