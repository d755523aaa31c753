"""The signature of a model, as it follows from the hints of a function or class."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import types
import typing
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
)
from dataclasses import dataclass, field
from typing import Any, Literal

from pytriton.decorators._calls.wrapping import layer_of, undecorated
from pytriton.decorators._casts import describe_value
from pytriton.decorators._hints.hints import parse_hint, plain_hint, rejected
from pytriton.decorators._hints.values import JSON_HINTS, Value
from pytriton.exceptions import PyTritonBadParameterError, PyTritonValidationError
from pytriton.model_config import Cost, DynamicBatcher, ModelConfig, Tensor
from pytriton.model_config.dtypes import wire_name

OUTPUT = "output"
"""The name of the output of a function that returns one value."""
_UNKNOWN = (
    "what it names has to be known at the level of the module when the model is bound, so that a name that is imported "
    "for type checkers alone (TYPE_CHECKING) has to be imported for good"
)
_SEVERAL = "several outputs need names; return a NamedTuple, a dataclass or a TypedDict, whose members are the outputs"
_STREAMS = (Iterator, Iterable, Generator, AsyncIterator, AsyncIterable, AsyncGenerator)
# Longer hints are left out of lines.
_MOST_OF_HINT = 24
_QUALIFIERS = ("NotRequired", "Required", "ReadOnly")
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class Outputs:
    """What the function returns, or yields."""

    # Whether it is one value, a mapping from names, or an object with attributes of their names.
    form: Literal["value", "mapping", "object"]
    values: Mapping[str, Value]  # the outputs by name
    kind: Any = None  # the class of the mapping or object; None of one value
    left_out: frozenset[str] = frozenset()  # names of those that the mapping may lack

    def to_arrays(self, result: Any, model: str) -> dict[str, Any]:
        """Return the arrays of the outputs by name; a result that does not match the hints is an error."""
        if self.form == "value":
            return {name: value.to_array(result, name, model) for name, value in self.values.items()}
        kind = self.kind.__name__
        if self.form == "object":
            if not isinstance(result, self.kind):
                raise _wrong_result(model, f"a {kind}", result)
            return {name: value.to_array(getattr(result, name), name, model) for name, value in self.values.items()}
        if not isinstance(result, Mapping):
            raise _wrong_result(model, f"a {kind}, which is a dictionary", result)
        names = set(result)
        if not names <= self.values.keys() or not self.values.keys() - self.left_out <= names:
            raise _wrong_result(model, f"a {kind} with the keys {', '.join(self.values)}", list(result))
        return {name: value.to_array(result[name], name, model) for name, value in self.values.items() if name in names}


@dataclass(frozen=True)
class ModelSignature:
    """What a model takes and gives, as `model` has read it from the hints of a function or class."""

    name: str
    """The name of the model."""
    inputs: tuple[Tensor, ...]
    """Its inputs."""
    outputs: tuple[Tensor, ...]
    """Its outputs."""
    config: ModelConfig
    """How it is served."""
    batched: bool
    """Whether the function gets whole batches; else it is called for each sample."""
    _arguments: Mapping[str, Value] = field(repr=False)
    _outputs: Outputs = field(repr=False)
    _absent: Mapping[str, None] = field(repr=False)

    def __str__(self) -> str:
        """Return the signature in one line."""
        config = self.config
        facts = ["called with whole batches" if self.batched else "called for each sample"]
        facts += [f"max_batch_size={config.max_batch_size}"] if config.batching else ["no batching"]
        facts += ["decoupled"] if config.decoupled else []
        return f"{self.name}({describe_tensors(self.inputs)}) -> {describe_tensors(self.outputs)}; {', '.join(facts)}"

    def to_arguments(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of the function for the arrays of the inputs.

        Raises:
            PyTritonValidationError: A string is to be text, and is not UTF-8.
        """
        values = self._arguments
        arguments = {name: values[name].to_argument(array, name) for name, array in arrays.items() if name in values}
        if self.config.cost is not None:
            arguments.update({name: arrays[name] for name in self.config.cost.extras if name in arrays})
        return {**self._absent, **arguments} if self._absent else arguments

    def to_arrays(self, result: Any) -> dict[str, Any]:
        """Return the arrays of the outputs for what the function returned, or yielded.

        Raises:
            PyTritonValidationError: It is something else than the hints say.
        """
        return self._outputs.to_arrays(result, self.name)

    def check_description(
        self,
        inputs: typing.Sequence[Any] | None,
        outputs: typing.Sequence[Any] | None,
        *,
        batching: bool,
        decoupled: bool,
        cost: Cost | None = None,
    ) -> None:
        """Check that what was said elsewhere about the model agrees with the hints.

        Args:
            inputs: Its inputs, each with `name`, `shape`, `dtype` and `optional`; None if nothing was said of them.
            outputs: Its outputs, likewise.
            batching: Whether its tensors have a batch axis.
            decoupled: Whether a request may have several responses.
            cost: What a batch may cost; None if that is not counted.

        Raises:
            PyTritonValidationError: It does not.
        """
        for what, mine, others in (("inputs", self.inputs, inputs), ("outputs", self.outputs, outputs)):
            if others is not None and {_facts(it) for it in mine} != {_facts(it) for it in others}:
                raise PyTritonValidationError(
                    f"Model {self.name!r}: the hints say that its {what} are {describe_tensors(mine)}; given were "
                    f"{describe_tensors(others)}. Leave {what} out, or change the hints.",
                    expected=mine,
                    received=others,
                )
        for what, own, other in (
            ("batching", self.config.batching, batching), ("decoupled", self.config.decoupled, decoupled)
        ):  # fmt: skip
            if bool(own) != bool(other):
                raise PyTritonValidationError(
                    f"Model {self.name!r}: by its hints and the options of @model it is served with {what}={own}; the "
                    f"given configuration says {what}={other}. Leave the configuration out, or make it with "
                    "dataclasses.replace(get_model_signature(function).config, ...).",
                    expected=own,
                    received=other,
                )
        own_cost = self.config.cost
        if cost is not None and (own_cost is None or _laid_out(cost) != _laid_out(own_cost)):
            raise PyTritonValidationError(
                f"Model {self.name!r}: its function is served with cost={own_cost!r}, and the given configuration says "
                f"cost={cost!r}. How inputs and outputs are laid out is for @model(cost=Cost(...)) to say, which "
                "reads the hints of outputs; change no more of it than limit, overhead, oversize and pad, as in "
                "dataclasses.replace(get_model_signature(function).config.cost, limit=...).",
                expected=own_cost,
                received=cost,
            )


