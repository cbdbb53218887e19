"""Reading a report page back."""

from __future__ import annotations

import json
import re
from typing import Any

DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


def data_of(page: str) -> dict[str, Any]:
    """What a page shows: {"report": ..., "graphs": [{"before": ..., "after": ...}]}."""
    return json.loads(DATA.search(page)[1])


def named(picture: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A picture's nodes by name."""
    return {node["name"]: node for node in picture["nodes"]}
