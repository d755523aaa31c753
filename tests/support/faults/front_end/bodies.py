"""Bodies of KServe v2 requests for the models of the fuzz test: good ones, and what goes wrong with them."""

from __future__ import annotations

import random
import struct
from typing import Any

from support.faults.front_end.values import (
    DTYPES,
    INTEGERS,
    Pairs,
    Raw,
    anything,
    deep,
    dumps,
    number,
    shape,
    text,
    wide,
)

# The models that the server under test has, with their inputs.
MODELS: dict[str, dict[str, str]] = {
    "batched": {"x": "FP32"},
    "plain": {"x": "FP32", "n": "INT64"},
    "words": {"x": "BYTES"},
    "stream": {"x": "INT32"},
    "sequence": {"x": "FP32"},
}
SIZES = {"FP32": 4, "INT64": 8, "INT32": 4}


def model(rng: random.Random) -> str:
    return rng.choice([*MODELS, "nobody"]) if rng.random() < 0.1 else rng.choice(list(MODELS))


def good(rng: random.Random, name: str) -> dict[str, Any]:
    """Return a request that the model answers."""
    inputs = []
    for tensor, datatype in MODELS.get(name, {"x": "FP32"}).items():
        count = rng.randrange(1, 5)
        data: list[Any] = ["w" * rng.randrange(20) for _ in range(count)] if datatype == "BYTES" else list(range(count))
        inputs.append({"name": tensor, "shape": [1, count], "datatype": datatype, "data": data})
    body: dict[str, Any] = {"inputs": inputs}
    if rng.random() < 0.3:
        body["outputs"] = [{"name": "y"}]
    if name == "sequence":
        body["parameters"] = {"sequence_id": rng.randrange(1, 50), "sequence_start": True, "sequence_end": True}
    return body


def binary(rng: random.Random, body: dict[str, Any]) -> bytes:
    """Take the data of some inputs out of the JSON, as binary data behind it; the sizes are said as they are."""
    behind = b""
    for tensor in body["inputs"]:
        if not isinstance(tensor, dict) or "data" not in tensor or rng.random() < 0.2:
            continue
        data = tensor.pop("data")
        count = len(data) if isinstance(data, list) else 1
        if tensor.get("datatype") == "BYTES":
            content = b"".join(struct.pack("<I", len(str(word))) + str(word).encode() for word in data)
            if rng.random() < 0.3:
                content = content[:-1] + struct.pack("<I", rng.choice([0, 1, 2**31, 2**32 - 1])) * rng.randrange(3)
        else:
            content = bytes(SIZES.get(str(tensor.get("datatype")), 4) * count)
        tensor["parameters"] = {"binary_data_size": len(content)}
        behind += content
    return behind


PARAMETERS = [
    "sequence_id",
    "sequence_start",
    "sequence_end",
    "priority",
    "timeout",
    "binary_data_output",
    "binary_data",
    "headers",
    "max_tokens",
    "triton_enable_empty_final_response",
    "triton_final_response",
    "classification",
    "shared_memory_region",
    "triton_x",
    "shared_memory_byte_size",
    "shared_memory_offset",
    "binary_data_size",
]


def parameters(rng: random.Random) -> Any:
    roll = rng.random()
    if roll < 0.05:
        return anything(rng)
    if roll < 0.07:
        return {f"p{index}": index for index in range(rng.choice([1000, 10_000, 100_000]))}
    return {
        rng.choice(PARAMETERS): anything(rng) if rng.random() < 0.5 else rng.choice(INTEGERS)
        for _ in range(rng.randrange(1, 4))
    }


def mutate(rng: random.Random, body: dict[str, Any]) -> Any:  # noqa: C901
    """Return one thing of a request, made otherwise."""
    tensors = body.get("inputs")
    tensor = rng.choice(tensors) if isinstance(tensors, list) and tensors else {}
    if not isinstance(tensor, dict):
        tensor = {}
    outputs = body.get("outputs")
    output = outputs[0] if isinstance(outputs, list) and outputs and isinstance(outputs[0], dict) else {}
    roll = rng.randrange(22)
    if roll < 4:
        tensor["shape"] = shape(rng)
    elif roll == 4:
        tensor["datatype"] = rng.choice(DTYPES) if rng.random() < 0.7 else anything(rng)
    elif roll == 5:
        tensor["data"] = anything(rng)
    elif roll == 6:
        tensor["data"] = [anything(rng) for _ in range(rng.randrange(5))]
    elif roll == 7:
        tensor["data"] = [number(rng) for _ in range(rng.randrange(5))]
    elif roll == 8:
        tensor["data"] = rng.choice([deep, wide])(rng)
    elif roll == 9:
        tensor["name"] = anything(rng)
    elif roll == 10:
        tensor["parameters"] = parameters(rng)
    elif roll == 11:
        body["parameters"] = parameters(rng)
    elif roll == 12:
        body["outputs"] = anything(rng)
    elif roll == 13:
        output["parameters"] = parameters(rng)
        output.setdefault("name", "y")
        body["outputs"] = [output]
    elif roll == 14:
        body["inputs"] = anything(rng)
    elif roll == 15:
        body["inputs"] = [tensor] * _times(rng, tensor)
    elif roll == 16:
        body["inputs"] = [{**tensor, "name": f"x{index}"} for index in range(_times(rng, tensor))]
    elif roll == 17:
        body["id"] = anything(rng)
    elif roll == 18:
        body.pop(rng.choice(["inputs", "outputs", "parameters"]), None)
    elif roll == 19:
        body["outputs"] = [{"name": "y"}] * rng.choice([2, 100, 10_000])
    elif roll == 20:
        key = rng.choice(["inputs", "outputs", "parameters", "id"])
        return Pairs([*body.items(), (key, anything(rng)), (str(text(rng)), 1)])
    elif tensor:
        tensor.pop(rng.choice(list(tensor)))
    return body


