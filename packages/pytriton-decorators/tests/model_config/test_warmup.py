from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton.exceptions import PyTritonBadParameterError
from pytriton.model_config import ModelConfig
from pytriton.model_config.common import ModelWarmup, WarmupInput, generate_warmup_data, generate_warmup_requests
from pytriton.model_config.triton_model_config import TensorSpec

DTYPES = [
    np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64,
    np.float16, np.float32, np.float64,
]  # fmt: skip


def saved(path: Path, array: Any) -> str:
    np.save(path / "data.npy", array)
    return str(path / "data.npy")


def one(**fields: Any) -> ModelWarmup:
    values: dict[str, Any] = {"name": "w", "batch_size": 2, "inputs": {"x": zeros()}, "count": 1}
    return ModelWarmup(**{**values, **fields})


def zeros(dtype: Any = np.float32, shape: tuple[int, ...] = (3,)) -> WarmupInput:
    return WarmupInput(dtype, shape, zero_data=True)


# ---- data ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_and_random_numbers(dtype: Any) -> None:
    data = generate_warmup_data(zeros(dtype, (2, 3)), 4)
    assert data.dtype == np.dtype(dtype)
    assert data.shape == (4, 2, 3)
    assert not data.any()
    assert data.flags.writeable

    random = generate_warmup_data(WarmupInput(dtype, (50,), random_data=True), 2)
    assert random.dtype == np.dtype(dtype)
    assert random.shape == (2, 50)
    assert len(np.unique(random)) > 1
    assert random.min() >= 0
    assert random.max() <= 100


def test_strings() -> None:
    for dtype in (bytes, str, object, np.bytes_):
        data = generate_warmup_data(zeros(dtype, (2,)), 1)
        assert data.dtype == object
        assert data.tolist() == [[b"", b""]]
    words = generate_warmup_data(WarmupInput(bytes, (3,), random_data=True), 4).ravel().tolist()
    assert all(isinstance(word, bytes) and word.isalpha() and word.isascii() for word in words)
    assert len(set(words)) > 1


def test_bfloat16(tmp_path: Path) -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    assert generate_warmup_data(WarmupInput(bfloat16, (3,), random_data=True), 2).dtype == bfloat16
    values = np.array([1, 2, 3], dtype=bfloat16)
    read = generate_warmup_data(WarmupInput("bfloat16", (3,), input_data_file=saved(tmp_path, values)), 2)
    assert read.dtype == bfloat16
    assert (read == values).all()


def test_without_a_batch_axis() -> None:
    assert generate_warmup_data(zeros(shape=(2, 3)), None).shape == (2, 3)
    (request,) = generate_warmup_requests(one(batch_size=4), batching=False)
    assert request["x"].shape == (3,)


def test_random_data_is_the_same_every_time_but_differs_between_requests() -> None:
    warmup = one(inputs={"x": WarmupInput(np.float32, (8,), random_data=True)}, count=2)
    first, second = generate_warmup_requests(warmup)
    assert not (first["x"] == second["x"]).all()
    again = generate_warmup_requests(warmup, None, None)
    assert (again[0]["x"] == first["x"]).all()


def test_requests() -> None:
    warmup = one(inputs={"x": zeros(), "y": zeros(bytes, (1,))}, count=3, batch_size=5)
    requests = generate_warmup_requests(warmup, [], [])
    assert len(requests) == 3
    assert [sorted(request) for request in requests] == [["x", "y"]] * 3
    assert requests[0]["x"].shape == (5, 3)
    assert requests[0]["x"] is not requests[1]["x"]
    assert generate_warmup_requests(one(count=0)) == []


def test_the_first_source_wins(tmp_path: Path) -> None:
    file = saved(tmp_path, np.full((2, 3), 7, np.float32))
    both = WarmupInput(np.float32, (3,), zero_data=True, random_data=True, input_data_file=file)
    assert not generate_warmup_data(both, 2).any()
    assert generate_warmup_data(WarmupInput(np.float32, (3,), random_data=True, input_data_file=file), 2).max() < 1