class SignatureToCome:
    """The signature of a model whose hints name what was not defined yet when it was decorated.

    `read` reads it, or raises what is wrong with it.
    """

    def __init__(self, read: Callable[[], ModelSignature]) -> None:
        self._read = read

    @functools.cached_property
    def signature(self) -> ModelSignature:
        """The signature, read when it is first needed."""
        return self._read()


def make_signature(target: Any, *, name: str | None, batched: bool, options: Mapping[str, Any]) -> ModelSignature:
    """Read the signature of a model from the hints of a function or class; `options` are fields of `ModelConfig`."""
    function = _function(target)
    shown = target.__qualname__ if isinstance(target, type) else function.__qualname__
    hints = _resolved(function, shown)
    parameters = _parameters(target, shown)
    cost = options.get("cost")
    extras = () if cost is None else _extras_of(cost, parameters, batched, shown)
    parameters = [parameter for parameter in parameters if parameter.name not in extras]
    arguments = {parameter.name: _argument(parameter, hints, batched, shown) for parameter in parameters}
    absent = {
        parameter.name: None
        for parameter in parameters
        if arguments[parameter.name].optional and parameter.default is parameter.empty
    }
    returned, streams = _returned(hints, function, shown)
    outputs = _outputs(returned, batched, shown, decoupled=streams)
    config = _config(options, batched, streams, shown)
    inputs = tuple(value.tensor(name) for name, value in arguments.items())
    tensors = tuple(value.tensor(name) for name, value in outputs.values.items())
    config.validate(inputs)  # type: ignore[arg-type] # all have names
    if config.cost is not None:
        config.cost.validate(inputs, tensors)  # type: ignore[arg-type]
        config.cost = _with_long_outputs(config.cost, arguments, outputs.values, shown)
    return ModelSignature(
        name=target.__name__ if name is None else name,
        inputs=inputs,
        outputs=tensors,
        config=config,
        batched=batched,
        _arguments=arguments,
        _outputs=outputs,
        _absent=absent,
    )


