"""The requests behind the call that a decorator is making."""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Final

from pytriton.exceptions import PyTritonRuntimeError

__all__ = ["CURRENT_REQUESTS", "get_requests"]

CURRENT_REQUESTS: Final[ContextVar[Sequence[Any] | Callable[[], Sequence[Any]]]] = ContextVar(
    "pytriton_current_requests"
)
"""The requests, or what makes them: a server does not make them before somebody asks."""


def get_requests() -> Sequence[Any]:
    """Gives the requests that a decorated callable is answering, with their parameters.

    A callable under `@batch` or `@sample` gets arrays only; this gives it the requests that the arrays were made of:
    row by row in the same order, and after `@group_by_keys` and its like only those of the present group.

    ```python
    @batch
    def infer(image):
        scale = [request.parameters.get("scale", 1.0) for request in get_requests()]
    ```

    Returns:
        The requests as the callable of the server gets them: mappings of arrays by input name with `parameters`,
        `requested_output_names` and so on. In a unit test, whatever the test passed in.

    Raises:
        PyTritonRuntimeError: No call under `@batch` or `@sample` is in progress in this thread or task.
    """
    requests = CURRENT_REQUESTS.get(None)
    if requests is None:
        raise PyTritonRuntimeError(
            "There are no current requests: get_requests() works while a callable under @batch or @sample runs, in its "
            "own thread or asyncio task. Without those decorators the callable gets the requests as its argument. In a "
            "thread of your own, run the function through contextvars.copy_context().run."
        )
    if callable(requests):
        requests = requests()
        CURRENT_REQUESTS.set(requests)
    return requests
