"""The metrics of every service, read once."""

import asyncio
from pathlib import Path

import pytest

from tests.support.package.metrics_pages import Family, pages


@pytest.fixture(scope="session")
def found(
    base_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Family]]:
    """The metric families of the real pages, by service and name."""
    return asyncio.run(pages(base_model, tmp_path_factory.mktemp("pages")))
