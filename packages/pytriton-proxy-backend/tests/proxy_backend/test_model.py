"""What worker and proxy backend are told of a model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton.proxy_backend import EndpointError, ModelSpec, ProxySettings, TensorSpec, endpoint_path
from pytriton.proxy_backend.settings import cost_settings

FLOATS = np.dtype(np.float32)
ENDPOINT = Path("/run/pytriton/model.1.sock")


def test_side_file() -> None:
    text = ProxySettings(
        endpoint=ENDPOINT,
        batching=True,
        decoupled=False,
        attach_timeout_s=2.5,
        arena_budget_bytes=1 << 30,
        arena_idle_s=0.25,
    ).to_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert lines == [
        "format = 1",
        "endpoint = /run/pytriton/model.1.sock",
        "attach_timeout_ms = 2500",
        "arena_budget_bytes = 1073741824",
        "arena_idle_ms = 250",
        "execution_timeout_ms = 0",
        "repeatable = false",
        "batching = true",
        "decoupled = false",
    ]
    assert (
        "execution_timeout_ms = 1500\nrepeatable = true\n"
        in ProxySettings(endpoint=ENDPOINT, batching=True, execution_timeout_s=1.5, repeatable=True).to_text()
    )
    assert "max_waiting = 7\n" in ProxySettings(endpoint=ENDPOINT, batching=True, max_waiting=7).to_text()
    assert text.endswith("\n")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attach_timeout_s", -1.0),
        ("attach_timeout_s", float("nan")),
        ("attach_timeout_s", float("inf")),
        ("arena_idle_s", -0.1),
        ("max_waiting", -1),
        ("arena_budget_bytes", 0),
        ("arena_budget_bytes", -5),
        ("execution_timeout_s", 0),
        ("execution_timeout_s", float("inf")),
        ("execution_timeout_s", float("nan")),
    ],
)
def test_settings_name_the_field_that_is_wrong(field: str, value: float) -> None:
    fields: dict[str, Any] = {"endpoint": ENDPOINT, "batching": True, field: value}
    with pytest.raises(ValueError, match=field):
        ProxySettings(**fields)


def test_endpoint_of_a_model_version() -> None:
    assert endpoint_path(Path("/run/p"), "digits", 3) == Path("/run/p/digits.3.sock")


@pytest.mark.parametrize(("letter", "count"), [("x", 108), ("ü", 54)])
def test_a_path_that_no_socket_can_have(letter: str, count: int) -> None:
    folder = Path("/" + letter * count)
    with pytest.raises(EndpointError, match="Linux allows 107") as caught:
        endpoint_path(folder, "m", 1)
    assert caught.value.length == len(str(folder).encode()) + len("/m.1.sock")
    assert caught.value.limit == 107
    with pytest.raises(EndpointError):
        ProxySettings(endpoint=folder / "m.sock", batching=True)


def test_the_longest_path() -> None:
    folder = Path("/" + "x" * (107 - len("//m.1.sock")))
    assert len(str(endpoint_path(folder, "m", 1))) == 107
    with pytest.raises(EndpointError):
        endpoint_path(folder, "mm", 1)


@pytest.mark.parametrize("path", ["relative.sock", "/a\nb", "/a\rb", "/trailing "])
def test_a_path_that_the_side_file_cannot_hold(path: str) -> None:
    with pytest.raises(EndpointError, match="absolute and without line breaks"):
        ProxySettings(endpoint=Path(path), batching=True)


def test_digests_are_those_of_the_tensors_and_of_nothing_else() -> None:
    x = TensorSpec(name="x", dtype=np.dtype("float32"), shape=(-1,))
    y = TensorSpec(name="y", dtype=np.dtype("object"), shape=(2, 3))
    model = ModelSpec(name="m", version=1, inputs=(x,), outputs=(y,), batching=True, max_batch_size=8)
    same = replace(model, name="other", version=2, max_batch_size=4, strict=True)
    assert same.tensors_digest == model.tensors_digest
    assert f"tensors_digest = {model.tensors_digest}\n" in (
        ProxySettings(endpoint=ENDPOINT, batching=True, tensors_digest=model.tensors_digest).to_text()
    )
    others = [
        replace(model, inputs=(y,)),
        replace(model, inputs=(x, x)),
        replace(model, inputs=(replace(x, dtype=np.dtype("float64")),)),
        replace(model, inputs=(replace(x, optional=True),)),
        replace(model, inputs=(y,), outputs=(x,)),
        replace(model, outputs=(replace(y, shape=(3, 2)),)),
    ]
    assert len({model.tensors_digest, *(other.tensors_digest for other in others)}) == 7


def test_inputs_that_are_as_long_as_each_other_have_a_bit_each() -> None:
    inputs = tuple(TensorSpec(name=f"x{number}", shape=(-1,), dtype=FLOATS) for number in range(70))
    cost = {"limit": 9, "overhead": None, "layout": "padded", "oversize": "refuse"}

    def alike(names: Any) -> int:
        model = ModelSpec(name="m", version=1, inputs=inputs, outputs=(), batching=True, max_batch_size=4)
        return int(cost_settings(replace(model, cost={**cost, "inputs": names}))["cost_alike"])

    assert alike(["x0", "x2"]) == 0b101
    # One may be anywhere.
    assert alike("x69") == alike(["x69"]) == 0
