import pytest

from pytriton.exceptions import PyTritonValidationError
from pytriton.server.settings.security import DEFAULT_PROTECTED_ENDPOINTS, TritonSecurityConfig


def test_a_token_is_made_by_default() -> None:
    first, second = TritonSecurityConfig(), TritonSecurityConfig()
    assert first.restricted_endpoints == DEFAULT_PROTECTED_ENDPOINTS
    assert first.restricted_endpoints is not DEFAULT_PROTECTED_ENDPOINTS
    assert first.access_token
    assert first.access_token != second.access_token


def test_no_token_where_nothing_is_protected() -> None:
    assert TritonSecurityConfig(restricted_endpoints=[]).access_token is None
    assert TritonSecurityConfig(access_token="mine", restricted_endpoints=[]).access_token == "mine"


def test_unknown_groups_are_refused() -> None:
    with pytest.raises(
        PyTritonValidationError, match=r"Invalid endpoint names: a, b\. Valid endpoints are: health, inference"
    ):
        TritonSecurityConfig(restricted_endpoints=["b", "health", "a"])


@pytest.mark.parametrize("token", ["", "two words", "line\n", "für"])
def test_a_token_that_is_no_header_is_refused_and_not_quoted(token: str) -> None:
    with pytest.raises(PyTritonValidationError, match="visible ASCII") as caught:
        TritonSecurityConfig(access_token=token)
    assert not token or token not in str(caught.value)


def test_the_token_is_not_in_the_representation() -> None:
    assert "secret" not in repr(TritonSecurityConfig(access_token="secret"))


@pytest.mark.parametrize("value", ["health", b"health", 3])
def test_groups_that_are_no_list_are_refused(value: object) -> None:
    with pytest.raises(PyTritonValidationError, match="must be a list of names"):
        TritonSecurityConfig(restricted_endpoints=value)  # type: ignore[arg-type]


def test_a_group_may_be_named_twice_and_in_any_collection() -> None:
    # tritonserver would refuse it.
    made = TritonSecurityConfig(restricted_endpoints=("trace", "health", "trace"))  # type: ignore[arg-type]
    assert made.restricted_endpoints == ["trace", "health"]
