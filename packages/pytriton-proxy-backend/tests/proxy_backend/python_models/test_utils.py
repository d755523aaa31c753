"""`triton_python_backend_utils`, as models use it."""

import gc
import weakref
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from pytriton.proxy_backend.python_models import dlpack
from pytriton.proxy_backend.wire.dtypes import BF16_BITS

# ---- tensors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "number"),
    [("bool", 1), ("u1", 2), ("u2", 3), ("u4", 4), ("u8", 5), ("i1", 6), ("i2", 7), ("i4", 8), ("i8", 9), ("f2", 10),
     ("f4", 11), ("f8", 12), ("O", 13), ("S3", 13)],
)  # fmt: skip
def test_a_tensor_says_what_it_is(utils: ModuleType, dtype: str, number: int) -> None:
    array = np.zeros((2, 3), dtype)
    tensor = utils.Tensor("x", array)
    assert (tensor.name(), tensor.triton_dtype(), tensor.shape(), tensor.is_cpu()) == ("x", number, [2, 3], True)
    assert tensor.as_numpy() is array


def test_tensors_are_in_c_order(utils: ModuleType) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    tensor = utils.Tensor("x", array)
    assert tensor.as_numpy().flags.c_contiguous
    assert tensor.as_numpy().tolist() == array.tolist()


@pytest.mark.parametrize("dtype", ["U3", ">c8", "c8", "g", "M8[s]"])
def test_types_that_triton_has_not(utils: ModuleType, dtype: str) -> None:
    with pytest.raises(utils.TritonModelException, match=r"NumPy dtype is not supported."):
        utils.Tensor("x", np.zeros(1, dtype))


def test_what_is_no_tensor(utils: ModuleType) -> None:
    with pytest.raises(utils.TritonModelException, match=r"Tensor name cannot be an empty string."):
        utils.Tensor("", np.zeros(1))
    for array in ([1.0], None, np.float32(1)):
        with pytest.raises(TypeError, match=r"expected a numpy\.ndarray, got a "):
            utils.Tensor("x", array)
    with pytest.raises(TypeError, match="expected a str, got a int"):
        utils.Tensor(5, np.zeros(1))
    assert utils.Tensor(b"x", np.zeros(1)).name() == "x"


