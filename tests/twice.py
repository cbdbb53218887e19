"""A pytest plugin, `-p twice`: every test runs twice in the process, one behind the other."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, params=("first", "second"))
def turn(request: pytest.FixtureRequest) -> str:
    return request.param
