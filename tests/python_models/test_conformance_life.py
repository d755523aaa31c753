"""How Python models are loaded and end: alike under Triton's Python backend and under ours."""

from __future__ import annotations

from typing import Any

import pytest

from support.python_models.pair import Pair, Side, text

HEAD = "import os\nimport triton_python_backend_utils as pb_utils\n\n\n"
CLASS = f"{HEAD}class TritonPythonModel:\n"
EXECUTE = "    def execute(self, requests):\n        return []\n"
INITIALIZE = f"{CLASS}    def initialize(self, args):\n"

BROKEN = {
    "a syntax error": f"{HEAD}def broken(:\n    pass\n",
    "a module that is not there": "import nowhere_to_be_found\n",
    "a name that is not there": f"{HEAD}from os import nothing_of_the_kind\n",
    "an error at import": f"{HEAD}raise ValueError('at import')\n",
    "no class": HEAD,
    "an error in initialize": f"{INITIALIZE}        raise ValueError('no weights')\n\n{EXECUTE}",
    "an exception of Triton's in initialize": (
        f"{INITIALIZE}        raise pb_utils.TritonModelException('no weights')\n\n{EXECUTE}"
    ),
    "initialize without arguments": f"{CLASS}    def initialize(self):\n        pass\n\n{EXECUTE}",
    "a class that is none": f"{HEAD}TritonPythonModel = 5\n",
    "an error in __init__": f"{CLASS}    def __init__(self):\n        raise ValueError('no memory')\n\n{EXECUTE}",
    "tabs among blanks": f"{CLASS}    def execute(self, requests):\n\treturn []\n",
    "an exit at import": f"{HEAD}raise SystemExit('at import')\n",
    "an exit in initialize": f"{INITIALIZE}        raise SystemExit(4)\n\n{EXECUTE}",
    "an interruption in initialize": f"{INITIALIZE}        raise KeyboardInterrupt()\n\n{EXECUTE}",
    "an error in auto_complete_config": (
        f"{CLASS}    @staticmethod\n    def auto_complete_config(config):\n"
        f"        raise ValueError('no idea')\n\n{EXECUTE}"
    ),
    "auto_complete_config returns nothing": (
        f"{CLASS}    @staticmethod\n    def auto_complete_config(config):\n        pass\n\n{EXECUTE}"
    ),
    "auto_complete_config contradicts": (
        f"{CLASS}    @staticmethod\n    def auto_complete_config(config):\n"
        "        config.add_input({'name': 'COMMAND', 'data_type': 'TYPE_FP32', 'dims': [1]})\n"
        f"        return config\n\n{EXECUTE}"
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_cannot_be_loaded(pair: Pair, what: str) -> None:
    def ask(side: Side) -> str:
        error = side.load("faults", BROKEN[what])
        side.unload("faults")
        return error

    error = pair.compare(ask)
    assert error
    if what == "a syntax error":
        assert "model.py, line 5" in error


WITHOUT_EXECUTE = {
    "nothing": "    pass\n",
    "no function": "    execute = 5\n",
    "without requests": "    def execute(self):\n        return []\n",
}


@pytest.mark.parametrize("what", WITHOUT_EXECUTE)
def test_what_has_no_execute(pair: Pair, what: str) -> None:
    def ask(side: Side) -> Any:
        try:
            return [
                side.load("faults", CLASS + WITHOUT_EXECUTE[what]),
                *(side.infer("faults", {"COMMAND": text("")}) for _ in range(2)),
            ]
        finally:
            side.unload("faults")

    load, *answers = pair.compare(ask)
    assert not load
    assert all("error" in answer for answer in answers)
