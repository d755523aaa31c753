import subprocess
import sys

import pytest

import pytriton.triton
from pytriton.server.tritonserver.binary import BUNDLED_FOLDER


def test_every_exported_name_is_there() -> None:
    for name in pytriton.triton.__all__:
        assert getattr(pytriton.triton, name) is not None
    assert len(set(pytriton.triton.__all__)) == len(pytriton.triton.__all__)


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'RemoteModel'"):
        _ = pytriton.triton.RemoteModel


def test_constants_of_old_scripts() -> None:
    assert pytriton.triton.MODEL_INFER_URL.format(model_name="m") == "/v2/models/m/infer"
    assert pytriton.triton.MONITORING_PERIOD_S == 10.0
    assert pytriton.triton.WAIT_FORM_MODEL_TIMEOUT_S == 60.0
    assert pytriton.triton.TRITONSERVER_DIST_DIR == BUNDLED_FOLDER


def test_the_import_brings_no_network_library() -> None:
    # They take longer to import than a server takes to start.
    code = "import sys, pytriton.triton; print(sorted({'grpc', 'gevent', 'tritonclient'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
