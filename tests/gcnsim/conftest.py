# SPDX-License-Identifier: Apache-2.0
"""Puts tools/ on the path, where gcnsim lives as a package of its own."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