# ---- DLPack ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bool", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 2)])
def test_dlpack_both_ways(utils: ModuleType, dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(6).reshape(-1)[: int(np.prod(shape))].astype(dtype).reshape(shape)
    tensor = utils.Tensor("x", array)
    for made in (utils.Tensor.from_dlpack("y", tensor), utils.Tensor.from_dlpack("y", tensor.to_dlpack())):
        assert (made.name(), made.triton_dtype(), made.shape()) == ("y", tensor.triton_dtype(), list(shape))
        assert made.as_numpy().tolist() == array.tolist()
        assert not array.size or np.shares_memory(made.as_numpy(), array)


def test_dlpack_of_numpy(utils: ModuleType) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert utils.Tensor.from_dlpack("x", array).as_numpy().tolist() == array.tolist()
    back = np.from_dlpack(utils.Tensor("x", array))
    assert np.shares_memory(back, array)
    with pytest.raises(utils.TritonModelException, match=r"DLPack tensor is not contiguous. Only contiguous DLPack"):
        utils.Tensor.from_dlpack("x", array.T)


def test_bf16_by_dlpack(utils: ModuleType) -> None:
    bits = np.array([1, 2, 3], np.uint16).view(BF16_BITS)
    tensor = utils.Tensor.from_dlpack("x", dlpack.to_capsule(bits, bits))
    assert (tensor.triton_dtype(), tensor.shape()) == (14, [3])
    with pytest.raises(utils.TritonModelException, match=r"Tensor dtype is BF16 and cannot be converted to NumPy. Use"):
        tensor.as_numpy()
    again = utils.Tensor.from_dlpack("x", tensor.to_dlpack())
    assert again._array.view(np.uint16).tolist() == [1, 2, 3]


def test_dlpack_keeps_nothing(utils: ModuleType) -> None:
    class Owned(np.ndarray[Any, Any]):
        pass

    array = np.zeros(3).view(Owned)
    gone = weakref.ref(array)
    capsule = utils.Tensor("x", array).to_dlpack()
    made = utils.Tensor.from_dlpack("y", capsule)
    unread = utils.Tensor("x", array).to_dlpack()
    view = made.as_numpy()[1:]
    del array, capsule, made, unread
    gc.collect()
    assert gone() is not None
    del view
    gc.collect()
    assert gone() is None


class OnDevice:
    """What a framework hands out whose data are elsewhere."""

    def __init__(self, device: int) -> None:
        self.device = device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0

    def __dlpack__(self, **_: Any) -> Any:
        raise AssertionError("nobody can read it")


def test_what_dlpack_cannot_give(utils: ModuleType) -> None:
    with pytest.raises(utils.TritonModelException, match=r"DLPack does not have support for string tensors."):
        utils.Tensor("x", np.array([b"a"], object)).to_dlpack()
    with pytest.raises(utils.TritonModelException, match="memory allocated on GPU device"):
        utils.Tensor.from_dlpack("x", OnDevice(2))
    with pytest.raises(utils.TritonModelException, match=r"DLDevice type 8 is not support by Python backend."):
        utils.Tensor.from_dlpack("x", OnDevice(8))
    with pytest.raises(utils.TritonModelException, match=r"Provided tensor is not supported. Tensor must be a DLPack"):
        utils.Tensor.from_dlpack("x", 5)
    with pytest.raises(utils.TritonModelException, match=r"Tensor name cannot be an empty string."):
        utils.Tensor.from_dlpack("", np.zeros(1))
    capsule = utils.Tensor("x", np.zeros(1)).to_dlpack()
    utils.Tensor.from_dlpack("x", capsule)
    with pytest.raises(utils.TritonModelException, match="the DLPack capsule was read before"):
        utils.Tensor.from_dlpack("x", capsule)
    with pytest.raises(utils.TritonModelException, match="DLPack type code 5 with 64 bits"):
        utils.Tensor.from_dlpack("x", np.zeros(1, np.complex64))


# ---- requests and responses ------------------------------------------------------------------------------------------


def test_responses(utils: ModuleType) -> None:
    tensor = utils.Tensor("y", np.zeros(1))
    response = utils.InferenceResponse([tensor], parameters={"a": 1, "b": True, "c": "d"})
    assert response.output_tensors() == [tensor]
    assert (response.has_error(), response.error(), response.parameters()) == (
        False,
        None,
        '{"a": 1, "b": true, "c": "d"}',
    )
    assert utils.get_output_tensor_by_name(response, "y") is tensor
    assert utils.get_output_tensor_by_name(response, "z") is None
    failed = utils.InferenceResponse(error=utils.TritonError("why", utils.TritonError.NOT_FOUND))
    assert failed.has_error()
    assert (failed.error().message(), failed.error().code()) == ("why", utils.TritonError.NOT_FOUND)
    assert utils.TritonError("x").code() == utils.TritonError.INTERNAL
    assert utils.InferenceResponse().parameters() == "{}"


def test_what_is_no_response(utils: ModuleType) -> None:
    with pytest.raises(utils.TritonModelException, match=r"Output tensor for inference response should not be empty."):
        utils.InferenceResponse([None])
    with pytest.raises(TypeError, match="expected a list of Tensor, got a ndarray in it"):
        utils.InferenceResponse([np.zeros(1)])
    with pytest.raises(TypeError, match="expected a TritonError, got a str"):
        utils.InferenceResponse(error="wrong")
    with pytest.raises(
        utils.TritonModelException, match=r"values to have type bool/int/str, found type <class 'float'>"
    ):
        utils.InferenceResponse(parameters={"a": 1.5})
    with pytest.raises(utils.TritonModelException, match=r"keys to have type str, found type <class 'int'>"):
        utils.InferenceResponse(parameters={1: 1})
    with pytest.raises(TypeError, match="expected a code of TritonError, got a int"):
        utils.TritonError("x", 5)


def test_requests_of_a_model(utils: ModuleType) -> None:
    tensor = utils.Tensor("x", np.zeros(1))
    trace = utils.InferenceRequest(inputs=[], requested_output_names=[], model_name="m").trace()
    request = utils.InferenceRequest(
        request_id="r", correlation_id="s", inputs=[tensor], requested_output_names=["y", "z"], model_name="m",
        model_version=2, flags=utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START, timeout=5, trace=trace,
        preferred_memory=utils.PreferredMemory(utils.TRITONSERVER_MEMORY_CPU, 0), parameters={"p": False},
    )  # fmt: skip
    assert request.inputs() == [tensor]
    assert utils.get_input_tensor_by_name(request, "x") is tensor
    assert utils.get_input_tensor_by_name(request, "y") is None
    assert (request.request_id(), request.correlation_id(), request.flags(), request.timeout()) == ("r", "s", 1, 5)
    assert (request.parameters(), request.requested_output_names()) == ('{"p": false}', {"y", "z"})
    assert (request.trace().get_context(), request.is_cancelled()) == (None, False)
    request.set_flags(2)
    assert request.flags() == utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END
    with pytest.raises(utils.TritonModelException, match="no reference to the decoupled state of the model"):
        request.get_response_sender().send(utils.InferenceResponse())


def test_what_is_no_request(utils: ModuleType) -> None:
    def make(**fields: Any) -> Any:
        return utils.InferenceRequest(**{"inputs": [], "requested_output_names": [], "model_name": "m", **fields})

    with pytest.raises(
        utils.TritonModelException, match="Input tensor for request with id 'r' and model name 'm' should"
    ):
        make(request_id="r", inputs=[None])
    with pytest.raises(utils.TritonModelException, match="Requested output name for request with id '' and model name"):
        make(requested_output_names=[""])
    with pytest.raises(utils.TritonModelException, match="Correlation ID must be integer or string"):
        make(correlation_id=1.5)
    with pytest.raises(TypeError, match="correlation_id must be a whole number or a text, got None"):
        make(correlation_id=None)
    for field in ("model_version", "flags", "timeout"):
        for value in (None, 1.5):
            with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
                make(**{field: value})
    with pytest.raises(TypeError, match="must be given"):
        utils.InferenceRequest(inputs=[])
    with pytest.raises(TypeError, match="expected TRITONSERVER_MEMORY_CPU or TRITONSERVER_MEMORY_GPU, got 5"):
        utils.PreferredMemory(5)


# ---- strings, types, configuration -----------------------------------------------------------------------------------


def test_strings_in_their_wire_form(utils: ModuleType) -> None:
    array = np.array([[b"ab", "ü"], [3, b""]], object)
    raw = utils.serialize_byte_tensor(array)
    assert raw == b"\2\0\0\0ab\2\0\0\0\xc3\xbc\1\0\0\x003\0\0\0\0"
    assert utils.deserialize_bytes_tensor(raw).tolist() == [b"ab", "ü".encode(), b"3", b""]
    assert utils.serialize_byte_tensor(np.array([b"ab"])) == b"\2\0\0\0ab"
    assert utils.serialize_byte_tensor(np.zeros(0, object)) == ()
    assert utils.serialize_byte_tensor(np.zeros(1)) is None


def test_types(utils: ModuleType) -> None:
    assert utils.triton_string_to_numpy("TYPE_FP32") is np.float32
    assert utils.triton_string_to_numpy("TYPE_STRING") is np.object_
    assert utils.triton_string_to_numpy("TYPE_BOOL") is bool
    with pytest.raises(KeyError):
        utils.triton_string_to_numpy("TYPE_BF16")
    for number in range(1, 14):
        assert utils.numpy_to_triton_type(utils.triton_to_numpy_type(number)) == number
        assert utils.numpy_to_triton_type(np.dtype(utils.triton_to_numpy_type(number))) == number
    assert utils.numpy_to_triton_type(np.bytes_) == 13
    assert utils.triton_to_numpy_type(14) is None
    assert utils.numpy_to_triton_type(np.complex64) is None


def test_what_a_configuration_says(utils: ModuleType) -> None:
    config = {"input": [{"name": "x"}], "output": [{"name": "y", "dims": [1]}]}
    assert utils.get_input_config_by_name(config, "x") == {"name": "x"}
    assert utils.get_output_config_by_name(config, "y") == {"name": "y", "dims": [1]}
    assert utils.get_input_config_by_name(config, "y") is None
    assert utils.get_output_config_by_name({}, "y") is None
    assert utils.using_decoupled_model_transaction_policy(config) is False
    assert utils.using_decoupled_model_transaction_policy({"model_transaction_policy": {"decoupled": True}}) is True
    assert utils.get_model_dir() == "/repository/model/1"


def make_config(utils: ModuleType, **fields: Any) -> Any:
    import json

    return utils.ModelConfig(json.dumps({"name": "m", "max_batch_size": 0, "input": [], "output": [], **fields}))


def test_a_configuration_is_completed(utils: ModuleType) -> None:
    config = make_config(utils, input=[{"name": "x", "data_type": "TYPE_INVALID", "dims": []}])
    config.set_max_batch_size(4)
    config.set_dynamic_batching()
    config.set_dynamic_batching()
    config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [2], "optional": True})
    config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [2], "optional": True})
    config.add_output({"name": "y", "data_type": "TYPE_INT8", "dims": [-1]})
    config.set_model_transaction_policy({"decoupled": True})
    config.set_model_transaction_policy({"decoupled": True})
    assert config.as_dict() == {
        "name": "m", "max_batch_size": 4, "dynamic_batching": {}, "model_transaction_policy": {"decoupled": True},
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [2], "optional": True}],
        "output": [{"name": "y", "data_type": "TYPE_INT8", "dims": [-1]}],
    }  # fmt: skip


