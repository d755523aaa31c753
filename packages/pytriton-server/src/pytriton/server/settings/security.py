"""Who may use which of the server's endpoints: `TritonSecurityConfig`."""

import dataclasses
import re
import secrets
from collections.abc import Iterable
from typing import Any

from pytriton.exceptions import PyTritonValidationError

VALID_TRITON_ENDPOINTS = {
    "health",
    "metadata",
    "inference",
    "shared-memory",
    "model-config",
    "model-repository",
    "statistics",
    "trace",
    "logging",
}
"""Names of the groups of endpoints that can be protected."""

DEFAULT_PROTECTED_ENDPOINTS = ["shared-memory", "model-repository", "statistics", "trace", "logging"]
"""Groups that are protected unless told otherwise: all that change the server, or tell about others' requests."""

TRITON_ACCESS_HEADER = "triton-access-token"
"""HTTP header with the token."""

GRPC_HEADER_PREFIX = "triton-grpc-protocol-"
"""gRPC metadata has this prefix before the name of a header that gives access."""

_VISIBLE = re.compile(r"[\x21-\x7e]+")


@dataclasses.dataclass
class TritonSecurityConfig:
    """A token, and the groups of endpoints that answer only to those who send it.

    tritonserver takes the token on its command line and in no other way. The guard puts it there where nobody sees it;
    without the guard it is wiped out as soon as the server has read it. The port of the
    metrics is never protected; the ports of SageMaker and Vertex AI are from tritonserver 2.67 on.

    Raises:
        PyTritonValidationError: A group is unknown, or the token is not made of visible ASCII characters.
    """

    access_token: str | None = dataclasses.field(default=None, repr=False)
    """The token. None makes a random one, unless no group is protected."""
    restricted_endpoints: list[str] | None = None
    """The protected groups; None is `DEFAULT_PROTECTED_ENDPOINTS`, an empty list protects nothing."""

    def __post_init__(self) -> None:
        if self.restricted_endpoints is None:
            self.restricted_endpoints = list(DEFAULT_PROTECTED_ENDPOINTS)
        given: Any = self.restricted_endpoints
        if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
            raise PyTritonValidationError(
                f"TritonSecurityConfig.restricted_endpoints must be a list of names (such as health); got {given!r}.",
                expected="a list of names",
                received=given,
            )
        # tritonserver refuses a group that is named twice.
        self.restricted_endpoints = list(dict.fromkeys(str(name) for name in given))
        unknown = sorted(set(self.restricted_endpoints) - VALID_TRITON_ENDPOINTS)
        if unknown:
            raise PyTritonValidationError(
                f"Invalid endpoint names: {', '.join(unknown)}. Valid endpoints are: "
                f"{', '.join(sorted(VALID_TRITON_ENDPOINTS))}.",
                expected=sorted(VALID_TRITON_ENDPOINTS),
                received=unknown,
            )
        if self.access_token is None:
            if self.restricted_endpoints:
                self.access_token = secrets.token_urlsafe(32)
        elif not isinstance(self.access_token, str) or not _VISIBLE.fullmatch(self.access_token):
            # The error does not quote it, because a slightly wrong token is still a secret.
            raise PyTritonValidationError(
                "TritonSecurityConfig.access_token must be a non-empty string of visible ASCII characters, because it "
                "travels as an HTTP header."
            )