def _extras_of(cost: Any, parameters: list[inspect.Parameter], batched: bool, shown: str) -> tuple[str, ...]:
    """Return the parameters that are no inputs, because a `Cost` says what they get."""
    if not isinstance(cost, Cost):
        raise _cost_error("has to be a Cost, or None", cost, shown)
    if not batched:
        raise _cost_error("is for batched=True: it is called for each sample", cost, shown)
    if cost.layout == "packed":
        why = "is for padded inputs: packed ones have no batch axis, which hints have; @batch takes a function of them"
        raise _cost_error(why, cost, shown)
    cost.validate()
    names = {parameter.name for parameter in parameters}
    for extra in cost.extras:
        if extra not in names:
            raise _cost_error(f"names {extra!r}, for which there is no parameter among {sorted(names)}", cost, shown)
    return cost.extras


def _cost_error(why: str, cost: Any, shown: str) -> PyTritonBadParameterError:
    return PyTritonBadParameterError(
        f"@model of {shown}: cost={cost!r} {why}.", parameter="model.cost", value=cost, rule=why
    )


def _with_long_outputs(cost: Cost, arguments: Mapping[str, Value], outputs: Mapping[str, Value], shown: str) -> Cost:
    """Return a cost with the outputs that are as long as the input, as names of sizes say.

    It refuses an output that shares a size with a padded input in another way: what a caller gets would depend on the
    requests of others.
    """
    lengths = [_free_sizes(arguments[name]) for name in cost.names]
    padded = {size for value in arguments.values() for size in _free_sizes(value) if isinstance(size, str)}
    long = list(cost.outputs)
    for name, value in outputs.items():
        own = _free_sizes(value)
        if padded.isdisjoint(own):
            continue
        if own not in lengths or (-1 in own and name not in cost.outputs):
            raise _cost_error(
                f"cannot cut output {name!r}: an output that shares a size with an input has the free sizes of "
                f"{cost.names[0]!r}, by the same names and in the same order, which are {_listed(lengths[0])}; it has "
                f"{_listed(own)}. Write it so, name a size that is not as long as the input differently, or take the "
                "list of requests instead of @model",
                cost, shown,
            )  # fmt: skip
        if name not in long:
            long.append(name)
    return cost if long == list(cost.outputs) else dataclasses.replace(cost, outputs=long)


def _free_sizes(value: Value) -> list[int | str]:
    """Return the sizes of each sample that vary, as they are named; -1 if they are not."""
    return [size for size in value.dims[1:] if isinstance(size, str) or size == -1]


def _listed(sizes: list[int | str]) -> str:
    return f"({', '.join(map(str, sizes))})"


def _function(target: Any) -> Any:
    """Return the function whose hints count: the target, or `__call__` of a class."""
    if isinstance(target, type):
        function = next((vars(base)["__call__"] for base in target.__mro__ if "__call__" in vars(base)), None)
        if isinstance(function, staticmethod | classmethod):
            kind = type(function).__name__
            raise _bad_target(target, f"__call__ of the class {target.__qualname__} is a {kind}: leave @{kind} out")
        if function is not None:
            return function
        raise _bad_target(target, f"the class {target.__qualname__} has no method __call__, which answers requests")
    opener = layer_of_requests(target)
    if opener is not None:
        raise _bad_target(target, f"@{opener} is below it, which makes a callable of requests: leave @{opener} out")
    if not inspect.isfunction(undecorated(target)):
        raise _bad_target(target, f"{target!r} is neither")
    return target


def layer_of_requests(func: Any) -> str | None:
    """Return the name of the decorator that makes a callable one of requests; None if there is none."""
    layer = layer_of(func)
    while layer is not None:
        if layer.traits.unpacks_requests:
            return layer.traits.name
        layer = layer_of(layer.below)
    return None


def _bad_target(target: Any, why: str) -> PyTritonBadParameterError:
    return PyTritonBadParameterError(
        f"@model makes a model of a function, or of a class with __call__: {why}.",
        parameter="model",
        value=target,
        rule="a function, or a class with __call__",
    )


def _resolved(function: Any, shown: str) -> dict[str, Any]:
    """Return the hints of a function, also those that are written as strings.

    The cause of the error for one that cannot be read is a `NameError` where a name has no value so far.
    """
    try:
        return typing.get_type_hints(function, include_extras=True)
    except Exception as error:
        plain = undecorated(function)
        for name, hint in _unread_hints(plain).items():
            alone = types.SimpleNamespace(__annotations__={name: hint})
            try:
                typing.get_type_hints(alone, globalns=plain.__globals__, include_extras=True)
            except Exception as reason:
                what = "the result" if name == "return" else f"parameter {name!r}"
                text = getattr(hint, "__forward_arg__", hint)
                raise rejected(f"{what} of {shown}", text, f"it cannot be read ({reason}); {_UNKNOWN}") from error
        raise


