"""One object, served by a real pod on a real node, for the tests of this folder. hack/run_tests.py, or
`python -m demo prepare` (see the Makefile), brings the cluster, the images and the operator beforehand."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest
from tests.e2e.site import NAME, Site, ready

from demo import install, models
from demo.cluster import choose
from demo.steps import StepError


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    cluster = choose()
    try:
        available, stand = install.available(cluster.kubectl.within(install.NAMESPACE))
    except (OSError, StepError, KeyError) as error:
        available, stand = None, str(error)
    if not available:
        required = os.environ.get("CI") == "true" or os.environ.get("OUTRIDER_REQUIRE_CLUSTER") == "1"
        (pytest.fail if required else pytest.skip)(f"no operator to test, run `make test-e2e`: {stand}")
    namespace = f"e2e-{uuid.uuid4().hex[:6]}"
    kubectl = cluster.kubectl.within(namespace)
    kubectl("create", "namespace", namespace)
    if cluster.local:
        models.offer(kubectl, volume=namespace)
    yield Site(cluster, kubectl)
    # a namespace that still holds pods is looked at again only after their whole grace period
    kubectl("delete", "specm", "--all")
    kubectl("delete", "namespace", namespace, "--wait=false")
    if cluster.local:
        kubectl("delete", "pv", namespace, "--wait=false")


@pytest.fixture
def served(site: Site) -> Site:
    """The site with the object `chat` as the sample says, and Ready."""
    site.apply(NAME)
    site.until("chat is Ready", ready)
    return site