# ---- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ([[1, 2], [3, 4], [5, 6]], [[1, 2], [3, 4], [5, 6]]),
        ([1, 2], [[1, 2], [1, 2], [1, 2]]),
        ([[1, 2]], [[1, 2], [1, 2], [1, 2]]),
        ([[1, 2], [3, 4]], [[1, 2], [3, 4], [1, 2]]),
        ([[1, 2], [3, 4], [5, 6], [7, 8]], [[1, 2], [3, 4], [5, 6]]),
    ],
    ids=["whole", "one row", "batch of one row", "tiled", "truncated"],
)
def test_a_file_is_fitted_to_the_batch(tmp_path: Path, held: list[Any], expected: list[Any]) -> None:
    file = saved(tmp_path, np.array(held, np.float32))
    data = generate_warmup_data(WarmupInput(np.float32, (2,), input_data_file=file), 3)
    assert data.tolist() == expected
    assert data.dtype == np.float32
    assert data.flags.writeable
    assert data.flags.c_contiguous


def test_a_file_of_numbers_is_cast(tmp_path: Path) -> None:
    path: Any = Path(saved(tmp_path, np.asfortranarray(np.arange(6.0).reshape(2, 3))))
    data = generate_warmup_data(WarmupInput(np.float32, (3,), input_data_file=path), 2)
    assert data.dtype == np.float32
    assert data.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert generate_warmup_data(WarmupInput(np.float32, (2, 3), input_data_file=path), None).shape == (2, 3)


@pytest.mark.parametrize("held", [np.array(["a", "ż"]), np.array([b"a", "ż".encode()])])
def test_a_file_of_strings(tmp_path: Path, held: Any) -> None:
    data = generate_warmup_data(WarmupInput(str, (2,), input_data_file=saved(tmp_path, held)), 1)
    assert data.dtype == object
    assert data.tolist() == [[b"a", "ż".encode()]]


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (np.zeros((2, 4), np.float32), r"shape \(3\) for one row, or \(rows, 3\).*has shape \(2, 4\)"),
        (np.zeros((0, 3), np.float32), r"has shape \(0, 3\)"),
        (np.zeros((1, 1, 3), np.float32), r"has shape \(1, 1, 3\)"),
        (np.float32(1), r"has shape \(\)"),
        (np.zeros((3,), np.complex64), r"float32 or what can be cast to it\. Its array has dtype complex64"),
        (np.array(["a", "b", "c"]), r"dtype <U1"),
    ],
)
def test_a_file_that_does_not_fit(tmp_path: Path, held: Any, message: str) -> None:
    file = saved(tmp_path, held)
    with pytest.raises(PyTritonBadParameterError, match=message) as caught:
        generate_warmup_data(WarmupInput(np.float32, (3,), input_data_file=file), 2)
    assert caught.value.value == file
    assert file in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    def refused(name: str) -> str:
        with pytest.raises(PyTritonBadParameterError, match=r"input_data_file=.*\.npy file") as caught:
            generate_warmup_data(WarmupInput(np.float32, (3,), input_data_file=str(tmp_path / name)), 2)
        return str(caught.value)

    assert "No such file" in refused("missing.npy")
    (tmp_path / "text.npy").write_text("not an array")
    refused("text.npy")
    (tmp_path / "empty.npy").touch()
    refused("empty.npy")
    np.savez(tmp_path / "several.npz", a=np.zeros(3))
    assert "archive" in refused("several.npz")
    np.save(tmp_path / "objects.npy", np.array([b"a"], dtype=object), allow_pickle=True)
    refused("objects.npy")
    with pytest.raises(PyTritonBadParameterError, match="file of strings"):
        generate_warmup_data(WarmupInput(bytes, (3,), input_data_file=saved(tmp_path, np.zeros(3))), 1)


# ---- rules ---------------------------------------------------------------------------------------------------------


