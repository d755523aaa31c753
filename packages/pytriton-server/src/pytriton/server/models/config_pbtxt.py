"""A model's configuration as tritonserver gets it: a file in its repository, or JSON in a call."""

import dataclasses
import json

from pytriton.model_config.generator import ModelConfigGenerator
from pytriton.model_config.triton_model_config import TritonModelConfig

__all__ = ["render_config", "render_config_json"]


def render_config(config: TritonModelConfig) -> str:
    """Return the text of `config.pbtxt` for a model.

    All versions found in the model's folder are served. The warm-up is not part of it: that is done by the workers,
    before Triton knows of the model.
    """
    return _generator(config).get_text()


def render_config_json(config: TritonModelConfig) -> str:
    """Return the same as JSON, for the parameter `config` of a call of Triton's model repository extension."""
    return json.dumps(_generator(config).get_config())


def _generator(config: TritonModelConfig) -> ModelConfigGenerator:
    return ModelConfigGenerator(dataclasses.replace(config, model_warmup=None))
