"""Certificates for the tests of this folder."""

import pytest

from tests.support.processes.certificates import Certificates, make_certificates


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="session")
def other_certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Makes certificates from an authority that nobody here trusts."""
    return make_certificates(tmp_path_factory.mktemp("other-tls"))
