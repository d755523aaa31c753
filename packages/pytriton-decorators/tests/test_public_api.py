import importlib
import subprocess
import sys
from types import ModuleType

import pytest

PUBLIC = {
    "pytriton.decorators": {
        "ConstantPadder",
        "InferCallable",
        "InferenceRequest",
        "InferenceRequests",
        "InferenceResult",
        "InferenceResults",
        "InputNames",
        "ModelConfigDict",
        "ModelOptions",
        "ModelSignature",
        "RequestLike",
        "Shape",
        "TritonContext",
        "batch",
        "convert_output",
        "fill_optionals",
        "first_value",
        "get_inference_request_batch_size",
        "get_model_config",
        "get_model_signature",
        "get_requests",
        "get_row_requests",
        "get_triton_context",
        "group_by_keys",
        "group_by_values",
        "model",
        "pad_batch",
        "sample",
        "triton_context",
    },
    "pytriton.decorators.serving": {
        "DESCRIPTION_PARAMETER",
        "check_callable",
        "describe_tensors",
        "docstring_of",
        "find_signature",
        "is_file",
        "json_example",
        "load_infer_func",
        "reads_parameters",
        "set_served_model",
    },
    "pytriton.decorators.testing": {"Harness", "HarnessRequest", "Result", "make_request"},
    "pytriton.exceptions": {
        "PyTritonBadParameterError",
        "PyTritonBatchSizeError",
        "PyTritonError",
        "PyTritonInvalidOperationError",
        "PyTritonModelConfigError",
        "PyTritonRuntimeError",
        "PyTritonUnrecoverableError",
        "PyTritonValidationError",
    },
    "pytriton.model_config": {
        "Cost",
        "DeviceKind",
        "DynamicBatcher",
        "ModelConfig",
        "QueuePolicy",
        "Tensor",
        "TimeoutAction",
    },
    "pytriton.model_config.common": {
        "DeviceKind",
        "DynamicBatcher",
        "ModelWarmup",
        "QueuePolicy",
        "TimeoutAction",
        "WarmupInput",
        "generate_warmup_data",
        "generate_warmup_requests",
    },
    "pytriton.model_config.cost": {"Cost"},
    "pytriton.model_config.generator": {"ModelConfigGenerator"},
    "pytriton.model_config.model_config": {"ModelConfig", "ModelOptions"},
    "pytriton.model_config.parser": {"ModelConfigParser", "parse_prototxt"},
    "pytriton.model_config.tensor": {"Tensor"},
    "pytriton.model_config.triton_model_config": {"ResponseCache", "TensorSpec", "TritonModelConfig"},
}


@pytest.mark.parametrize("name", PUBLIC)
def test_what_is_promised_is_what_is_there(name: str) -> None:
    module = importlib.import_module(name)
    assert set(module.__all__) == PUBLIC[name]
    assert list(module.__all__) == sorted(module.__all__, key=lambda public: (public[0].islower(), public))


@pytest.mark.parametrize("name", ["pytriton.decorators", "pytriton.exceptions", "pytriton.model_config"])
def test_packages_have_nothing_else_without_underscore(name: str) -> None:
    module = importlib.import_module(name)
    others = {
        member
        for member, value in vars(module).items()
        if not member.startswith("_") and member not in PUBLIC[name] and not isinstance(value, ModuleType)
    }
    assert others <= {"Any"}


def test_the_import_path_needs_nothing_of_linux() -> None:
    """What other systems lack is taken away first; a callable is decorated and tried, and a model made of hints."""
    code = """
import asyncio, concurrent.futures, inspect, os, signal, socket, subprocess, sys, tempfile, threading
import numpy, wrapt, typing_inspect

for name in ("fcntl", "grp", "pwd", "resource", "termios", "syslog", "readline"):
    sys.modules[name] = None  # makes its import fail
for module, names in (
    (os, ("fork", "register_at_fork", "memfd_create", "sched_getaffinity", "getuid", "eventfd", "O_NOFOLLOW")),
    (signal, ("SIGKILL", "SIGHUP", "pthread_sigmask")),
    (socket, ("AF_UNIX", "SCM_RIGHTS", "recv_fds")),
):
    for name in names:
        module.__dict__.pop(name, None)
sys.platform = "win32"
import pytriton.decorators, pytriton.decorators.serving, pytriton.exceptions, pytriton.model_config
from pytriton.decorators.testing import Harness
from pytriton.model_config import Tensor

@pytriton.decorators.batch
def double(x):
    return {"y": 2 * x}

@pytriton.decorators.model
def shout(text: str) -> str:
    return text.upper()

tensor = lambda name: Tensor((1,), numpy.float32, name)
harness = Harness(double, inputs=[tensor("x")], outputs=[tensor("y")])
print(harness.infer({"x": numpy.ones((1, 1), numpy.float32)})["y"], shout("a"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("[[2.]] A\n", 0), done.stderr
