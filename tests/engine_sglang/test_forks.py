# SPDX-License-Identifier: Apache-2.0
"""What servers are forks of: tests/engine/test_forks.py has the rest."""

import forks


def test_what_has_been_imported_holds_nothing_of_ours() -> None:
    """A plugin is found, imported and registered by each fork."""
    found = forks.modules()
    assert "sglang" in found and not [name for name in found if "quant_rocm" in name]
