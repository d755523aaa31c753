"""`ModelControl`: the models and repositories of a running server, as its mode of control allows it to change them."""

from __future__ import annotations

import numbers
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pytriton.inprocess.capi.enums import ModelControlMode
from pytriton.inprocess.capi.errors import (
    TimedOutError,
    UnavailableError,
    UnsupportedError,
    encoded_text,
    wrong_argument,
)
from pytriton.inprocess.capi.parameters import c_parameters
from pytriton.inprocess.server.load_parameters import load_parameters
from pytriton.inprocess.server.session import Session


class Wait:
    """How a caller waits for something."""

    def __init__(self, polling_interval: float, timeout: float | None) -> None:
        arguments: Iterable[tuple[str, object]] = (("polling_interval", polling_interval), ("timeout", timeout))
        for name, value in arguments:
            if value is None and name == "timeout":
                continue
            if isinstance(value, bool) or not isinstance(value, numbers.Real) or not float(value) >= 0:
                raise wrong_argument(name, "a number of seconds that is not negative", value)
        self._polling_interval = polling_interval
        self._timeout = timeout

    def until(self, done: Callable[[], bool], server_name: str, what: str) -> None:
        """Wait."""
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        while not done():
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise TimedOutError(
                    f"Expected server {server_name!r} to {what} within {self._timeout:g} s, which it did not.",
                    expected=what,
                    received=f"not within {self._timeout:g} s",
                    where=f"server {server_name!r}",
                )
            time.sleep(self._polling_interval if left_s is None else min(self._polling_interval, left_s))


class ModelControl:
    """Changes what a running server serves. The methods are those of `Server`, which documents them."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def load(
        self,
        name: str,
        parameters: Mapping[str, str | int | bool | bytes] | None,
        config: Mapping[str, Any] | str | None,
        files: Mapping[str, str | bytes] | None,
    ) -> None:
        """Load a model."""
        self._session.load(name, load_parameters(name, parameters, config, files))

    def unload(self, name: str, *, dependents: bool, wait: Wait | None) -> None:
        """Unload a model; with `wait`, return when it is gone."""
        encoded_text("model", name)
        self.check_explicit("unload a model", UnavailableError)
        session = self._session
        session.check_listed(name)
        session.unload(name, dependents=dependents)
        if wait is not None:
            wait.until(lambda: self._is_unloaded(name), session.name, f"have unloaded model {name!r}")

    def register(self, repository: str | os.PathLike[str], name_mapping: Mapping[str, str] | None) -> None:
        """Add a model repository."""
        self.check_explicit("register a model repository", UnsupportedError)
        path = _c_path(repository)
        mapping = {} if name_mapping is None else name_mapping
        where = f"model repository {str(repository)!r}"
        if not isinstance(mapping, Mapping):
            raise wrong_argument("name_mapping", "a dict from str to str", mapping, where=where)
        for key, value in mapping.items():
            encoded_text("a name of name_mapping", key, where=where)
            encoded_text("a name of name_mapping", value, where=where)
        api = self._session.api
        with self._session.use() as handle, c_parameters(api, mapping) as (array, count):
            api.TRITONSERVER_ServerRegisterModelRepository(handle, path, array, count)

    def unregister(self, repository: str | os.PathLike[str]) -> None:
        """Remove a model repository."""
        self.check_explicit("unregister a model repository", UnsupportedError)
        with self._session.use() as handle:
            self._session.api.TRITONSERVER_ServerUnregisterModelRepository(handle, _c_path(repository))

    def poll(self) -> None:
        """Load, reload and unload what has changed in the repositories."""
        with self._session.use() as handle:
            self._session.api.TRITONSERVER_ServerPollModelRepository(handle)

    def check_explicit(self, what: str, error: type[UnavailableError] | type[UnsupportedError]) -> None:
        """Check that the server lets its caller change its models."""
        mode, name = self._session.control_mode, self._session.name
        if mode is not ModelControlMode.EXPLICIT:
            raise error(
                f"Server {name!r} runs in model control mode {mode.name}: expected mode EXPLICIT to {what}. Start it "
                "with model_control_mode=ModelControlMode.EXPLICIT.",
                expected=ModelControlMode.EXPLICIT,
                received=mode,
                where=f"server {name!r}",
            )

    def _is_unloaded(self, name: str) -> bool:
        listed = self._session.index()
        return all(model.get("state") in (None, "UNAVAILABLE") for model in listed if model["name"] == name)


def _c_path(path: object) -> bytes:
    if not isinstance(path, (str, os.PathLike)):
        raise wrong_argument("repository_path", "a path (str or os.PathLike)", path)
    encoded = os.fsencode(path)
    if 0 in encoded:
        raise wrong_argument("repository_path", "a path without zero characters", path)
    return encoded
