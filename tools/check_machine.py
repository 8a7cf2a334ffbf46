# SPDX-License-Identifier: Apache-2.0
"""Says what a machine lacks for `make venv`, by Debian's names, and fails if it lacks anything.

vLLM's CPU build loads libnuma, and torch compiles a part of its sampler with a C++ compiler against Python's headers,
with --enforce-eager too. Written for any Python 3, because the first thing to find out is that it is too old.
"""

import ctypes
import importlib.util
import os
import shutil
import sys
import sysconfig


def missing_packages():
    """Debian packages that are to be installed."""
    packages = []
    if not importlib.util.find_spec("ensurepip"):
        packages.append("python3-venv")
    if not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")):
        packages.append("python3-dev")
    if not shutil.which(os.environ.get("CXX", "g++")):
        packages.append("g++")
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        packages.append("libnuma1")
    return packages


def main():
    """The complaint, or None if all is there."""
    if not (3, 11) <= sys.version_info < (3, 15):
        return "Python 3.11 to 3.14 is needed, and {} is {}.{}. Name another one: make venv PYTHON=python3.11".format(
            sys.executable, *sys.version_info[:2]
        )
    packages = missing_packages()
    return "this machine lacks something. Install it: apt-get install " + " ".join(packages) if packages else None


if __name__ == "__main__":
    complaint = main()
    sys.exit("make venv: " + complaint if complaint else 0)
