"""What a batch may cost where its requests differ in length: `Cost`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from pytriton.model_config._checks import INT64_MAX, check_integer, is_list, parameter_error
from pytriton.model_config.warmup import TensorLike

__all__ = ["Cost"]

_MOST_INPUTS = 64


@dataclass(frozen=True)
class Cost:
    """What a batch may cost, for a model whose requests differ in length.

    Requests of different shapes join a batch then. Its cost is counted in elements of the free sizes (-1) of its
    inputs, such as tokens: the rows times the longest, or, where inputs are packed, the sum. With several inputs the
    costliest counts. What waits together is cut into batches of about one length, none of which costs more than the
    limit.

    ```python
    @batch
    def embed(input_ids, lengths):  # (rows, longest), (rows,)
        ...

    config = ModelConfig(max_batch_size=256, cost=Cost("input_ids", limit=8192, lengths="lengths"))
    ```

    Callables under `@batch` and `@model(batched=True)` get inputs padded or packed. Others get requests as they were
    sent, and lay them out by themselves.
    """

    inputs: str | Sequence[str]
    """The input by whose length requests differ. Several have the same free sizes within each request; one in which
    they differ is refused."""
    limit: int
    """The most that a batch may cost."""
    pad: float | Mapping[str, float] = 0
    """What padded inputs are filled up with, for all inputs or by name; strings are filled up with empty ones."""
    layout: Literal["padded", "packed"] = "padded"
    """How the callable gets inputs with free sizes. "padded": `(rows, longest, ...)`. "packed": all rows behind each
    other, `(sum of the lengths, ...)`."""
    lengths: str | None = None
    """The name by which the callable gets the lengths as well, an array `(rows,)` of int64; `(rows, free sizes)` where
    an input has several free sizes. None: it does not ask for them."""
    mask: str | None = None
    """The name by which the callable gets an array `(rows, longest)` of bool, False where there is padding."""
    offsets: str | None = None
    """The name by which the callable gets where each row begins among packed ones, and the end: `(rows + 1,)` of
    int64."""
    outputs: Sequence[str] = ()
    """Outputs that are as long as the input: they have as many free sizes, in the same order. Each request gets its own
    length of them."""
    oversize: Literal["refuse", "alone"] = "refuse"
    """What becomes of a request that costs more than the limit by itself: it fails as a mistake of its caller, or is
    served alone."""
    overhead: int | None = None
    """What a batch costs by itself, in the same unit. More batches of less padding are made as long as that saves more
    than they cost. None: the server finds it from how long cheap and dear batches take."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of `inputs`."""
        return (self.inputs,) if isinstance(self.inputs, str) else tuple(self.inputs)

    @property
    def extras(self) -> tuple[str, ...]:
        """The arguments of the callable that are no inputs of the model."""
        return tuple(name for name in (self.lengths, self.mask, self.offsets) if name is not None)

    def fields(self) -> dict[str, Any]:
        """Return its fields by name, in types that JSON has."""
        made = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("inputs", "outputs"):
            made[name] = made[name] if isinstance(made[name], str) else list(made[name])
        pad = self.pad
        made["pad"] = {key: _plain(value) for key, value in pad.items()} if isinstance(pad, Mapping) else _plain(pad)
        for name in ("limit", "overhead"):
            made[name] = None if made[name] is None else int(made[name])
        return made

    def pad_value(self, name: str) -> float:
        """Return what an input is filled up with."""
        return self.pad.get(name, 0) if isinstance(self.pad, Mapping) else self.pad

    def validate(self, inputs: Iterable[TensorLike] | None = None, outputs: Iterable[TensorLike] | None = None) -> None:
        """Check the values, against each other and against the tensors of the model.

        Args:
            inputs: The model's inputs; None leaves that out.
            outputs: Its outputs, likewise.

        Raises:
            PyTritonBadParameterError: A value breaks a rule; the error names field, value and rule.
        """
        check_integer("Cost.limit", self.limit, 1, INT64_MAX)
        if self.overhead is not None:
            check_integer("Cost.overhead", self.overhead, 1, INT64_MAX)
        for field, choices in (("layout", ("padded", "packed")), ("oversize", ("refuse", "alone"))):
            if getattr(self, field) not in choices:
                raise parameter_error(f"Cost.{field}", getattr(self, field), " or ".join(map(repr, choices)))
        for field, values in (("inputs", self.inputs), ("outputs", self.outputs)):
            listed = [values] if isinstance(values, str) and field == "inputs" else values
            if not is_list(listed) or not all(isinstance(name, str) and name for name in listed):
                raise parameter_error(f"Cost.{field}", values, f"names of {field}")
        if not self.names:
            raise parameter_error("Cost.inputs", self.inputs, "the name of an input, or several")
        self._check_extras()
        inputs = None if inputs is None else list(inputs)
        if inputs is not None:
            self._check_inputs(inputs)
        if outputs is not None:
            self._check_outputs(list(outputs), inputs or [])

    def _check_extras(self) -> None:
        extras = self.extras
        for name in extras:
            if not isinstance(name, str) or not name.isidentifier() or extras.count(name) > 1:
                rule = "different names of arguments of the callable"
                raise parameter_error("Cost.lengths, mask and offsets", extras, rule)
        if self.layout == "packed":
            if self.offsets is None:
                raise parameter_error("Cost.offsets", None, "a name for the offsets of rows where inputs are packed")
            if self.mask is not None:
                raise parameter_error("Cost.mask", self.mask, "None where inputs are packed: nothing is padded")
        elif self.offsets is not None:
            raise parameter_error("Cost.offsets", self.offsets, "None where inputs are padded: say lengths or mask")

    def _check_inputs(self, inputs: list[TensorLike]) -> None:
        by_name = {spec.name: spec for spec in inputs}
        free = {name: free_axes(spec.shape) for name, spec in by_name.items()}
        for name in self.names:
            if not free.get(name):
                has = ", ".join(f"{known!r} {tuple(spec.shape)}" for known, spec in by_name.items())
                rule = "inputs of the model with a free size (-1)"
                raise parameter_error("Cost.inputs", self.inputs, rule, f"The inputs are {has}.")
        if len({len(free[name]) for name in self.names}) > 1:
            raise parameter_error("Cost.inputs", self.inputs, "inputs with equally many free sizes")
        if self.mask is not None and len(free[self.names[0]]) > 1:
            raise parameter_error("Cost.mask", self.mask, "None where an input has several free sizes")
        if len(self.names) > 1 and len(by_name) > _MOST_INPUTS:
            rule = f"one input, for a model with more than {_MOST_INPUTS}"
            raise parameter_error("Cost.inputs", self.inputs, rule)
        for name in self.extras:
            if name in by_name:
                raise parameter_error("Cost.lengths, mask and offsets", name, "no name of an input")
        if self.layout == "packed":
            for name, axes in free.items():
                if axes and (axes != (0,) or name not in self.names):
                    rule = "one of Cost.inputs, whose first size alone is free, where inputs are packed"
                    raise parameter_error(f"input {name!r}", tuple(by_name[name].shape), rule)
        self._check_pad(by_name)

    def _check_pad(self, by_name: Mapping[Any, TensorLike]) -> None:
        pads = self.pad if isinstance(self.pad, Mapping) else {None: self.pad}
        for name, value in pads.items():
            if not isinstance(value, (int, float, np.number, np.bool_)):
                raise parameter_error("Cost.pad", self.pad, "a number, or numbers by names of inputs")
            if name is not None and name not in by_name:
                raise parameter_error("Cost.pad", self.pad, "numbers by names of inputs of the model")
        for name, spec in by_name.items():
            dtype = np.dtype(object if spec.dtype in (bytes, str) else spec.dtype)
            if free_axes(spec.shape) and dtype.kind in "biu" and self.layout == "padded":
                filled = np.asarray(self.pad_value(name))
                with np.errstate(all="ignore"):
                    if filled.astype(dtype).item() != filled.item():
                        raise parameter_error("Cost.pad", self.pad, f"a value of {dtype}, the dtype of input {name!r}")

    def _check_outputs(self, outputs: list[TensorLike], inputs: list[TensorLike]) -> None:
        shapes = {spec.name: tuple(spec.shape) for spec in outputs}
        lengths = next((tuple(spec.shape) for spec in inputs if spec.name == self.names[0]), None)
        for name in self.outputs:
            free = free_axes(shapes.get(name, ()))
            if not free or (self.layout == "packed" and free != (0,)):
                rule = "outputs of the model with a free size (-1), as those of the input; of packed ones the first"
                raise parameter_error("Cost.outputs", self.outputs, rule)
            if lengths is not None and len(free) != len(free_axes(lengths)):
                rule = "outputs with as many free sizes (-1) as the input, in the same order, by which they are cut"
                has = (
                    f"Output {name!r} has the shape {shapes[name]}, input {self.names[0]!r} {lengths}. Leave the "
                    "output out there if other sizes than those of the input vary in it; a callable that takes the "
                    "list of requests gives each an output of any shape."
                )
                raise parameter_error("Cost.outputs", self.outputs, rule, has)


def free_axes(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the axes of a shape whose sizes vary."""
    return tuple(axis for axis, size in enumerate(shape) if size == -1)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, (np.number, np.bool_)) else value
