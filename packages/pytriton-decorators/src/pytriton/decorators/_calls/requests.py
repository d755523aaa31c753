"""The requests that the running callable answers: `get_requests`, `get_row_requests` and the scope behind them."""

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Final

from pytriton.decorators._calls.inputs import get_inference_request_batch_size
from pytriton.exceptions import PyTritonBatchSizeError, PyTritonRuntimeError


class Scope:
    """The requests that the arrays of a call were made of, and which rows belong to which request."""

    __slots__ = ("_found", "_outer", "_rows", "_source", "sizes", "unbatched")

    def __init__(
        self,
        source: Sequence[Any] | Callable[[], Sequence[Any]] | None,
        sizes: Sequence[int] | None = None,
        unbatched: frozenset[str] = frozenset(),
        outer: "Scope | None" = None,
        rows: Sequence[int] | None = None,
    ) -> None:
        """Make the scope of a call for some requests, or for what makes them.

        A server does not make them before somebody asks. A scope that is part of `outer` asks that one for the
        requests, of whose rows it covers those with the indices `rows`.
        """
        self._source = source
        self.sizes = sizes  # the rows of each request; None if nobody has counted them
        self.unbatched = unbatched  # names of inputs that have no batch axis any more, because `@first_value` took it
        self._outer = outer
        self._rows = rows
        self._found: list[Any] | None = None

    def of_rows(self, rows: Sequence[int]) -> "Scope":
        """Return the scope of a call for the rows of these indices, which may repeat."""
        return Scope(None, None, self.unbatched, self, rows)

    def without_batch_axis(self, names: frozenset[str]) -> "Scope":
        """Return the scope of a call for the same rows, in which further inputs have no batch axis."""
        return Scope(None, self.sizes, self.unbatched | names, self)

    def requests(self) -> Sequence[Any]:
        """Return the requests, each once; raise an error if `@batch` or a similar decorator does not make the call."""
        if self._rows is not None:
            if self._found is None:
                seen: dict[int, Any] = {}
                for request in self.row_requests():
                    seen.setdefault(id(request), request)
                self._found = list(seen.values())
            return self._found
        if self._outer is not None:
            return self._outer.requests()
        if self._source is None:
            raise _no_requests()
        if callable(self._source):
            self._source = self._source()
        return self._source

    def row_requests(self) -> list[Any]:
        """Return the request of every row."""
        if self._outer is not None:
            outer = self._outer.row_requests()
            return outer if self._rows is None else [outer[row] for row in self._rows]
        requests = self.requests()
        sizes = self.sizes
        if sizes is None:
            sizes = [get_inference_request_batch_size(request) for request in requests]
        return [request for request, size in zip(requests, sizes, strict=True) for _ in range(size)]


NO_SCOPE: Final = Scope(None)
"""The scope of a call with arrays that no decorator made from requests."""
PendingScope = list[Any]
"""Arguments of the scope of a whole batch, and that scope: `None` until somebody asks for it, as few callables do."""
CURRENT_SCOPE: Final[ContextVar[Scope | PendingScope]] = ContextVar("pytriton_current_scope", default=NO_SCOPE)


def current_scope() -> Scope:
    """Return the scope of the call that is running."""
    scope = CURRENT_SCOPE.get()
    return scope if isinstance(scope, Scope) else make_scope(scope)


def make_scope(pending: PendingScope) -> Scope:
    """Return the scope of a whole batch; further calls return the same scope."""
    requests, sizes, scope = pending
    if scope is None:
        scope = pending[2] = Scope(requests, sizes)
    made: Scope = scope
    return made


def get_requests() -> Sequence[Any]:
    """Return the requests that a decorated callable is answering, with their parameters.

    A callable under `@batch` or `@sample` gets arrays only; this gives it the requests that the arrays were made of, in
    the order of their rows. Under `@group_by_keys` and `@group_by_values` they are those of the present group. A
    request that has rows in several groups of `@group_by_values` is among those of each. `get_row_requests` tells which
    row is whose.

    ```python
    @batch
    def infer(text):
        for request in get_requests():
            if request.is_cancelled():
                ...
    ```

    Returns:
        The requests as the callable of the server gets them: mappings of arrays by input name with `parameters`,
        `requested_output_names` and so on. In a unit test, whatever the test passed in.

    Raises:
        PyTritonRuntimeError: No decorated callable is running in this thread or task, or it was called with arrays in
            place of requests.
    """
    return current_scope().requests()


def get_row_requests() -> list[Any]:
    """Return the request of every row of the arrays that a decorated callable got.

    ```python
    @batch
    def infer(image):
        scale = [request.parameters.get("scale", 1.0) for request in get_row_requests()]
        return {"scaled": image * np.array(scale)[:, None]}
    ```

    Returns:
        As many requests as the arrays have rows: a request occurs once for each of its rows. Under `@group_by_values`
        those of the rows of the present group, under `@pad_batch` also those of the rows that were added, which are
        copies of the last one.

    Raises:
        PyTritonRuntimeError: As for `get_requests`.
        PyTritonValidationError: The requests came to the callable itself and their first inputs have no batch axis.
    """
    return current_scope().row_requests()


def _no_requests() -> PyTritonRuntimeError:
    return PyTritonRuntimeError(
        "There are no current requests: get_requests(), get_row_requests() and the requests of triton_context work "
        "while a callable under @batch, @sample or another decorator that takes requests runs, in its own thread or "
        "asyncio task. A callable without decorators gets the requests as its argument. In a thread of your own, run "
        "the function through contextvars.copy_context().run."
    )


def find_batched_arrays(name: str, inputs: Mapping[str, Any], scope: Scope) -> tuple[int, dict[str, Any]]:
    """Find the arrays with a batch axis among the keyword arguments of a callable.

    Returns the number of rows and the arrays by name; without any array, the rows of the requests count. Arrays with
    different numbers of rows are an error.
    """
    unbatched = scope.unbatched
    rows = -1
    arrays: dict[str, Any] = {}
    for key, value in inputs.items():
        shape = getattr(value, "shape", None)
        if shape and key not in unbatched:
            if shape[0] != rows:
                if rows >= 0:
                    sizes = {other: array.shape[0] for other, array in arrays.items()} | {key: shape[0]}
                    listed = ", ".join(f"{other}: {size}" for other, size in sizes.items())
                    raise PyTritonBatchSizeError(
                        f"@{name} received inputs of different batch sizes: {listed}. Expected the same size of axis "
                        "0.",
                        tensor=key,
                        expected=rows,
                        received=sizes,
                    )
                rows = shape[0]
            arrays[key] = value
    if rows < 0:
        rows = 1 if scope.sizes is None else sum(scope.sizes)
    return rows, arrays
