"""The configuration of a model as Triton has it: what `config.pbtxt` says, and the defaults of what it leaves out."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytriton.exceptions import PyTritonModelConfigError
from pytriton.model_config.parser import parse_prototxt

# In Triton's order; a field that is None here exists only if the configuration has it.
_MODEL: dict[str, Any] = {
    "name": "",
    "platform": "",
    "backend": "",
    "runtime": "",
    "version_policy": {"latest": {"num_versions": 1}},
    "max_batch_size": 0,
    "input": [],
    "output": [],
    "batch_input": [],
    "batch_output": [],
    "optimization": {
        "priority": "PRIORITY_DEFAULT",
        "input_pinned_memory": {"enable": True},
        "output_pinned_memory": {"enable": True},
        "gather_kernel_buffer_threshold": 0,
        "eager_batching": False,
    },
    "dynamic_batching": None,
    "sequence_batching": None,
    "instance_group": [],
    "default_model_filename": "model.py",
    "cc_model_filenames": {},
    "metric_tags": {},
    "parameters": {},
    "model_warmup": [],
    "model_transaction_policy": None,
}
_INPUT: dict[str, Any] = {
    "name": "",
    "data_type": "TYPE_INVALID",
    "format": "FORMAT_NONE",
    "dims": [],
    "is_shape_tensor": False,
    "allow_ragged_batch": False,
    "optional": False,
    "is_non_linear_format_io": False,
}
_OUTPUT: dict[str, Any] = {
    "name": "",
    "data_type": "TYPE_INVALID",
    "dims": [],
    "label_filename": "",
    "is_shape_tensor": False,
    "is_non_linear_format_io": False,
}
_BATCHING: dict[str, Any] = {
    "preferred_batch_size": [],
    "max_queue_delay_microseconds": 0,
    "preserve_ordering": False,
    "priority_levels": 0,
    "default_priority_level": 0,
    "priority_queue_policy": {},
}
_INSTANCES: dict[str, Any] = {
    "name": "",
    "kind": "KIND_CPU",
    "count": 1,
    "gpus": [],
    "secondary_devices": [],
    "profile": [],
    "passive": False,
    "host_policy": "",
}


def read_config(folder: Path, given: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the configuration of a model as it was written."""
    if isinstance(given, Mapping):
        return copy.deepcopy(dict(given))
    if given is not None:
        return parse_prototxt(given)
    file = folder / "config.pbtxt"
    if not file.is_file():
        raise PyTritonModelConfigError(
            f"Expected the configuration of the model in {file}, which is not there. Pass it as "
            "ModelHarness(config=...), which takes its text as well."
        )
    return parse_prototxt(file.read_text(encoding="utf-8"), str(file))


def completed_config(written: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Add the fields that Triton adds to a configuration before a model gets it."""
    config = _with_defaults(written, _MODEL)
    config["name"] = config["name"] or name
    for kind, defaults in (("input", _INPUT), ("output", _OUTPUT)):
        config[kind] = [_with_defaults(tensor, defaults) for tensor in config[kind]]
    if "dynamic_batching" in config:
        config["dynamic_batching"] = _with_defaults(config["dynamic_batching"], _BATCHING)
    groups = config["instance_group"] or [{"name": config["name"]}]
    config["instance_group"] = [
        _with_defaults({**group, "name": group.get("name") or f"{config['name']}_{number}"}, _INSTANCES)
        for number, group in enumerate(groups)
    ]
    for unsupported in ("batch_input", "batch_output", "ensemble_scheduling"):
        if config.get(unsupported) not in (None, []):
            raise PyTritonModelConfigError(
                f"The harness has no {unsupported}, which Triton's core does for a model: try the model on a server."
            )
    if any("reshape" in tensor for tensor in (*config["input"], *config["output"])):
        raise PyTritonModelConfigError("The harness has no reshape of tensors: try the model on a server.")
    return config


def _with_defaults(written: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the written fields in the order of the defaults, and the missing ones with their defaults."""
    found = {
        name: copy.deepcopy(written.get(name, default))
        for name, default in defaults.items()
        if name in written or default is not None
    }
    return {**found, **{name: copy.deepcopy(value) for name, value in written.items() if name not in defaults}}
