"""What is checked before tritonserver is started, because it would go on without, or end without saying why."""

import logging
import os
from pathlib import Path

from pytriton.exceptions import PyTritonValidationError
from pytriton.server.settings.config import TritonConfig, vertex_ai_is_on
from pytriton.server.settings.rules import is_colliding, parse_restriction
from pytriton.server.settings.security import TRITON_ACCESS_HEADER, TritonSecurityConfig

_ROUTES = ("AIP_PREDICT_ROUTE", "AIP_HEALTH_ROUTE")
# The kinds of addresses from which tritonserver fetches models.
_REMOTE_REPOSITORIES = ("s3://", "gs://", "as://")

logger = logging.getLogger(__name__)


def check_settings(config: TritonConfig, security: TritonSecurityConfig) -> None:
    """Check settings against each other, the file system and the environment."""
    _check_tls(config)
    _check_log_file(config.log_file)
    _check_model_repository(config.model_repository)
    _check_header(config, security)
    _check_vertex_ai(config)


def _check_tls(config: TritonConfig) -> None:
    switch = "grpc_use_ssl_mutual" if config.grpc_use_ssl_mutual else "grpc_use_ssl"
    needed = ["grpc_server_cert", "grpc_server_key"]
    if not config.grpc_use_ssl and not config.grpc_use_ssl_mutual:
        given = [name for name in [*needed, "grpc_root_cert"] if getattr(config, name) is not None]
        if given and config.allow_grpc is not False:
            logger.warning(
                "TritonConfig.%s is set and TritonConfig.grpc_use_ssl is not: gRPC is not encrypted.", given[0]
            )
        return
    if config.grpc_use_ssl_mutual:
        needed.append("grpc_root_cert")
    for name in needed:
        path: Path | None = getattr(config, name)
        if path is None:
            raise PyTritonValidationError(
                f"TritonConfig.{switch} needs TritonConfig.{name}, a PEM file; it is not set.", expected="a PEM file"
            )
        _check_readable(name, path)
    _check_certificates(config)


def _check_readable(name: str, path: Path) -> None:
    try:
        with path.open("rb"):
            return
    except OSError as error:
        raise PyTritonValidationError(
            f"TritonConfig.{name}={str(path)!r} cannot be read: {error.strerror}.",
            expected="a PEM file",
            received=str(path),
        ) from error


def _check_certificates(config: TritonConfig) -> None:
    # Imported late, because most servers do without TLS.
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password, Python would ask the terminal for that of an encrypted key.
        context.load_cert_chain(str(config.grpc_server_cert), str(config.grpc_server_key), password="")
    except (OSError, ValueError) as error:
        raise PyTritonValidationError(
            f"TritonConfig.grpc_server_cert={str(config.grpc_server_cert)!r} and "
            f"TritonConfig.grpc_server_key={str(config.grpc_server_key)!r} must be a certificate and its key, not "
            f"encrypted, in the PEM format: {error}.",
            expected="a certificate and its key",
            received=(str(config.grpc_server_cert), str(config.grpc_server_key)),
        ) from error
    if config.grpc_use_ssl_mutual:
        try:
            context.load_verify_locations(str(config.grpc_root_cert))
        except (OSError, ValueError) as error:
            raise PyTritonValidationError(
                f"TritonConfig.grpc_root_cert={str(config.grpc_root_cert)!r} must hold certificates in the PEM format: "
                f"{error}.",
                expected="certificates in the PEM format",
                received=str(config.grpc_root_cert),
            ) from error


def _check_log_file(path: Path | None) -> None:
    if path is None:
        return
    target = path if path.exists() else path.absolute().parent
    if path.is_dir() or not target.exists() or not os.access(target, os.W_OK):
        what = (
            "it is a folder" if path.is_dir() else f"{target} {'may not be written' if target.exists() else 'is not'}"
        )
        raise PyTritonValidationError(
            f"TritonConfig.log_file={str(path)!r} must be a file that can be written; {what}.",
            expected="a file that can be written",
            received=str(path),
        )


def _check_model_repository(path: Path | str | None) -> None:
    if isinstance(path, str):
        if not path.startswith(_REMOTE_REPOSITORIES):
            raise PyTritonValidationError(
                f"TritonConfig.model_repository={path!r} must be a folder, or begin with one of "
                f"{', '.join(_REMOTE_REPOSITORIES)}.",
                expected="a folder or the address of a remote repository",
                received=path,
            )
    elif path is not None and not path.is_dir():
        raise PyTritonValidationError(
            f"TritonConfig.model_repository={str(path)!r} must be a folder with one folder per model; "
            f"{'it is a file' if path.exists() else 'there is none'}.",
            expected="a folder",
            received=str(path),
        )


def _check_header(config: TritonConfig, security: TritonSecurityConfig) -> None:
    if not security.access_token or not security.restricted_endpoints:
        return
    for name in ("http_restricted_api", "grpc_restricted_protocol"):
        text = getattr(config, name)
        restriction = parse_restriction(text, f"TritonConfig.{name}") if text else None
        if restriction is None or set(security.restricted_endpoints) <= set(restriction.groups):
            continue
        if is_colliding(restriction, TRITON_ACCESS_HEADER, security.access_token):
            raise PyTritonValidationError(
                f"TritonConfig.{name} uses the header {TRITON_ACCESS_HEADER!r}, which carries the access token of "
                "TritonSecurityConfig: no call could pass both. Name another header, or give the same token to both.",
                expected=f"another header than {TRITON_ACCESS_HEADER}",
                received=TRITON_ACCESS_HEADER,
            )


def _check_vertex_ai(config: TritonConfig) -> None:
    """Check that Vertex AI's endpoints have their paths, if they are served."""
    missing = [name for name in _ROUTES if not os.environ.get(name)]
    if missing and vertex_ai_is_on(config):
        raise PyTritonValidationError(
            f"Vertex AI's endpoints need the environment variables {' and '.join(_ROUTES)}, such as /predict and "
            f"/health; {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set. Set them, or "
            "TritonConfig.allow_vertex_ai=False.",
            expected=_ROUTES,
            received=missing,
        )
