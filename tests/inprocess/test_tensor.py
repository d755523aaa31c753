"""`Tensor` and `MemoryBuffer` of Triton in process: what is shared, what is copied, and what is refused."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pytriton.inprocess.capi.enums import DataType, DLDeviceType, MemoryType
from pytriton.inprocess.capi.errors import InvalidArgumentError, UnsupportedError
from pytriton.inprocess.tensors.memory import MemoryBuffer
from pytriton.inprocess.tensors.tensor import Tensor

NUMBERS = {
    DataType.BOOL: np.bool_,
    DataType.UINT8: np.uint8,
    DataType.UINT16: np.uint16,
    DataType.UINT32: np.uint32,
    DataType.UINT64: np.uint64,
    DataType.INT8: np.int8,
    DataType.INT16: np.int16,
    DataType.INT32: np.int32,
    DataType.INT64: np.int64,
    DataType.FP16: np.float16,
    DataType.FP32: np.float32,
    DataType.FP64: np.float64,
}


class Foreign:
    """A tensor of another library, of which only DLPack is known."""

    def __init__(self, array: np.ndarray[Any, Any], *, versioned: bool = True) -> None:
        self.array = array
        self.versioned = versioned

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **keywords: Any) -> Any:
        if not self.versioned and keywords:
            raise TypeError("unexpected keyword arguments")
        return self.array.__dlpack__(**keywords)


def _address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize(("data_type", "scalar"), NUMBERS.items(), ids=[item.name for item in NUMBERS])
def test_every_number_goes_in_and_out_on_the_same_memory(data_type: DataType, scalar: type[Any]) -> None:
    array = np.arange(6).reshape(2, 3).astype(scalar)

    tensor = Tensor.from_dlpack(array)
    out = np.from_dlpack(tensor)

    assert tensor.data_type is data_type
    assert tensor.shape == (2, 3)
    assert tensor.data_ptr == _address(array)
    assert tensor.size == array.nbytes
    assert (tensor.memory_type, tensor.memory_type_id) == (MemoryType.CPU, 0)
    assert tensor.__dlpack_device__() == (DLDeviceType.kDLCPU, 0)
    assert out.dtype == array.dtype
    assert np.array_equal(out, array)
    assert np.shares_memory(out, array)
    assert np.shares_memory(np.asarray(tensor), array)


@pytest.mark.parametrize("versioned", [True, False])
def test_a_tensor_of_another_library_is_taken_without_a_copy_and_kept(versioned: bool) -> None:
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    foreign = Foreign(array, versioned=versioned)
    kept = weakref.ref(foreign)

    tensor = Tensor.from_dlpack(foreign)
    del foreign

    assert tensor.data_ptr == _address(array)
    assert (tensor.data_type, tensor.shape) == (DataType.INT32, (3, 4))
    assert kept() is tensor.memory_buffer.owner
    view = np.asarray(tensor)
    del tensor
    gc.collect()
    assert kept() is not None, "an array made of the tensor must keep what it lies in"
    assert np.array_equal(view, array)
    del view
    gc.collect()
    assert kept() is None


def test_memory_buffer_refers_to_the_memory_of_its_owner() -> None:
    array = np.arange(10, dtype=np.float32)

    buffer = MemoryBuffer.from_dlpack(array)

    assert buffer == MemoryBuffer(_address(array), MemoryType.CPU, 0, 40, buffer.owner)
    assert buffer.owner is array


def test_a_tensor_over_a_memory_buffer_reads_its_memory() -> None:
    memory = (ctypes.c_float * 6)(*range(6))
    buffer = MemoryBuffer(ctypes.addressof(memory), MemoryType.CPU_PINNED, 0, 24, memory)

    tensor = Tensor(DataType.FP32, [2, 3], buffer)
    memory[5] = 50

    assert np.from_dlpack(tensor).tolist() == [[0, 1, 2], [3, 4, 50]]
    assert tensor.memory_buffer is buffer
    assert tensor.to_host() is tensor
    assert tensor.to_device("cpu") is tensor


@pytest.mark.parametrize(
    "make",
    [
        lambda array: array.T,
        lambda array: array[:, ::2],
        lambda array: array[::-1],
        lambda array: np.asfortranarray(array),
        lambda array: np.broadcast_to(array[:1], array.shape),
        lambda array: array.astype(array.dtype.newbyteorder(">")),
    ],
    ids=["transposed", "every second", "reversed", "fortran", "broadcast", "big endian"],
)
def test_what_does_not_lie_in_c_order_is_copied_and_not_misread(make: Callable[[Any], Any]) -> None:
    array = make(np.arange(24, dtype=np.float32).reshape(4, 6))

    tensor = Tensor.from_dlpack(array)

    assert tensor.shape == array.shape
    assert np.from_dlpack(tensor).tolist() == array.tolist()
    with pytest.raises((InvalidArgumentError, UnsupportedError)) as caught:
        MemoryBuffer.from_dlpack(array)
    assert caught.value.expected is not None
    assert caught.value.received is not None


def test_a_view_of_another_library_that_is_not_contiguous_is_copied_if_it_can() -> None:
    class Copying(Foreign):
        def contiguous(self) -> Foreign:
            return Foreign(self.array.copy(order="C"))

    array = np.arange(6, dtype=np.int64).reshape(2, 3).T

    assert np.from_dlpack(Tensor.from_dlpack(Copying(array))).tolist() == array.tolist()
    with pytest.raises(InvalidArgumentError, match="strides"):
        Tensor.from_dlpack(Foreign(array))


@pytest.mark.parametrize("scalar", [np.float32(1.5), np.int64(-3), np.bool_(True), np.float16(0.5)])
def test_numpy_scalars_are_tensors_without_dimensions(scalar: Any) -> None:
    tensor = Tensor.from_dlpack(scalar)

    assert tensor.shape == ()
    assert np.asarray(tensor) == scalar
    assert np.asarray(tensor).dtype == scalar.dtype


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4)])
def test_empty_tensors_keep_their_shape(shape: tuple[int, ...]) -> None:
    tensor = Tensor.from_dlpack(np.empty(shape, np.float32))

    assert tensor.shape == shape
    assert tensor.size == 0
    assert np.from_dlpack(tensor).shape == shape
    assert Tensor(DataType.FP32, shape, MemoryBuffer(0, MemoryType.CPU, 0, 0, None)).__array__().shape == shape
    assert Tensor.from_bytes_array(np.empty(shape, object)).to_bytes_array().shape == shape


def test_read_only_memory_is_shared_and_stays_read_only() -> None:
    array = np.frombuffer(bytes(range(16)), np.uint8)

    tensor = Tensor.from_dlpack(array)

    assert tensor.data_ptr == _address(array)
    view = np.asarray(tensor)
    assert np.shares_memory(view, array)
    assert not view.flags.writeable
    assert np.from_dlpack(tensor).tolist() == array.tolist()
    # A reader from before DLPack 1.0 cannot be told, and gets a copy.
    copy = Tensor.from_dlpack(_Capsule(tensor.__dlpack__()))
    assert copy.data_ptr != tensor.data_ptr
    assert np.asarray(copy).tolist() == array.tolist()


@pytest.mark.parametrize("how", ["array", "memory"])
def test_what_is_made_of_a_capsule_holds_one_reference_to_the_tensor(how: str) -> None:
    source = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor = Tensor.from_dlpack(source)
    if how == "memory":
        tensor = Tensor(DataType.FP32, (2, 3), MemoryBuffer.from_dlpack(source))
    before = sys.getrefcount(tensor)
    array = np.from_dlpack(tensor)
    assert sys.getrefcount(tensor) == before + 1
    row = array[1]
    del array
    assert sys.getrefcount(tensor) == before + 1
    another = np.from_dlpack(tensor)
    assert sys.getrefcount(tensor) == before + 2
    assert np.shares_memory(another, source)
    copied = Tensor.from_dlpack(_Capsule(tensor.__dlpack__(copy=True)))
    assert sys.getrefcount(tensor) == before + 2
    del another, row
    assert sys.getrefcount(tensor) == before
    assert np.asarray(copied).tolist() == source.tolist()


def test_dlpack_copies_when_it_is_told_to() -> None:
    array = np.arange(4, dtype=np.int32)
    tensor = Tensor.from_dlpack(array)

    copied = Tensor.from_dlpack(_Capsule(tensor.__dlpack__(copy=True)))
    shared = Tensor.from_dlpack(_Capsule(tensor.__dlpack__(copy=False)))

    assert copied.data_ptr != tensor.data_ptr
    assert shared.data_ptr == tensor.data_ptr
    array[0] = 7
    assert np.asarray(copied).tolist() == [0, 1, 2, 3]
    assert np.asarray(shared).tolist() == [7, 1, 2, 3]
    with pytest.raises(BufferError, match="device"):
        tensor.__dlpack__(dl_device=(int(DLDeviceType.kDLCUDA), 0))
    with pytest.raises(BufferError, match="stream"):
        tensor.__dlpack__(stream=1)


class _Capsule:
    def __init__(self, capsule: Any) -> None:
        self.capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self.capsule


@pytest.mark.parametrize(
    "strings",
    [
        [["hello world!"]],
        [["ä", "b"], ["", "d\0"]],
        [[[b"\xff\x00"]]],
        np.array([["a", "bc"]]),
        np.array([[b"a", b"bc"]]),
        np.array([["a", b"b\0"]], dtype=object),
        "one",
        b"one",
    ],
    ids=["list", "lists of lists", "bytes", "U", "S", "object", "text", "bytes without list"],
)
def test_strings_of_any_form_come_back(strings: Any) -> None:
    expected = [
        element.encode() if isinstance(element, str) else element
        for element in np.array(strings, dtype=object).ravel().tolist()
    ]

    for tensor in (Tensor.from_string_array(strings), Tensor.from_bytes_array(strings)):
        assert tensor.data_type is DataType.BYTES
        assert tensor.shape == np.shape(np.array(strings, dtype=object))
        assert tensor.to_bytes_array().shape == tensor.shape
        assert tensor.to_bytes_array().ravel().tolist() == expected
        assert np.asarray(tensor).ravel().tolist() == expected


def test_text_comes_back_as_text() -> None:
    tensor = Tensor.from_string_array([["hello", "ä\0"]])

    assert tensor.to_string_array().tolist() == [["hello", "ä\0"]]
    assert type(tensor.to_string_array()[0][0]) is str
    assert tensor.size == 4 + 5 + 4 + 3


def test_bfloat16_has_a_capsule_of_its_own_type() -> None:
    bits = np.array([[0x3F80, 0x4000, 0xC0A0]], np.uint16)  # 1, 2, -5
    tensor = Tensor(DataType.BF16, (1, 3), MemoryBuffer.from_dlpack(bits))

    again = Tensor.from_dlpack(_Capsule(tensor.__dlpack__(max_version=(1, 0))))
    unversioned = Tensor.from_dlpack(_Capsule(tensor.__dlpack__()))

    assert again.data_type is DataType.BF16
    assert unversioned.data_type is DataType.BF16
    assert again.data_ptr == _address(bits)
    assert np.asarray(again).astype(np.float32).tolist() == [[1.0, 2.0, -5.0]]
    # The array that the capsule was made of is what it was.
    assert bits.dtype == np.uint16


def test_bfloat16_arrays_of_ml_dtypes_are_shared() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.array([1.5, -2], ml_dtypes.bfloat16)

    tensor = Tensor.from_dlpack(array)

    assert tensor.data_type is DataType.BF16
    assert tensor.data_ptr == _address(array)
    assert np.asarray(tensor).dtype == array.dtype
    assert np.shares_memory(np.asarray(tensor), array)


def test_torch_shares_memory_both_ways() -> None:
    torch = pytest.importorskip("torch")
    source = torch.arange(6, dtype=torch.float32).reshape(2, 3)

    tensor = Tensor.from_dlpack(source)
    assert tensor.data_ptr == source.data_ptr()
    assert torch.from_dlpack(tensor).data_ptr() == source.data_ptr()

    brain = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    tensor = Tensor.from_dlpack(brain)
    assert tensor.data_type is DataType.BF16
    back = torch.from_dlpack(tensor)
    assert back.dtype is torch.bfloat16
    assert back.data_ptr() == brain.data_ptr()
    assert back.tolist() == [1.5, -2.0]

    assert np.asarray(Tensor.from_dlpack(source.T)).tolist() == source.T.tolist()
    assert Tensor.from_dlpack(torch.tensor([True, False])).data_type is DataType.BOOL
    with pytest.raises(InvalidArgumentError, match=r"(?i)grad"):
        Tensor.from_dlpack(torch.ones(2, requires_grad=True))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: Tensor.from_dlpack(3), InvalidArgumentError, "__dlpack__"),
        (lambda: Tensor.from_dlpack(np.ones(2, np.complex64)), UnsupportedError, "complex64"),
        (lambda: Tensor.from_dlpack(np.zeros(2, "datetime64[s]")), UnsupportedError, "datetime64"),
        (lambda: Tensor.from_dlpack(Foreign(np.ones(2, np.complex64))), UnsupportedError, "type code 5"),
        (lambda: Tensor.from_dlpack(_Capsule("no capsule")), InvalidArgumentError, "capsule"),
        (lambda: Tensor.from_dlpack(np.array([1, None], object)), InvalidArgumentError, "int"),
        (lambda: Tensor.from_dlpack(np.ma.array([1, 2], mask=[False, True])), InvalidArgumentError, "1 masked"),
        (lambda: Tensor.from_string_array(np.ma.array([b"a"], mask=[True])), InvalidArgumentError, "1 masked"),
        (lambda: Tensor.from_dlpack(_OnADevice()), InvalidArgumentError, "_OnADevice.*RuntimeError: on a device"),
        (lambda: Tensor.from_string_array([["a"], ["b", "c"]]), InvalidArgumentError, "shape"),
        (lambda: Tensor.from_string_array([1, 2]), InvalidArgumentError, "int"),
        (lambda: Tensor.from_bytes_array(np.ones(3)), InvalidArgumentError, "float64"),
        (lambda: Tensor("FP32", (1,), _buffer()), InvalidArgumentError, "DataType"),  # type: ignore[arg-type]
        (lambda: Tensor(DataType.INVALID, (1,), _buffer()), InvalidArgumentError, "DataType"),
        (lambda: Tensor(DataType.FP32, (2,), _buffer()), InvalidArgumentError, "8 bytes"),
        (lambda: Tensor(DataType.FP32, (-1,), _buffer()), InvalidArgumentError, r"\(-1,\)"),
        (lambda: Tensor(DataType.FP32, 1, _buffer()), InvalidArgumentError, "shape"),  # type: ignore[arg-type]
        (lambda: Tensor(DataType.FP32, (1,), np.ones(1)), InvalidArgumentError, "MemoryBuffer"),  # type: ignore[arg-type]
        (lambda: Tensor.from_string_array(["a"]).__dlpack__(), UnsupportedError, "BYTES"),
        (lambda: Tensor.from_dlpack(np.ones(1)).to_bytes_array(), InvalidArgumentError, "FP64"),
        (lambda: Tensor.from_bytes_array([b"\xff"]).to_string_array(), InvalidArgumentError, "UTF-8"),
        (lambda: Tensor(DataType.BYTES, (2,), _buffer()).to_bytes_array(), InvalidArgumentError, "string 0 of 2"),
        (lambda: Tensor.from_dlpack(np.ones(1)).to_device("tpu"), InvalidArgumentError, "tpu"),
        (lambda: Tensor.from_dlpack(np.ones(1)).to_device((1, -1)), InvalidArgumentError, "-1"),
    ],
)
def test_what_is_no_tensor_is_refused_where_it_is_made(
    call: Callable[[], Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        call()


class _OnADevice:
    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise RuntimeError("on a device")


def _buffer() -> MemoryBuffer:
    return MemoryBuffer.from_dlpack(np.ones(1, np.float32))


@pytest.mark.parametrize("device", ["gpu", "gpu:0", MemoryType.GPU, (MemoryType.GPU, 0), (DLDeviceType.kDLCUDA, 0)])
def test_a_gpu_needs_cupy(device: Any) -> None:
    try:
        import cupy  # type: ignore[import-not-found] # noqa: F401
    except ImportError:
        pass
    else:
        pytest.skip("cupy is installed")
    with pytest.raises(UnsupportedError, match="cupy"):
        Tensor.from_dlpack(np.ones(1)).to_device(device)


class _Column:
    """Strings of another library: DLPack knows none, numpy can read them."""

    def __init__(self, elements: Any) -> None:
        self.elements = elements

    def __dlpack__(self, **_: Any) -> Any:
        raise TypeError("DLPack has no strings")

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.asarray(self.elements, dtype)


def test_strings_of_another_library() -> None:
    tensor = Tensor.from_dlpack(_Column(np.array([["a", "ü"]], object)))
    assert (tensor.data_type, tensor.shape) == (DataType.BYTES, (1, 2))
    assert np.asarray(tensor).tolist() == [[b"a", "ü".encode()]]
    # Numbers go by DLPack, or not at all.
    with pytest.raises(InvalidArgumentError, match="DLPack has no strings"):
        Tensor.from_dlpack(_Column(np.zeros(2)))
