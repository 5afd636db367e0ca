"""What clients ask: where, by which key, for which form of an answer. Read where the clients are."""

from __future__ import annotations

import os
from typing import Any, Literal

import pydantic

SERVER = os.environ.get("KVGRAPH_SERVER", "")  # the address, as the test that starts these has it
KEY = "secret"
MODEL = "tiny"
HI: Any = [{"role": "user", "content": "Hi"}]
TOO_LONG: Any = [{"role": "user", "content": "word " * 600}]
SHORT = 0.001  # seconds
LONG = 400  # tokens, which take longer
N_AT_A_TIME = 8


class Weather(pydantic.BaseModel):
    """How warm a city is."""

    city: Literal["Oslo", "Rome"]
    warm: bool


TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells how warm it is.",
            "parameters": Weather.model_json_schema(),
        },
    }
]
