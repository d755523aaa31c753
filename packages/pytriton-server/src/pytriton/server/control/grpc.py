"""The calls to a server over gRPC, where HTTP is not allowed. Only this module imports tritonclient."""

import socket
import ssl
from collections.abc import Mapping
from typing import Any

import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from pytriton.client.management import NO_GRPC_PROXY, is_denial
from pytriton.server.control.http import CALL_TIMEOUT_S, Activity, ControlError, ModelUpload, VersionState, activity_of
from pytriton.server.settings.config import TritonConfig
from pytriton.server.settings.security import GRPC_HEADER_PREFIX
from pytriton.server.tritonserver.ports import Endpoint

_OPEN_TIMEOUT_S = 1.0
_MUTUAL_ADVICE = (
    " With TritonConfig.grpc_use_ssl_mutual and without HTTP, the server is asked with its own certificate, which "
    "TritonConfig.grpc_root_cert has to vouch for and whose extended key usage, if it has one, must name client "
    "authentication. Or allow HTTP, on 127.0.0.1 if nobody else is to use it."
)


class GrpcControl:
    """The calls over gRPC."""

    def __init__(
        self,
        endpoint: Endpoint,
        headers: Mapping[str, str],
        config: TritonConfig,
        *,
        credentials: Any = None,
        may_use_proxy: bool = False,
    ) -> None:
        self._endpoint = endpoint
        self._headers = {GRPC_HEADER_PREFIX + name: value for name, value in headers.items()}
        self._config = config
        self._credentials = credentials
        self._may_use_proxy = may_use_proxy
        self._made: Any = None

    @property
    def _client(self) -> Any:
        # Made when the server listens, because TLS reads the server's certificate.
        if self._made is None:
            config = self._config
            uses_tls = config.has_grpc_tls
            mutual = uses_tls and bool(config.grpc_use_ssl_mutual)
            self._made = tritonclient.grpc.InferenceServerClient(
                self._endpoint.authority,
                ssl=uses_tls,
                creds=self._credentials,
                # The user gave the server its certificate, so no other authority is trusted.
                root_certificates=_text(config.grpc_server_cert) if uses_tls else None,
                private_key=_text(config.grpc_server_key) if mutual else None,
                certificate_chain=_text(config.grpc_server_cert) if mutual else None,
                channel_args=[
                    ("grpc.max_send_message_length", -1),
                    ("grpc.max_receive_message_length", -1),
                    *([] if self._may_use_proxy else [NO_GRPC_PROXY]),
                    *(_name_override(self._endpoint, config) if uses_tls else []),
                ],
            )
        return self._made

    def is_listening(self, timeout_s: float = _OPEN_TIMEOUT_S) -> bool:
        """Return whether the port is open."""
        if self._may_use_proxy:
            # The port may be reachable through the proxy only.
            try:
                return bool(self._client.is_server_live(headers=self._headers, client_timeout=timeout_s))
            except InferenceServerException as error:
                status = (error.status() or "").removeprefix("StatusCode.")
                return status not in ("UNAVAILABLE", "DEADLINE_EXCEEDED") or is_denial(status, error.message())
        # gRPC waits longer and longer between attempts to connect.
        try:
            address = self._endpoint.host, self._endpoint.port
            socket.create_connection(address, min(timeout_s, _OPEN_TIMEOUT_S)).close()
        except OSError:
            return False
        return True

    def is_ready(self) -> bool:
        """Return whether the server says that it is ready."""
        if not self.is_listening():
            return False
        try:
            return bool(self._client.is_server_ready(headers=self._headers, client_timeout=CALL_TIMEOUT_S))
        except (InferenceServerException, ControlError):
            return False

    def has_failed(self) -> bool:
        """Return whether the server reports that its setup failed and it serves nothing."""
        try:
            return not self._client.is_server_live(headers=self._headers, client_timeout=CALL_TIMEOUT_S)
        except (InferenceServerException, ControlError):
            return False

    def server_version(self) -> str:
        """Return the version of the server, `"2.51.0"` for example."""
        return str(self._call("get_server_metadata").version)

    def load(self, model_name: str, timeout_s: float, upload: ModelUpload | None = None) -> None:
        """Load all versions of a model, from the repository or from `upload`, and wait until they are loaded."""
        if upload is None:
            self._call("load_model", model_name, timeout_s=timeout_s)
        else:
            files = {f"file:{path}": data for path, data in upload.files.items()}
            self._call("load_model", model_name, timeout_s=timeout_s, config=upload.config, files=files)

    def unload(self, model_name: str, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Take all versions of a model out of service. Does not wait for its requests to finish."""
        self._call("unload_model", model_name, timeout_s=timeout_s)

    def index(self, timeout_s: float = CALL_TIMEOUT_S) -> list[VersionState]:
        """List the models of the repository; uploaded models are not in it."""
        return [
            VersionState(item.name, int(item.version) if item.version else None, item.state, item.reason)
            for item in self._call("get_model_repository_index", timeout_s=timeout_s).models
        ]

    def is_model_ready(self, model_name: str, version: int | None = None) -> bool:
        """Return whether a version of a model is served and ready; None asks for the newest one."""
        try:
            return bool(self._call("is_model_ready", model_name, "" if version is None else str(version)))
        except ControlError as error:
            # Newer servers answer NOT_FOUND for an unknown model.
            if error.status == "NOT_FOUND":
                return False
            raise

    def model_config(self, model_name: str) -> dict[str, Any]:
        """Return the configuration that a model has on the server."""
        config: dict[str, Any] = self._call("get_model_config", model_name, as_json=True)["config"]
        return config

    def model_versions(self, model_name: str) -> list[int]:
        """Return the versions of a model that are loaded."""
        return [int(version) for version in self._call("get_model_metadata", model_name).versions]

    def statistics(self, model_name: str, model_version: int) -> dict[str, Any]:
        """Return Triton's statistics of one version of a model."""
        found = self._call("get_inference_statistics", model_name, str(model_version), as_json=True)
        statistics: dict[str, Any] = found["model_stats"][0]
        return statistics

    def all_statistics(self) -> list[dict[str, Any]]:
        """Return Triton's statistics of every version of every model that is loaded."""
        return list(self._call("get_inference_statistics", as_json=True).get("model_stats", ()))

    def activity(self) -> Activity:
        """Return how many requests all models of the server have answered so far."""
        return activity_of(self.all_statistics())

    def close(self) -> None:
        """Close the connection."""
        if self._made is not None:
            self._made.close()

    def _call(self, method: str, *arguments: object, timeout_s: float = CALL_TIMEOUT_S, **options: object) -> Any:
        try:
            return getattr(self._client, method)(*arguments, headers=self._headers, client_timeout=timeout_s, **options)
        except InferenceServerException as error:
            reason, status = error.message(), error.status() or ""
            if status.endswith("DEADLINE_EXCEEDED") or (status.endswith("UNAVAILABLE") and not self.is_listening()):
                raise ControlError(
                    f"tritonserver did not answer {method} over gRPC within {timeout_s:g} s: {reason}."
                ) from error
            advice = _MUTUAL_ADVICE if self._config.grpc_use_ssl_mutual else ""
            raise ControlError(
                f"tritonserver refused {method} over gRPC: {reason}{advice}",
                reason=reason,
                status=status.removeprefix("StatusCode."),
            ) from error


def _name_override(endpoint: Endpoint, config: TritonConfig) -> list[tuple[str, str]]:
    """Let gRPC expect the name that the server's certificate is made for in place of the loopback address."""
    context = ssl.create_default_context(cafile=_text(config.grpc_server_cert))
    context.check_hostname = False
    # The certificate itself is trusted, whoever signed it.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.set_alpn_protocols(["h2"])
    if config.grpc_use_ssl_mutual:
        context.load_cert_chain(str(config.grpc_server_cert), _text(config.grpc_server_key))
    try:
        with (
            socket.create_connection((endpoint.host, endpoint.port), timeout=CALL_TIMEOUT_S) as plain,
            context.wrap_socket(plain) as secured,
        ):
            certificate: Any = secured.getpeercert() or {}
    except OSError as error:
        raise ControlError(
            f"The gRPC port {endpoint.port} does not accept TLS with the certificate {config.grpc_server_cert} of "
            f"TritonConfig.grpc_server_cert: {error}. Do certificate and key fit together?"
        ) from error
    names = [name for kind, name in certificate.get("subjectAltName", ()) if kind == "DNS"]
    names += [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    return [("grpc.ssl_target_name_override", names[0].replace("*", "any"))] if names else []


def _text(path: object) -> str | None:
    return None if path is None else str(path)
