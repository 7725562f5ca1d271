"""An offer names the version of the package, and a site refuses an incompatible one."""

from __future__ import annotations

import pytest
from deploy.world import World
from refusals import refuses

from dpscaffold import __version__
from dpscaffold.deployment.protocol import enrolment
from dpscaffold.deployment.protocol.enrolment import offer_to
from dpscaffold.deployment.protocol.messages import compatible


@pytest.mark.parametrize("other", ["99.0.0", "0.99.0", "", "x"])
def test_an_incompatible_server_is_refused_before_anything_is_reserved(
    tmp_path, monkeypatch, other
):
    world = World(tmp_path, "scaffold", user_ratio=1.0)
    monkeypatch.setattr(enrolment, "__version__", other)
    with refuses("not-enrolled: north: version"):
        offer_to(world.post, world.enrolled)
    assert not world.ledger("north").runs
    assert __version__ in world.logs["north"][-1]


def test_patch_versions_are_compatible():
    first, second = __version__.split(".")[:2]
    assert compatible(f"{first}.{second}.99")
    assert not compatible(f"{first}.{int(second) + 1}.0") or int(first) > 0
