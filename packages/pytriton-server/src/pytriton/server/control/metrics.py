"""Reads the page of metrics that tritonserver itself has."""

import contextlib
import http.client
import re

from pytriton.server.control.http import fetch
from pytriton.server.tritonserver.ports import Endpoint

TRITON_TIMEOUT_S = 2.0
"""How long tritonserver may take for its page, in seconds."""


def read_metrics(endpoint: Endpoint) -> bytes:
    """Return the page.

    Raises:
        OSError: The server cannot be reached, refuses it, takes too long, or the page is too long.
        http.client.HTTPException: The answer is not HTTP.
    """
    connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=TRITON_TIMEOUT_S)
    with contextlib.closing(connection):
        status, page = fetch(connection, "GET", "/metrics", None, {"Connection": "close"}, timeout_s=TRITON_TIMEOUT_S)
    if status != http.HTTPStatus.OK:
        raise OSError(f"tritonserver answers with status {status}")
    return page


def pending_requests(page: bytes, name: str, version: int) -> int | None:
    """Return how many requests wait in the queue of a model; None if the page does not say it.

    That is `nv_inference_pending_request_count`, which falls when Triton gives a request to an instance.
    """
    labels = re.escape(f'model="{name}",version="{version}"'.encode())
    found = re.search(rb"^nv_inference_pending_request_count\{" + labels + rb"\} (\d+)$", page, re.MULTILINE)
    return None if found is None else int(found[1])
