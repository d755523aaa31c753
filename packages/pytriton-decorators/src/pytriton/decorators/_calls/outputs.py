"""Results of inference callables: from what may be returned to arrays by name."""

from collections.abc import Mapping
from typing import Any

from pytriton.decorators._calls.context import get_model_config
from pytriton.exceptions import PyTritonValidationError
from pytriton.model_config.triton_model_config import TritonModelConfig


def convert_output(
    outputs: Any, wrapped: Any = None, instance: Any = None, model_config: TritonModelConfig | None = None
) -> Mapping[str, Any]:
    """Return the result of a callable as a mapping of arrays by output name.

    Args:
        outputs: A mapping, which is returned as it is, or a list or tuple of arrays in the order of the model's
            outputs.
        wrapped: The callable, as a wrapt decorator gets it; needed for a list or tuple without `model_config`.
        instance: The object whose method it is, or None.
        model_config: Names the outputs; None takes the configuration of the model that `wrapped` is bound to.

    Returns:
        Arrays by output name.

    Raises:
        PyTritonValidationError: `outputs` is neither mapping, list nor tuple; or has not as many arrays as the model
            has outputs; or the names are needed and `wrapped` is not bound to a model.
    """
    if type(outputs) is dict:
        return outputs
    if isinstance(outputs, (list, tuple)):
        config = get_model_config(wrapped, instance) if model_config is None else model_config
        if config.outputs is None:
            raise PyTritonValidationError(
                f"The callable returned a {type(outputs).__name__} of {len(outputs)} arrays, and the names of the "
                f"outputs of model {config.model_name!r} are not known. Tell them, as outputs of the harness or in the "
                "model's configuration, or return a dictionary by output name.",
                expected="the outputs of the model",
                received=type(outputs),
            )
        names = [output.name for output in config.outputs]
        if len(names) != len(outputs):
            raise PyTritonValidationError(
                f"Outputs length different than config outputs length: the callable returned {len(outputs)} arrays, "
                f"model {config.model_name!r} has {len(names)} outputs {names}. Return one array for each, in this "
                "order, or a dictionary by output name.",
                expected=names,
                received=len(outputs),
            )
        return dict(zip(names, outputs, strict=True))
    # Requests are not registered as mappings, and a callable may return the requests that it got.
    if isinstance(outputs, Mapping) or hasattr(outputs, "items"):
        return outputs  # type: ignore[no-any-return]
    raise PyTritonValidationError(
        f"Unsupported output type {type(outputs)}: expected a dictionary of arrays by output name, or a list or tuple "
        "of arrays in the order of the model's outputs. A single array goes into a list.",
        expected=(dict, list, tuple),
        received=type(outputs),
    )
