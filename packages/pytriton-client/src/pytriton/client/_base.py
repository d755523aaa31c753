"""The base class of all clients: their settings and options, and what they know about their model."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from ._core.deadline import Deadline, check_timeout
from ._core.options import NO_OPTIONS, ParameterValue
from ._core.requests import InferCall, InferRequest, RequestIds, build_request, find_wrong_shape, is_same_form
from ._core.spec import ModelSpec, to_model_spec
from ._core.startup import ModelInfo, PlanStep, Target, prepare
from ._core.tls import TlsSettings, check_tls
from ._core.untrusted import DEFAULT_MAX_RESPONSE_BYTES
from ._core.url import TritonUrl
from ._transport import make_tritonclient
from .exceptions import PyTritonClientError, PyTritonClientInferenceServerError, PyTritonClientValueError

if TYPE_CHECKING:
    from typing_extensions import Self

    from ._shm.plans import SharedMemory

DEFAULT_INIT_TIMEOUT_S = 300.0
"""Default of ``init_timeout_s``: how long a client waits for its model before the first inference, in seconds."""
DEFAULT_INFERENCE_TIMEOUT_S = 60.0
"""Default of ``inference_timeout_s``: how long an inference may take, in seconds."""
DEFAULT_UNKNOWN_MODEL_TIMEOUT_S = 10.0
"""Default of ``unknown_model_timeout_s`` where the script says no ``init_timeout_s``, in seconds."""
LATEST_MODEL_VERSION = "<latest>"
"""Version of a model that means the highest one that is served, like ``None``."""
_MAX_DIGITS = 19  # of a signed number of 64 bits


Made = tuple[ModelSpec, InferRequest, Any]
"""What a call was made of: what was known of the model, the request for that, and of a stream the iterator that sends
it and yields the responses, else ``None``."""


class BaseModelClient:
    """The settings of a client for one model. Use one of its subclasses.

    Args:
        url: ``[scheme://]host[:port]`` of the server. The scheme is ``http`` (the default), ``https``, ``grpc`` or
            ``grpcs``; the default ports are 8000 for HTTP and 8001 for gRPC. Over HTTP the path may follow below which
            a gateway has the server. With ``?load_balancing=round_robin``,
            calls over gRPC go in turn to all servers that the host name stands for.
        model_name: The model.
        model_version: The version; ``None`` is the latest one.
        lazy_init: Whether to contact the server no earlier than needed; else it is done at once.
        init_timeout_s: How long to wait for the server and the model before the first inference, in seconds; ``None``
            is 300.
        inference_timeout_s: How long an inference may take, from the first byte sent to the last one received, in
            seconds; ``None`` is 60.
        model_config: What ``model_config`` of a client returned, or an object with the same attributes: then the server
            is not asked for it.
        ensure_model_is_ready: Whether to ask, before the first inference, if the model is ready, and to wait for it.
        access_token: Sent with every request; ``None`` for a server that asks for none.
        tls: Certificates for an ``https`` or ``grpcs`` address; ``None`` trusts the usual authorities.
        max_response_bytes: The largest response that is taken, in bytes, and of a stream the largest one of its
            responses; ``None`` is 4 GiB. A larger one is an error, and no memory is taken for it. Over gRPC none can be
            larger than 2 GiB.
        shared_memory: Whether tensors go through shared memory, to a server on this host that lets this client register
            it: ``True`` for all that can, and an error where that fails; ``"auto"`` for large ones where the address is
            a loopback one, with one warning where it fails.
        trust_env: Whether the variables of the environment that name a proxy count, such as ``http_proxy``. For a
            loopback address they never do.
        unknown_model_timeout_s: How long of the wait for the model may pass with a server that is ready, has its models
            and says that this one is none of them, in seconds. ``None`` is 10, or where ``init_timeout_s`` is given as
            long as that.

    Raises:
        PyTritonClientInvalidUrlError: The address cannot be understood.
        PyTritonClientValueError: Another argument cannot be used.
    """

    _library_suffix = ""
    _reads_streams = False
    # Error texts name these classes, one for each kind of model.
    _coupled_class = "ModelClient"
    _decoupled_class = "DecoupledModelClient"

    def __init__(
        self,
        url: str,
        model_name: str,
        model_version: str | None = None,
        *,
        lazy_init: bool = True,
        init_timeout_s: float | None = None,
        inference_timeout_s: float | None = None,
        model_config: object | None = None,
        ensure_model_is_ready: bool = True,
        access_token: str | None = None,
        tls: TlsSettings | None = None,
        max_response_bytes: int | None = None,
        shared_memory: bool | Literal["auto"] = False,
        trust_env: bool = True,
        unknown_model_timeout_s: float | None = None,
    ) -> None:
        self._url = replace(TritonUrl.from_url(url), trust_env=bool(trust_env))
        self._tls = check_tls(tls, self._url)
        self._max_response_bytes = _check_max_response_bytes(max_response_bytes)
        self._target = Target(self._url.with_scheme, _check_name(model_name), _check_version(model_version))
        self._lazy_init = lazy_init
        self._init_timeout_s = check_timeout(
            DEFAULT_INIT_TIMEOUT_S if init_timeout_s is None else init_timeout_s, "init_timeout_s"
        )
        self._unknown_model_timeout_s = unknown_model_timeout_s
        if unknown_model_timeout_s is not None:
            self._unknown_model_timeout_s = check_timeout(unknown_model_timeout_s, "unknown_model_timeout_s")
        elif init_timeout_s is None:
            self._unknown_model_timeout_s = DEFAULT_UNKNOWN_MODEL_TIMEOUT_S
        self._has_init_timeout = init_timeout_s is not None
        self._inference_timeout_s = check_timeout(
            DEFAULT_INFERENCE_TIMEOUT_S if inference_timeout_s is None else inference_timeout_s, "inference_timeout_s"
        )
        self._ensure_model_is_ready = ensure_model_is_ready
        self._access_token = _check_token(access_token)
        self._shared_memory_mode = self._check_shared_memory(shared_memory)
        self._options = NO_OPTIONS
        # All views of a client share these two objects.
        given = None if model_config is None else to_model_spec(model_config)
        self._model_info = ModelInfo(given, given)
        self._request_ids = RequestIds()
        self._open()

    def _open(self) -> None:
        """Make what the client sends requests through: the last step of the constructor."""

    @classmethod
    def from_existing_client(cls, existing_client: BaseModelClient) -> Self:
        """Make a client with the settings of another one, of this or any other class.

        It has connections of its own. What the other one knows about the model is not asked again.

        Args:
            existing_client: Stays as it is.
        """
        info = existing_client._model_info
        known = {
            "model_config": info.spec,
            "ensure_model_is_ready": existing_client._ensure_model_is_ready and not info.was_ready,
        }
        client = cls(**{**existing_client._settings(), **known})
        client._options = existing_client._options
        client._model_info.given = info.given
        return client

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the address and the settings, with the access token: the other side has connections of its own."""
        settings = {**self._settings(), **self._own_settings(), "lazy_init": True}
        return _unpickle, (type(self), settings), {"_options": self._options}

    def _settings(self) -> dict[str, Any]:
        """Return what the constructor of every class takes."""
        return {
            "url": self._target.url,
            "model_name": self._target.model_name,
            "model_version": self._target.model_version,
            "lazy_init": self._lazy_init,
            "init_timeout_s": self._init_timeout_s if self._has_init_timeout else None,
            "inference_timeout_s": self._inference_timeout_s,
            "model_config": self._model_info.given,
            "ensure_model_is_ready": self._ensure_model_is_ready,
            "access_token": self._access_token,
            "tls": self._tls,
            "max_response_bytes": self._max_response_bytes,
            "shared_memory": self._shared_memory_mode,
            "trust_env": self._url.trust_env,
            "unknown_model_timeout_s": self._unknown_model_timeout_s,
        }

    def _own_settings(self) -> dict[str, Any]:
        """Return what the constructor of this class takes besides."""
        return {}

    def with_options(
        self,
        *,
        timeout_s: float | None = None,
        request_id: str | None = None,
        priority: int | None = None,
        queue_timeout_s: float | None = None,
        parameters: Mapping[str, ParameterValue] | None = None,
        headers: Mapping[str, str | int | bool] | None = None,
        casting: Literal["safe", "same_kind"] | None = None,
    ) -> Self:
        """Return a view of this client whose calls have other options.

        For example::

            client.with_options(timeout_s=0.5, priority=1).infer_sample(a, b)

        A view costs next to nothing: it uses the connections of this client and what this client knows about the model,
        and closing either closes both. Several threads may use views of one client at a time. A view of a view keeps
        the options that are not given anew; parameters and headers are joined, and those of a single call come last.

        Args:
            timeout_s: How long a call may take as a whole, in seconds, in place of ``inference_timeout_s``. The wait
                for the model before a first inference is part of it. For a stream: how long each response may take.
            request_id: The id of the requests, in place of ids that no others have. It comes back in the result, and
                the server's messages about a request name it.
            priority: The priority level in the server's queue, from 1, the highest, on; 0 is the model's default.
            queue_timeout_s: How long a request may wait in the server's queue, in seconds, where the model lets a
                request say so.
            parameters: Custom request parameters, also for a model with an input of the name ``parameters``.
            headers: HTTP headers or gRPC metadata, also for a model with an input of the name ``headers``.
            casting: How an array becomes one of the declared dtype, in the words of numpy. ``"safe"``, as it is without
                this, keeps every value; ``"same_kind"`` also makes ``float32`` of ``float64`` and ``int32`` of
                ``int64``, and refuses values that are out of range.

        Raises:
            PyTritonClientValueError: One of them cannot be sent.
        """
        view = type(self).__new__(type(self))
        view.__dict__.update(self.__dict__)
        view._options = self._options.with_changes(
            timeout_s=timeout_s,
            request_id=request_id,
            priority=priority,
            queue_timeout_s=queue_timeout_s,
            parameters=parameters,
            headers=headers,
            casting=casting,
        )
        return view

    def create_client_from_url(self, url: str, network_timeout_s: float | None = None) -> Any:
        """Return a client of tritonclient itself, for what this class has no method for. The caller closes it.

        Args:
            url: As for the constructor.
            network_timeout_s: For connecting and for each read over HTTP, in seconds; ``None`` is 60.

        Raises:
            PyTritonClientInvalidUrlError: The address cannot be understood.
        """
        parsed = TritonUrl.from_url(url)
        timeout_s = DEFAULT_INFERENCE_TIMEOUT_S if network_timeout_s is None else network_timeout_s
        return make_tritonclient(
            parsed, check_timeout(timeout_s, "network_timeout_s"), self._tls if parsed.is_encrypted else None
        )

    def get_lib(self) -> ModuleType:
        """Return the module of tritonclient that speaks the protocol of this client, such as ``tritonclient.http``."""
        return importlib.import_module(f"tritonclient.{self._url.protocol}{self._library_suffix}")

    def _check_shared_memory(self, mode: bool | Literal["auto"]) -> bool | Literal["auto"]:
        if not isinstance(mode, bool) and mode != "auto":
            raise PyTritonClientValueError(
                f'Expected shared_memory to be True, False or "auto"; received {mode!r}.',
                input_name="shared_memory",
                received=repr(mode),
            )
        if mode is True and self._url.is_balanced:
            raise PyTritonClientValueError(
                f"Expected the address of one server with shared_memory=True, which it registers; received "
                f"{self._url.with_scheme}.",
                input_name="shared_memory",
                received=repr(mode),
            )
        if mode is True and self._reads_streams and self._url.protocol == "http":
            raise PyTritonClientValueError(
                f"Expected a grpc:// address with shared_memory=True, because streams over HTTP are JSON; received "
                f"{self._url.with_scheme}.",
                input_name="shared_memory",
                received=repr(mode),
            )
        return mode

    def _make_shared_memory(self) -> SharedMemory | None:
        """Return the shared memory of the client; ``None`` if it uses none."""
        if not self._shared_memory_mode:
            return None
        from ._shm.plans import SharedMemory, is_usable

        is_required = self._shared_memory_mode is True
        if not is_required and (not is_usable(self._url) or (self._reads_streams and self._url.protocol == "http")):
            return None
        return SharedMemory(self._target, is_required=is_required, max_response_bytes=self._max_response_bytes)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} for {self._target.model} at {self._target.url}>"

    def _call_deadline(self) -> Deadline | None:
        """Return the deadline of a whole call if the option ``timeout_s`` sets one, else that of each step."""
        timeout_s = self._options.timeout_s
        return None if timeout_s is None else Deadline(timeout_s)

    def _prepare_deadline(self, call_deadline: Deadline | None) -> Deadline:
        """Return the deadline of the wait for the model: that of the call, if that comes first."""
        if call_deadline is not None and call_deadline.remaining_s() < self._init_timeout_s:
            return call_deadline
        return Deadline(self._init_timeout_s)

    def _preparation(self, deadline: Deadline) -> Generator[PlanStep, Any, ModelSpec]:
        """Return the plan of what comes before the first inference; another caller may have carried it out by now."""
        info = self._model_info
        if info.is_prepared and info.spec is not None:
            return info.spec
        wait = self._ensure_model_is_ready and not info.was_ready
        # If the caller set the deadline of this call, the wait for an unknown model lasts until then.
        patience_s = self._unknown_model_timeout_s if deadline.timeout_s == self._init_timeout_s else None
        spec = yield from prepare(self._target, deadline, wait=wait, spec=info.spec, patience_s=patience_s)
        info.spec = spec
        info.was_ready = info.was_ready or wait
        info.is_prepared = True
        return spec

    def _forget_model(self) -> None:
        """Forget what is known about the model, because a reloaded one may have another configuration."""
        self._model_info.is_prepared = False
        self._model_info.was_ready = False
        self._model_info.spec = self._model_info.given

    @property
    def _class_name(self) -> str:
        """The class of this package that it is of, for errors."""
        return self._decoupled_class if self._reads_streams else self._coupled_class

    def _build_request(
        self, spec: ModelSpec, call: InferCall, check: Callable[[ModelSpec], None], *, is_batch: bool
    ) -> InferRequest:
        """Return the request for a model."""
        check(spec)
        request = build_request(
            spec,
            call,
            model_name=self._target.model_name,
            model_version=self._target.model_version,
            request_id=self._request_ids.next(),
            is_batch=is_batch,
        )
        # If the user gave the specification, it may be wrong, so the server has to check the shapes.
        is_given = self._model_info.given is not None
        error = None if is_given else find_wrong_shape(spec, request, is_batch=is_batch)
        if error is not None:
            raise error
        return request

    def _check_is_coupled(self, spec: ModelSpec) -> None:
        if spec.decoupled:
            raise PyTritonClientInferenceServerError(
                f"Model config is decoupled. Use {self._decoupled_class} instead. Model {self._target.model} may send "
                "any number of responses to a request, and this client reads exactly one.",
                **self._target.fields,
            )

    def _check_is_decoupled(self, spec: ModelSpec) -> None:
        if not spec.decoupled:
            raise PyTritonClientInferenceServerError(
                f"Model config is coupled. Use {self._coupled_class} instead. Model {self._target.model} sends exactly "
                "one response to a request, and this client reads streams of them.",
                **self._target.fields,
            )