def _times(rng: random.Random, tensor: Any) -> int:
    """Return how often a tensor is said again: often only where it is small."""
    return rng.choice([2, 3, 100, 10_000] if len(dumps(tensor)) < 500 else [2, 3])


def scramble(rng: random.Random, content: bytes) -> bytes:
    """Return the bytes with some of them lost, turned, doubled or strange."""
    changed = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        if not changed:
            break
        at = rng.randrange(len(changed))
        roll = rng.randrange(6)
        if roll == 0:
            changed[at] = rng.randrange(256)
        elif roll == 1:
            del changed[at : at + rng.randrange(1, 9)]
        elif roll == 2:
            changed[at:at] = rng.choice(
                [b"[", b"{", b'"', b"]", b"}", b",", b":", b"\\", b"-", b"9" * 30, b"\0", b"\xff\xff"]
            )
        elif roll == 3:
            changed[at:at] = changed[at : at + rng.randrange(1, 60)]
        elif roll == 4:
            changed[at] ^= 1 << rng.randrange(8)
        else:
            del changed[at:]
    return bytes(changed)


def infer(rng: random.Random, name: str) -> tuple[bytes, int | None]:
    """Return the body of a hostile `infer`, and the length of its JSON where binary data come behind it."""
    body: Any = good(rng, name)
    with_binary = rng.random() < 0.4
    behind = binary(rng, body) if with_binary else b""
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        if isinstance(body, dict):
            body = mutate(rng, body)
    if with_binary and rng.random() < 0.4 and isinstance(body, dict):
        _lie(rng, body)
    if rng.random() < 0.02:
        body = anything(rng)
    content = dumps(body)
    if rng.random() < 0.1:
        content = scramble(rng, content)
    return content + behind, len(content) if with_binary else None


def _lie(rng: random.Random, body: dict[str, Any]) -> None:
    for tensor in body["inputs"] if isinstance(body.get("inputs"), list) else []:
        if isinstance(tensor, dict):
            tensor["parameters"] = {"binary_data_size": number(rng) if rng.random() < 0.8 else anything(rng)}


def generate(rng: random.Random, name: str) -> bytes:
    """Return the body of a hostile `generate`: one member for each input, and parameters."""
    body: dict[str, Any] = {
        tensor: [1] if kind != "BYTES" else "word" for tensor, kind in MODELS.get(name, {"x": ""}).items()
    }
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        roll = rng.randrange(8)
        if roll < 3:
            body[rng.choice(list(body) or ["x"])] = anything(rng)
        elif roll == 3:
            body["x"] = rng.choice([deep, wide])(rng)
        elif roll == 4:
            body[rng.choice(PARAMETERS)] = anything(rng)
        elif roll == 5:
            body.update(
                {f"p{index}": rng.choice([index, "p", None, [index]]) for index in range(rng.choice([5, 100, 100_000]))}
            )
        elif roll == 6:
            body["id"] = anything(rng)
        else:
            body.pop(rng.choice(list(body) or ["x"]), None)
    content = dumps(body if rng.random() < 0.95 else anything(rng))
    return scramble(rng, content) if rng.random() < 0.15 else content


def settings(rng: random.Random) -> bytes:
    """Return a body for what changes the server; nothing in it names a file."""
    keys = [
        "key",
        "offset",
        "byte_size",
        "raw_handle",
        "device_id",
        "parameters",
        "unload_dependents",
        "ready",
        "config",
        "trace_level",
        "trace_rate",
        "trace_count",
        "log_frequency",
        "trace_mode",
        "log_info",
        "log_warning",
        "log_error",
        "log_verbose_level",
        "log_format",
    ]
    body = {rng.choice(keys): anything(rng) for _ in range(rng.randrange(4))}
    if rng.random() < 0.2:
        body = {"key": f"/fuzz{rng.randrange(9)}", "offset": number(rng), "byte_size": number(rng)}
    if rng.random() < 0.1:
        body = {"raw_handle": {"b64": text(rng)}, "device_id": number(rng), "byte_size": number(rng)}
    if rng.random() < 0.1:
        body = {"parameters": {"config": rng.choice([text(rng), "{}", Raw('"' + "[" * 5000 + '"'), number(rng)])}}
    # Verbose logs of a hundred thousand requests would be all that this machine does.
    body.pop("log_verbose_level", None)
    content = dumps(body if rng.random() < 0.9 else anything(rng))
    return scramble(rng, content) if rng.random() < 0.2 else content
