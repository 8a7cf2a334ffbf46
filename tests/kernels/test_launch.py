# SPDX-License-Identifier: Apache-2.0
"""A launch gives the driver what Triton's own gives it, and a kernel only arguments that it was compiled for."""

import pytest

from tests.amd import isolated, tritons

pytest.importorskip("triton")

from tests.kernels.launches import TARGETS, clusters, coarser, descriptors, hooked, planned, replaced, twice

every_triton = pytest.mark.parametrize("triton", tritons.VERSIONS)
every_arch = pytest.mark.parametrize("arch", TARGETS)


@every_triton
@every_arch
def test_whatever_triton_tells_apart_is_of_two_kinds(arch: str, triton: str) -> None:
    theirs, ours, wrong = isolated.call(triton, coarser, arch)
    assert not wrong
    assert ours >= theirs > 15, "kinds there are"


@every_triton
@every_arch
def test_the_driver_is_given_the_same(arch: str, triton: str) -> None:
    theirs, ours, kinds = isolated.call(triton, twice, arch)
    assert ours == theirs
    assert kinds == 6, "64 and 48 elements are alike, as are two values of a number that nothing is compiled for"


@every_triton
@every_arch
def test_a_plan_gives_the_driver_the_same(arch: str, triton: str) -> None:
    theirs, ours, said = isolated.call(triton, planned, arch)
    assert ours == theirs
    assert said == ["somebody", "the driver"]


@every_triton
@every_arch
def test_hooks_are_told_the_same(arch: str, triton: str) -> None:
    theirs, ours = isolated.call(triton, hooked, arch)
    assert ours == theirs and len(ours) == 3
    assert None not in ours[0][6:9], "what is launched, and the hooks"


@every_triton
def test_descriptors_are_given_as_they_are(triton: str) -> None:
    theirs, ours, kinds = isolated.call(triton, descriptors)
    assert ours == theirs and kinds == 1


@every_triton
def test_every_launch_of_a_cluster_is_one(triton: str) -> None:
    assert isolated.call(triton, clusters, limit=300) == [3] * 8


def test_who_replaces_tritons_run_is_asked() -> None:
    assert isolated.call(tritons.VERSIONS[-1], replaced) == ["the driver", "somebody", "the driver"]
