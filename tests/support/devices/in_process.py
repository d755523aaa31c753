"""Run with the fake CUDA runtime and a repository: tensors of a GPU in a server of this process.

The runtime is loaded under the name of the server's own, and keeps its symbols to itself, as that does in Python.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

import numpy as np

from pytriton import inprocess
from pytriton.inprocess.capi.enums import MemoryType
from pytriton.model_config import ModelConfig, Tensor
from pytriton.proxy_backend.dlpack import DLManagedTensor, address_in, to_capsule

CUDA = 2
DEFAULT_STREAM = 1


class Producer:
    """A tensor of a GPU whose elements are still on their way there, on the default stream."""

    def __init__(self, fake: ctypes.CDLL, device: int, values: np.ndarray[Any, Any]) -> None:
        self.device = device
        self.values = values
        self.asked: list[dict[str, Any]] = []
        self.fake = fake
        self.address = ctypes.c_void_p()
        before = ctypes.c_int()
        assert fake.cudaGetDevice(ctypes.byref(before)) == 0
        assert fake.cudaSetDevice(device) == 0
        assert fake.cudaMalloc(ctypes.byref(self.address), ctypes.c_size_t(values.nbytes)) == 0
        assert fake.cudaSetDevice(before) == 0

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self.device

    def __dlpack__(self, **options: Any) -> Any:
        self.asked.append(options)
        source = ctypes.c_void_p(self.values.ctypes.data)
        assert self.fake.cudaMemcpyAsync(self.address, source, ctypes.c_size_t(self.values.nbytes), 1, None) == 0
        capsule = to_capsule(np.zeros(self.values.shape, self.values.dtype), self)
        described = DLManagedTensor.from_address(address_in(id(capsule))).tensor
        described.data, described.device_type, described.device_id = self.address.value, CUDA, self.device
        return capsule

    def read(self) -> np.ndarray[Any, Any]:
        found = np.zeros_like(self.values)
        self.fake.fake_cuda_read(self.address, ctypes.c_void_p(found.ctypes.data), ctypes.c_size_t(found.nbytes))
        return found


def import_tensors(fake: ctypes.CDLL) -> None:
    for device in (0, 1):
        made = Producer(fake, device, np.arange(6, dtype=np.float32) + device)
        tensor = inprocess.Tensor.from_dlpack(made)
        assert [asked["stream"] for asked in made.asked] == [DEFAULT_STREAM], made.asked
        assert (tensor.memory_type, tensor.memory_type_id) == (MemoryType.GPU, device)
        assert made.read().tolist() == made.values.tolist()
        now = ctypes.c_int(7)
        assert fake.cudaGetDevice(ctypes.byref(now)) == 0
        assert now.value == 0
    made = Producer(fake, 0, np.arange(6, dtype=np.float32))
    with open(os.environ["FAKE_CUDA_FAIL"], "w") as file:
        file.write("cudaStreamSynchronize 700")
    try:
        inprocess.Tensor.from_dlpack(made)
    except inprocess.UnsupportedError as error:
        print(error)
    os.unlink(os.environ["FAKE_CUDA_FAIL"])


def double(requests: Any) -> Any:
    return [{"z": 2 * request["y"]} for request in requests]


def serve(repository: str) -> None:
    with inprocess.Server(
        model_repository=repository, model_control_mode=inprocess.ModelControlMode.EXPLICIT, startup_models=["numbers"]
    ) as server:
        tensors = [Tensor((-1,), np.float32, "y")], [Tensor((-1,), np.float32, "z")]
        server.bind("double", double, *tensors, config=ModelConfig(max_batch_size=8))
        server.load("both")
        for columns in (0, 1, 1000, 100_000):
            x = np.random.default_rng(1).random((2, columns), np.float32)
            [answer] = server.model("both").infer(inputs={"x": x})
            assert np.array_equal(np.from_dlpack(answer.outputs["z"]), 2 * x)
    print("served")


if __name__ == "__main__":
    library = ctypes.CDLL(sys.argv[1], mode=os.RTLD_LOCAL | os.RTLD_NOW)
    import_tensors(library)
    serve(sys.argv[2])
