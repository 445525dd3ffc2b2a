"""The targets with MTP layers, saved once for all tests here."""

import pytest
from toolkit.mtp_layers.targets import MtpZoo


@pytest.fixture(scope="session")
def mtp_zoo(tmp_path_factory: pytest.TempPathFactory) -> MtpZoo:
    return MtpZoo(tmp_path_factory.mktemp("mtp"))
