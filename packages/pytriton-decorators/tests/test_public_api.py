import importlib
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
        "check_callable",
        "describe_tensors",
        "find_signature",
        "load_infer_func",
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
    "pytriton.model_config.generator": {"ModelConfigGenerator"},
    "pytriton.model_config.model_config": {"ModelConfig"},
    "pytriton.model_config.parser": {"ModelConfigParser"},
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
