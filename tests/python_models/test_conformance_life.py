"""How Python models are loaded and end: alike under Triton's Python backend and under ours."""

from __future__ import annotations

import pytest

from support.python_models.pair import Pair, Side

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