def test_data_needs_a_source() -> None:
    with pytest.raises(PyTritonBadParameterError, match=r"zero_data=True, random_data=True or input_data_file"):
        generate_warmup_data(WarmupInput(np.float32, (3,)), 2)
    with pytest.raises(PyTritonBadParameterError, match=r"inputs\['x'\] says nothing about its data"):
        generate_warmup_requests(one(inputs={"x": WarmupInput(np.float32, (3,))}))
    with pytest.raises(PyTritonBadParameterError, match=r"batch_size=0"):
        generate_warmup_data(zeros(), 0)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"shape": 3}, "shape"),
        ({"shape": None}, "shape"),
        ({"shape": (-1,)}, "shape"),
        ({"shape": (1.5,)}, "shape"),
        ({"dtype": np.complex64}, "dtype"),
        ({"zero_data": "yes"}, "zero_data"),
        ({"random_data": 2}, "random_data"),
        ({"input_data_file": 3}, "input_data_file"),
    ],
)
def test_wrong_inputs(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(PyTritonBadParameterError, match=rf"WarmupInput\.{field}=") as caught:
        WarmupInput(**{"dtype": np.float32, "shape": (3,), **fields})
    assert caught.value.parameter == f"WarmupInput.{field}"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"name": 3}, "name"),
        ({"batch_size": -1}, "batch_size"),
        ({"batch_size": 1.0}, "batch_size"),
        ({"count": "2"}, "count"),
        ({"inputs": [zeros()]}, "inputs"),
        ({"inputs": {"x": np.zeros(3)}}, r"inputs\['x'\]"),
    ],
)
def test_wrong_warmups(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(PyTritonBadParameterError, match=rf"ModelWarmup\.{field}="):
        one(**fields)


SPECS = [
    TensorSpec("x", (-1, 3), np.float32),
    TensorSpec("text", (1,), object),
    TensorSpec("extra", (1,), np.int8, optional=True),
]
TEXT = zeros(bytes, (1,))


@pytest.mark.parametrize(
    ("warmup", "message"),
    [
        (one(batch_size=0), r"model_warmup\[0\]\.batch_size=0 .* from 1 to 4.*max_batch_size"),
        (one(batch_size=5), r"batch_size=5 .* from 1 to 4"),
        (one(inputs={"x": zeros(shape=(2, 3)), "text": TEXT, "z": zeros()}), r"inputs of the model; .*'x', 'text'"),
        (one(inputs={"x": zeros(shape=(2, 4)), "text": TEXT}), r"inputs\['x'\]\.shape=\(2, 4\) .*\(-1, 3\)"),
        (one(inputs={"x": zeros(shape=(3,)), "text": TEXT}), r"shape=\(3,\) .* batch axis is not part"),
        (one(inputs={"x": zeros(np.float64, (2, 3)), "text": TEXT}), r"inputs\['x'\]\.dtype=.*float64.*float32"),
        (one(inputs={"x": WarmupInput(np.float32, (2, 3)), "text": TEXT}), r"inputs\['x'\] says nothing"),
    ],
)
def test_a_warmup_is_held_against_its_model(warmup: ModelWarmup, message: str) -> None:
    with pytest.raises(PyTritonBadParameterError, match=message):
        ModelConfig(model_warmup=[warmup]).validate(SPECS)


def test_warmups_that_fit_their_model() -> None:
    fits = one(inputs={"x": zeros(shape=(7, 3)), "text": TEXT})
    ModelConfig(model_warmup=[fits, one(inputs={**fits.inputs, "extra": zeros(np.int8, (1,))})]).validate(SPECS)
    # The callable gets what there is.
    ModelConfig(model_warmup=[one(inputs={"text": TEXT}), one(inputs={})]).validate(SPECS)
    # Without a batch axis the number of rows says nothing.
    for rows in (0, 1, 9):
        ModelConfig(batching=False, model_warmup=[one(inputs=fits.inputs, batch_size=rows)]).validate(SPECS)


@pytest.mark.parametrize("warmups", [one(), "warm", [None], {"w": one()}])
def test_something_else_than_a_list_of_warmups(warmups: Any) -> None:
    with pytest.raises(PyTritonBadParameterError, match=r"ModelConfig\.model_warmup"):
        ModelConfig(model_warmup=warmups).validate()
