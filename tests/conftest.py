"""What every test shares."""

from pathlib import Path

import hypothesis
import pytest

# A shared machine's timing says nothing about a property; a failure prints how to repeat it.
hypothesis.settings.register_profile("llmbuild", deadline=None, print_blob=True)
hypothesis.settings.load_profile("llmbuild")


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The repository's root."""
    return Path(__file__).resolve().parent.parent