def _unread_hints(function: Any) -> Mapping[str, Any]:
    if sys.version_info >= (3, 14):
        # Hints are read when they are asked for since then, all or none, unless names without a value are let stand.
        import annotationlib

        return annotationlib.get_annotations(function, format=annotationlib.Format.FORWARDREF)
    return inspect.get_annotations(function)


def _parameters(target: Any, shown: str) -> list[inspect.Parameter]:
    signature = inspect.signature(_function(target))
    parameters = list(signature.parameters.values())[1 if isinstance(target, type) else 0 :]
    for parameter in parameters:
        if parameter.kind not in _BY_NAME:
            raise PyTritonBadParameterError(
                f"@model: parameter {str(parameter.replace(annotation=parameter.empty))!r} of {shown} is no input: "
                "inputs are passed by name, each to a parameter of its own.",
                parameter=f"parameter {parameter.name!r} of {shown}",
                value=parameter,
                rule="parameters that take an argument by name",
            )
    return parameters


def _argument(parameter: inspect.Parameter, hints: Mapping[str, Any], batched: bool, shown: str) -> Value:
    where = f"parameter {parameter.name!r} of {shown}"
    if parameter.name not in hints:
        advice = " Decorate the class, not its method." if parameter.name == "self" else ""
        raise PyTritonBadParameterError(
            f"@model: {where} has no hint, which says what the input is, as in {parameter.name}: float, or "
            f"{parameter.name}: Annotated[NDArray[np.float32], Shape(-1)].{advice}",
            parameter=where,
            value=None,
            rule="a hint for every parameter",
        )
    value = parse_hint(hints[parameter.name], batched=batched, where=where)
    return value if parameter.default is parameter.empty else dataclasses.replace(value, optional=True)


def _returned(hints: Mapping[str, Any], function: Any, shown: str) -> tuple[Any, bool]:
    """Return the hint of a function's result or of what it yields, and whether it yields."""
    hint = plain_hint(hints.get("return"))
    where = f"the result of {shown}"
    if hint is None or hint is type(None):
        raise PyTritonBadParameterError(
            f"@model: {where} has no hint other than None, and a model has outputs: say what it returns, as in "
            "-> float, -> Annotated[NDArray[np.float32], Shape(-1)], or a TypedDict of several.",
            parameter=where,
            value=hint,
            rule="a hint for what is returned",
        )
    streams = typing.get_origin(hint) in _STREAMS
    plain = undecorated(function)
    if not streams and (inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain)):
        raise rejected(where, hint, "a generator is hinted as Iterator[...], or AsyncIterator[...] if asynchronous")
    if not streams:
        return hint, False
    if not (yielded := typing.get_args(hint)):
        raise rejected(where, hint, "it does not say what is yielded, as Iterator[str] does")
    return yielded[0], True


def _outputs(hint: Any, batched: bool, shown: str, *, decoupled: bool) -> Outputs:
    hint = plain_hint(hint)
    names = _member_names(hint)
    if names is None:
        if hint is tuple or typing.get_origin(hint) is tuple:
            raise rejected(f"the result of {shown}", hint, _SEVERAL)
        return Outputs("value", {OUTPUT: _output(hint, batched, f"the result of {shown}")})
    try:
        hints = typing.get_type_hints(hint, include_extras=True)
    except Exception as error:
        raise rejected(f"the result of {shown}", hint, f"it cannot be read ({error}); {_UNKNOWN}") from error
    members = {name: member for name, member in hints.items() if name in names}
    if not members:
        raise rejected(f"the result of {shown}", hint, "it has no members, and a model has outputs")
    left_out = set(getattr(hint, "__optional_keys__", ()))
    values = {}
    for name, member in members.items():
        while (qualifier := getattr(typing.get_origin(member), "_name", None)) in _QUALIFIERS:
            if qualifier == "NotRequired":
                left_out.add(name)
            (member,) = typing.get_args(member)
        where = f"{name!r} of {hint.__name__}, the result of {shown},"
        if name in left_out and not decoupled:
            raise rejected(where, member, "an output is always there, but in the responses of a stream")
        values[name] = _output(member, batched, where)
    return Outputs("mapping" if issubclass(hint, dict) else "object", values, hint, frozenset(left_out))


