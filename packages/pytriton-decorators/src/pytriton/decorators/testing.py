"""Calls inference callables without a server: for unit tests of model code.

```python
from pytriton.decorators.testing import Harness, make_request

harness = Harness(infer, inputs=[Tensor((2,), np.float32, "x")], outputs=[Tensor((2,), np.float32, "y")])
result = harness.infer({"x": [[1, 2]]})
first, second = harness.infer([{"x": [[1, 2]]}, make_request({"x": [[3, 4]]}, {"scale": 2})])
```

The callable gets requests as it would from the server: the same type (or, where pytriton-proxy-backend is not
installed, a stand-in with the same attributes), strings as objects of bytes, the model's configuration within reach of
the decorators. What it returns is checked and converted as the server would. One call is one batch.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from contextvars import Context, copy_context
from typing import Any, Literal, Protocol, TypeAlias, overload

from pytriton.decorators import _harness_steps
from pytriton.decorators._calls.context import TritonContext, find_triton_context
from pytriton.decorators._calls.types import RequestLike
from pytriton.decorators._fake_request import request_type
from pytriton.decorators.harness_checks import Checker, Result
from pytriton.decorators.serving import check_callable, find_signature, load_infer_func, set_served_model
from pytriton.exceptions import PyTritonBadParameterError, PyTritonValidationError
from pytriton.model_config import ModelConfig, Tensor
from pytriton.model_config.triton_model_config import TensorSpec, TritonModelConfig

__all__ = ["Harness", "HarnessRequest", "Result", "make_request"]


_Given: TypeAlias = Mapping[str, Any] | RequestLike
"""A request as a test passes it in."""


class HarnessRequest(RequestLike, Protocol):
    """A request for tests: the arrays by input name, and everything that a request of the server has."""

    data: dict[str, Any]
    parameters: dict[str, Any]
    span: Any

    @property
    def requested_output_names(self) -> list[str] | None:
        """The outputs that the caller wants; None is all of them."""

    @property
    def request_id(self) -> str:
        """The caller's id of the request, empty for none."""

    @property
    def priority(self) -> int:
        """Its priority, 0 is the model's default."""

    @property
    def timeout_us(self) -> int:
        """Its timeout in the queue in microseconds, 0 is none."""

    @property
    def correlation_id(self) -> int | str:
        """The sequence that it belongs to, 0 is none."""

    def is_cancelled(self) -> bool:
        """Return whether `cancel` was called."""

    def cancel(self) -> None:
        """Give the request up, as its caller would."""


def make_request(
    data: Mapping[str, Any],
    parameters: Mapping[str, Any] | None = None,
    *,
    requested_output_names: Sequence[str] | None = None,
    request_id: str = "",
    priority: int = 0,
    timeout_us: int = 0,
    correlation_id: int | str = 0,
) -> HarnessRequest:
    """Make a request with more than arrays, for `Harness` or for calling a callable directly.

    Args:
        data: The inputs by name, each `(batch, *tensor.shape)` where the model batches, else `tensor.shape`.
        parameters: Request parameters, and the headers that the server would forward.
        requested_output_names: The outputs that the caller wants; None is all of them.
        request_id: The caller's id of the request.
        priority: Its priority, 0 is the model's default.
        timeout_us: Its timeout in the queue in microseconds, 0 is none.
        correlation_id: The sequence that it belongs to, 0 is none.

    Returns:
        The request. `cancel()` gives it up.
    """
    request: HarnessRequest = request_type()(
        dict(data),
        dict(parameters or {}),
        None,
        None if requested_output_names is None else list(requested_output_names),
        request_id=request_id,
        priority=priority,
        timeout_us=timeout_us,
        correlation_id=correlation_id,
    )
    return request