def check_made_anew(anew: Made, refused: Made, error: PyTritonClientError) -> Made:
    """Return the request that replaces one that the server refused for its form.

    Raises the server's error if the model has not changed.
    """
    if is_same_form(anew[1], refused[1]):
        raise error
    return anew


def _check_name(model_name: str) -> str:
    if not isinstance(model_name, str) or not model_name:
        raise PyTritonClientValueError(
            f"Expected the name of a model; received {model_name!r}.",
            input_name="model_name",
            received=repr(model_name),
        )
    return model_name


def _check_version(model_version: str | int | None) -> str | None:
    if model_version is None or model_version in ("", LATEST_MODEL_VERSION):
        return None
    text = str(model_version)
    is_number = text.isascii() and text.isdecimal() and not isinstance(model_version, bool)
    if not is_number or len(text) > _MAX_DIGITS or not 0 < int(text) < 2**63:
        raise PyTritonClientValueError(
            "Expected model_version to be a whole number from 1 on as text, or None for the latest; received "
            f"{model_version!r}.",
            input_name="model_version",
            received=repr(model_version),
        )
    return text


def _check_max_response_bytes(max_response_bytes: int | None) -> int:
    if max_response_bytes is None:
        return DEFAULT_MAX_RESPONSE_BYTES
    if isinstance(max_response_bytes, bool) or not isinstance(max_response_bytes, int) or max_response_bytes < 1:
        raise PyTritonClientValueError(
            f"Expected max_response_bytes to be a whole number of bytes above zero, or None for "
            f"{DEFAULT_MAX_RESPONSE_BYTES}; received {max_response_bytes!r}.",
            input_name="max_response_bytes",
            received=repr(max_response_bytes),
        )
    return max_response_bytes


def _unpickle(kind: type[BaseModelClient], settings: Mapping[str, Any]) -> BaseModelClient:
    return kind(**settings)


def _check_token(access_token: str | None) -> str | None:
    if access_token is None:
        return None
    if not isinstance(access_token, str) or not (
        access_token.isascii() and access_token.isprintable() and access_token
    ):
        # The text of the error ends up in logs, so it does not show the token.
        raise PyTritonClientValueError(
            "Expected access_token to be printable ASCII, or None for a server without one.", input_name="access_token"
        )
    return access_token
