"""TLS settings: the certificates and keys of encrypted connections."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ..exceptions import PyTritonClientValueError
from .url import TritonUrl

if TYPE_CHECKING:
    import ssl


@dataclass(frozen=True)
class TlsSettings:
    """Certificates for ``https://`` and ``grpcs://`` addresses.

    The server's certificate is always checked, also that it names the host of the address. The files are read when a
    client is made.

    Attributes:
        ca_file: Certificates (PEM) of the authorities that may have signed the server's; ``None`` trusts those that the
            system knows over HTTPS, and those that gRPC brings along over gRPC.
        certificate_file: The client's own certificate (PEM), with the chain to its authority, for a server that asks
            for one (``grpc_use_ssl_mutual``).
        key_file: The private key (PEM, without a password) of ``certificate_file``.
    """

    ca_file: str | os.PathLike[str] | None = None
    certificate_file: str | os.PathLike[str] | None = None
    key_file: str | os.PathLike[str] | None = None


_NO_SETTINGS = TlsSettings()


def check_tls(tls: object, url: TritonUrl) -> TlsSettings | None:
    """Return the settings if they fit the address; ``None`` stays ``None``."""
    if tls is None:
        return None
    if not isinstance(tls, TlsSettings):
        _refuse("a TlsSettings, or None", f"{type(tls).__name__} {tls!r}")
    if not url.is_encrypted:
        _refuse("None for an address without encryption", f"{tls!r} for {url.with_scheme}. Use https:// or grpcs://")
    if (tls.certificate_file is None) != (tls.key_file is None):
        _refuse("certificate_file and key_file together, or neither", repr(tls))
    return tls


def make_ssl_context(tls: TlsSettings | None) -> ssl.SSLContext:
    """Return the context for HTTPS."""
    import ssl  # importing it takes time, and most clients do not need it

    settings = tls or _NO_SETTINGS
    try:
        context = ssl.create_default_context(cafile=settings.ca_file)
        if settings.certificate_file is not None:
            # OpenSSL would ask for a password on the terminal.
            context.load_cert_chain(settings.certificate_file, settings.key_file, password="")
    except (OSError, ValueError) as error:
        _refuse("readable files of certificates and a key without a password", f"{settings!r} ({error})", error)
    return context


def read_certificates(tls: TlsSettings | None) -> tuple[bytes | None, bytes | None, bytes | None]:
    """Return the contents for gRPC: of ``ca_file``, ``key_file`` and ``certificate_file``."""
    settings = tls or _NO_SETTINGS
    # gRPC accepts any bytes and then fails to connect without a reason.
    make_ssl_context(settings)
    try:
        ca, key, certificate = (
            None if file is None else Path(file).read_bytes()
            for file in (settings.ca_file, settings.key_file, settings.certificate_file)
        )
    except OSError as error:
        _refuse("readable files", f"{settings!r} ({error})", error)
    return ca, key, certificate


def _refuse(expected: str, received: str, cause: Exception | None = None) -> NoReturn:
    raise PyTritonClientValueError(
        f"Expected tls to be {expected}; received {received}.", input_name="tls", expected=expected, received=received
    ) from cause