def _member_names(hint: Any) -> set[str] | None:
    """Return the names of the members of a `TypedDict`, `NamedTuple` or dataclass; None for any other hint."""
    if not isinstance(hint, type):
        return None
    if dataclasses.is_dataclass(hint):
        return {member.name for member in dataclasses.fields(hint)}
    if issubclass(hint, tuple) and hasattr(hint, "_fields"):
        return set(hint._fields)
    # `typing` and `typing_extensions` have a class each.
    required = getattr(hint, "__required_keys__", None)
    return None if required is None else {*required, *getattr(hint, "__optional_keys__", ())}


def _output(hint: Any, batched: bool, where: str) -> Value:
    value = parse_hint(hint, batched=batched, where=where)
    if value.optional:
        raise rejected(where, hint, "an output cannot be None")
    return value


def _config(options: Mapping[str, Any], batched: bool, decoupled: bool, shown: str) -> ModelConfig:
    """Return how the model is served; batching and decoupling follow from the function."""
    known = {option.name for option in dataclasses.fields(ModelConfig)} - {"batching", "decoupled"}
    for option in options:
        if option not in known:
            follows = option in ("batching", "decoupled")
            raise PyTritonBadParameterError(
                f"@model of {shown} has no option {option!r}"
                + (": it follows from the hints, batched and max_batch_size." if follows else ".")
                + f" There are: name, batched, {', '.join(sorted(known))}.",
                parameter=f"model.{option}",
                value=options[option],
                rule="an option of ModelConfig",
            )
    batching = batched or "max_batch_size" in options
    batcher = options.get("batcher")
    if (
        not batching
        and isinstance(batcher, DynamicBatcher)
        and (batcher.max_queue_delay_microseconds or batcher.preferred_batch_size)
    ):
        raise _batching_error("batcher", "needs max_batch_size to join requests", options, shown)
    if batching and not batched and decoupled:
        why = "is not for a generator that is called for each sample: leave it out, or say batched=True"
        raise _batching_error("max_batch_size", why, options, shown)
    return ModelConfig(batching=batching, decoupled=decoupled, **options)


def _batching_error(option: str, why: str, options: Mapping[str, Any], shown: str) -> PyTritonBadParameterError:
    return PyTritonBadParameterError(
        f"@model of {shown}: {option} {why}.", parameter=f"model.{option}", value=options[option], rule=why
    )


def _laid_out(cost: Cost) -> tuple[Any, ...]:
    return cost.names, cost.layout, cost.lengths, cost.mask, cost.offsets, set(cost.outputs)


def _wrong_result(model: str, expected: str, received: Any) -> PyTritonValidationError:
    return PyTritonValidationError(
        f"Model {model!r}: by its hint, the function returns {expected}; it returned {describe_value(received)}.",
        expected=expected,
        received=received,
    )


def _facts(tensor: Any) -> tuple[Any, ...]:
    return tensor.name, tuple(tensor.shape), wire_name(tensor.dtype), bool(tensor.optional)


def describe_tensors(tensors: typing.Sequence[Any]) -> str:
    """Return inputs or outputs in one line, such as `text: str as BYTES[1], rows?: FP32[-1, 4]`.

    Hints that are long, as those of arrays are, stay out of it.
    """
    return ", ".join(
        f"{tensor.name}{'?' if tensor.optional else ''}: {_hint_before(tensor)}{wire_name(tensor.dtype)}"
        f"[{', '.join(map(str, tensor.shape))}]"
        for tensor in tensors
    )


def json_example(tensor: Any) -> str | None:
    """Return the shortest text for an input whose hint makes JSON of it; None for any other input."""
    if wire_name(tensor.dtype) != "BYTES" or not tensor.hint:
        return None
    return next((text for begins, _, text in JSON_HINTS.values() if tensor.hint.startswith(begins)), None)


def is_file(tensor: Any) -> bool:
    """Return whether the author of an input takes one value of bytes, as of a file."""
    is_one = wire_name(tensor.dtype) == "BYTES" and all(size in (1, -1) for size in tensor.shape)
    return is_one and "bytes" in (tensor.hint or "")


def _hint_before(tensor: Any) -> str:
    return f"{tensor.hint} as " if tensor.hint and len(tensor.hint) <= _MOST_OF_HINT else ""
