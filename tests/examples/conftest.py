"""Examples write where they are started. Tests start them elsewhere than in the checkout."""

import pytest


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
