"""The start of a rank of a job group."""

import pytest

from common.process.topology import Topology
from common.settings.config import Config
from tests.support.processes.ports import free_port
from trainer.start import job_group


@pytest.mark.integration
def test_a_service_that_is_missing_is_named_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(job_group, "_SERVICES_START_S", 0.3)
    config = Config()
    config.data.port = free_port()
    config.reward.port = free_port()
    assert not job_group._try_rewards(config, Topology())
    (said,) = [line for line in caplog.messages if "not tried before the model is loaded" in line]
    assert f"http://127.0.0.1:{config.data.port}" in said