class Harness:
    """Calls an inference callable, decorated or not, as the server would.

    All kinds of callables work: functions, methods, objects, coroutine functions, generators and asynchronous
    generators. `infer` and `stream` are for ordinary tests, `infer_async` and `stream_async` for those that are
    coroutines themselves.

    A request is a mapping of arrays by input name, or what `make_request` makes of one. With `inputs`, plain lists
    become arrays of the declared dtype.
    """

    def __init__(
        self,
        infer_func: Callable[..., Any],
        inputs: Sequence[Tensor] | None = None,
        outputs: Sequence[Tensor] | None = None,
        config: ModelConfig | None = None,
        *,
        model_name: str | None = None,
        strict: bool = False,
        triton_context: TritonContext | None = None,
    ) -> None:
        """Bind a callable to a model without a server.

        Args:
            infer_func: The callable, or what is decorated with `model`, which then says what is not given here.
            inputs: The inputs of the model, as for `Triton.bind`. With them requests are held against them; None takes
                what comes. `@fill_optionals` needs them.
            outputs: The outputs of the model, as for `Triton.bind`. With them results are converted to their dtypes.
                Lists of outputs in their order need them.
            config: How the model is served, as for `Triton.bind`; with it no more than `max_batch_size` rows are taken.
                None is `ModelConfig()`, without that limit.
            model_name: The name of the model; None is that of `@model`, or else `"model"`.
            strict: Whether outputs have to be exactly the declared ones, with their dtypes and shapes, as for
                `Triton.bind`.
            triton_context: The context that `@triton_context` hands out, with the models of other callables. For
                `infer_func` itself the model described here is what is seen.

        Raises:
            PyTritonBadParameterError: `infer_func` is not callable, `inputs` or `outputs` are no tensors, or `config`
                breaks a rule.
            PyTritonValidationError: A callable under a decorator has not the parameters for the inputs, or what is
                given does not agree with the hints of `@model`; `Triton.bind` says the same.
        """
        signature = find_signature(infer_func)
        if signature is not None:
            config = signature.config if config is None else config
            signature.check_description(
                inputs, outputs, batching=config.batching, decoupled=config.decoupled, cost=config.cost
            )
            inputs, outputs = signature.inputs, signature.outputs
            model_name = signature.name if model_name is None else model_name
            infer_func = load_infer_func(infer_func)
        if not callable(infer_func):
            raise PyTritonBadParameterError(
                f"Harness expected a callable, received {infer_func!r}.",
                parameter="Harness.infer_func",
                value=infer_func,
                rule="a callable",
            )
        settings = ModelConfig() if config is None else config
        named_inputs, named_outputs = _named(inputs, "INPUT"), _named(outputs, "OUTPUT")
        settings.validate()
        if settings.cost is not None:
            settings.cost.validate(named_inputs, named_outputs)
        self.model_config = TritonModelConfig(
            model_name="model" if model_name is None else model_name,
            max_batch_size=settings.max_batch_size,
            batching=settings.batching,
            batcher=settings.batcher,
            decoupled=settings.decoupled,
            inputs=named_inputs,
            outputs=named_outputs,
            model_warmup=settings.model_warmup,
            cost=settings.cost,
        )
        """What `get_model_config` gives within the callable."""
        check_callable(infer_func, self.model_config)
        self._infer_func = infer_func
        self._triton_context = triton_context
        # If a test sets the attribute of the callable itself, the arguments are not needed.
        described = any(given is not None for given in (inputs, outputs, config, triton_context))
        self._serves = described or find_triton_context(infer_func) is None
        self._checker = Checker(
            self.model_config,
            inputs=named_inputs,
            outputs=named_outputs,
            max_rows=None if config is None else settings.max_batch_size,
            strict=strict,
        )

    @overload
    def infer(self, requests: _Given) -> Result: ...
    @overload
    def infer(self, requests: Sequence[_Given], *, return_exceptions: Literal[False] = False) -> list[Result]: ...
    @overload
    def infer(
        self, requests: Sequence[_Given], *, return_exceptions: Literal[True]
    ) -> list[Result | BaseException]: ...
    def infer(self, requests: Any, *, return_exceptions: bool = False) -> Any:
        """Call the callable with one batch and give what clients would get.

        Args:
            requests: One request, or a list of them.
            return_exceptions: With a list, an exception that the callable returned in the place of a result is in its
                place in the returned list. False raises the first one.

        Returns:
            The result, or the list of results, one for each request.

        Raises:
            PyTritonValidationError: The server would refuse a request, or what the callable returned; or it is a
                generator that does not yield exactly once.
            PyTritonRuntimeError: The callable is asynchronous, and this was called from a running event loop.
            Exception: What the callable raised.
        """
        batches, single = self._batches(requests)
        results: list[Any] = []
        for batch in batches:
            with closing(self._steps(batch)) as steps:
                # The second step shows that there is only one.
                returned = list(itertools.islice(steps, 2))
            results += self._checker.results(_only(returned), batch, stream=False)
        return _picked(results, single, return_exceptions)

    @overload
    async def infer_async(self, requests: _Given) -> Result: ...
    @overload
    async def infer_async(
        self, requests: Sequence[_Given], *, return_exceptions: Literal[False] = False
    ) -> list[Result]: ...
    @overload
    async def infer_async(
        self, requests: Sequence[_Given], *, return_exceptions: Literal[True]
    ) -> list[Result | BaseException]: ...
    async def infer_async(self, requests: Any, *, return_exceptions: bool = False) -> Any:
        """Do what `infer` does, within a running event loop.

        Args:
            requests: One request, or a list of them.
            return_exceptions: As for `infer`.

        Returns:
            As for `infer`.

        Raises:
            PyTritonValidationError: As for `infer`.
            Exception: What the callable raised.
        """
        batches, single = self._batches(requests)
        results: list[Any] = []
        for batch in batches:
            returned: list[Any] = []
            async with aclosing(self._steps_async(batch)) as steps:
                async for step in steps:
                    returned.append(step)
                    if len(returned) > 1:
                        break
            results += self._checker.results(_only(returned), batch, stream=False)
        return _picked(results, single, return_exceptions)

    @overload
    def stream(self, requests: _Given) -> Iterator[Result]: ...
    @overload
    def stream(self, requests: Sequence[_Given]) -> Iterator[list[Result | BaseException | None]]: ...
    def stream(self, requests: Any) -> Iterator[Any]:
        """Call the callable of a decoupled model with one batch, and give its responses as they come.

        The callable runs only while the next response is asked for. Closing the iterator closes the generator below.

        Args:
            requests: One request, or a list of them.

        Yields:
            For one request every response to it. For a list a list with a response for each request: None for one that
            gets none in this step, an exception for one that failed. A callable that is no generator makes one step.

        Raises:
            PyTritonValidationError: As for `infer`.
            PyTritonRuntimeError: As for `infer`.
            Exception: What the callable raised.
        """
        batches, single = self._batches(requests)
        for batch in batches:
            with closing(self._steps(batch)) as steps:
                for step in steps:
                    results = self._checker.results(step, batch, stream=True)
                    if not single:
                        yield results
                    elif results[0] is not None:
                        yield _picked(results, single, return_exceptions=False)

    @overload
    def stream_async(self, requests: _Given) -> AsyncIterator[Result]: ...
    @overload
    def stream_async(self, requests: Sequence[_Given]) -> AsyncIterator[list[Result | BaseException | None]]: ...
    async def stream_async(self, requests: Any) -> AsyncIterator[Any]:
        """Do what `stream` does, within a running event loop.

        Args:
            requests: One request, or a list of them.

        Yields:
            As for `stream`.

        Raises:
            PyTritonValidationError: As for `infer`.
            Exception: What the callable raised.
        """
        batches, single = self._batches(requests)
        for batch in batches:
            async with aclosing(self._steps_async(batch)) as steps:
                async for step in steps:
                    results = self._checker.results(step, batch, stream=True)
                    if not single:
                        yield results
                    elif results[0] is not None:
                        yield _picked(results, single, return_exceptions=False)

    def _batches(self, requests: Any) -> tuple[list[list[Any]], bool]:
        """Return the requests batch by batch, as the callable gets them, and whether the test passed a single one."""
        single = not isinstance(requests, Sequence)
        batch = self._checker.requests([requests] if single else requests)
        # Without batching, a callable gets one request at a time.
        return ([batch] if self.model_config.batching else [[request] for request in batch]), single

    def _context(self) -> Context:
        context = copy_context()
        if self._serves:
            context.run(set_served_model, self._infer_func, self.model_config, self._triton_context)
        return context

    def _steps(self, batch: list[Any]) -> Generator[Any, None, None]:
        return _harness_steps.steps(functools.partial(self._infer_func, batch), self._context())

    def _steps_async(self, batch: list[Any]) -> AsyncGenerator[Any, None]:
        return _harness_steps.steps_async(functools.partial(self._infer_func, batch), self._context())


def _only(steps: list[Any]) -> Any:
    if len(steps) == 1:
        return steps[0]
    raise PyTritonValidationError(
        f"The generator yielded {'more than once' if steps else 'nothing'}, expected one result. The server says the "
        "same for a model that is not decoupled; call `stream` of the harness for one that is.",
        expected=1,
        received=len(steps),
    )


def _picked(results: list[Any], single: bool, return_exceptions: bool) -> Any:
    for result in results:
        if isinstance(result, BaseException) and (single or not return_exceptions):
            raise result
    return results[0] if single else results


def _named(tensors: Sequence[Tensor] | None, prefix: str) -> list[TensorSpec] | None:
    if tensors is None:
        return None
    odd = next((tensor for tensor in tensors if not isinstance(tensor, Tensor)), None)
    if odd is not None:
        raise PyTritonBadParameterError(
            f"Harness expected Tensor objects as {prefix.lower()}s, received {odd!r}.",
            parameter=f"Harness.{prefix.lower()}s",
            value=odd,
            rule="Tensor objects",
        )
    return [
        TensorSpec(tensor.name or f"{prefix}_{position}", tensor.shape, tensor.dtype, tensor.optional, hint=tensor.hint)
        for position, tensor in enumerate(tensors, 1)
    ]