X = {"name": "x", "data_type": "TYPE_FP32", "dims": [2]}


@pytest.mark.parametrize(
    ("given", "change", "message"),
    [
        ({"max_batch_size": 8}, ("set_max_batch_size", 4),
         "configuration specified max_batch_size 8, but in auto-complete-config function for model 'm' specified "
         "max_batch_size 4"),
        ({"sequence_batching": {}}, ("set_dynamic_batching",),
         "Configuration specified scheduling_choice as 'sequence_batching', but auto-complete-config function for "
         "model 'm' tries to set scheduling_choice as 'dynamic_batching'"),
        ({}, ("add_input", {**X, "shape": 1}),
         "input 'x' in auto-complete-config function for model 'm' contains property other than 'name', 'data_type', "
         "'dims' and 'optional'."),
        ({}, ("add_output", {**X, "optional": True}),
         "output 'x' in auto-complete-config function for model 'm' contains property other than 'name', 'data_type' "
         "and 'dims'."),
        ({}, ("add_input", {"data_type": "TYPE_FP32", "dims": [1]}),
         "input in auto-complete-config function for model 'm' is missing 'name' property."),
        ({}, ("add_output", {"name": "x", "dims": [1]}),
         "output 'x' in auto-complete-config function for model 'm' is missing 'data_type' property."),
        ({}, ("add_input", {"name": "x", "data_type": "TYPE_FP32"}),
         "input 'x' in auto-complete-config function for model 'm' is missing 'dims' property."),
        ({"input": [X]}, ("add_input", {**X, "data_type": "TYPE_INT8"}),
         "unable to load model 'm', configuration expects datatype TYPE_FP32 for input 'x', model provides TYPE_INT8"),
        ({"output": [X]}, ("add_output", {**X, "dims": [3]}),
         "model 'm', tensor 'x': the model expects dims [3] but the model configuration specifies dims [2]"),
        ({"input": [{**X, "optional": True}]}, ("add_input", {**X, "optional": False}),
         "model 'm', tensor 'x': the model expects optional False but the model configuration specifies optional True"),
        ({}, ("set_model_transaction_policy", {"other": 1}),
         "model transaction property in auto-complete-config function for model 'm' contains property other than "
         "'decoupled'."),
        ({"model_transaction_policy": {"decoupled": False}}, ("set_model_transaction_policy", {"decoupled": True}),
         "trying to change decoupled property in auto-complete-config for model 'm', which is already set to 'False'."),
    ],
    ids=range(12),
)  # fmt: skip
def test_a_configuration_that_says_otherwise(
    utils: ModuleType, given: dict[str, Any], change: tuple[Any, ...], message: str
) -> None:
    config = make_config(utils, **given)
    before = config.as_dict().copy()
    with pytest.raises(ValueError) as failure:  # noqa: PT011 - the text is compared
        getattr(config, change[0])(*change[1:])
    assert str(failure.value) == message
    assert config.as_dict() == before


# ---- log -------------------------------------------------------------------------------------------------------------


def test_the_log(utils: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    logger = utils.Logger
    with caplog.at_level("DEBUG"):
        logger.log("a")
        logger.log("b", logger.WARNING)
        logger.log_info("c")
        logger.log_warn("d")
        logger.log_error("e %s")
        logger.log_verbose("f")
    levels = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert levels == [
        ("INFO", "a"), ("WARNING", "b"), ("INFO", "c"), ("WARNING", "d"), ("ERROR", "e %s"), ("DEBUG", "f"),
    ]  # fmt: skip
    with pytest.raises(TypeError, match="expected a str, got a int"):
        logger.log(5)
    with pytest.raises(TypeError, match="expected a level of Logger, got a int"):
        logger.log("a", 1)
