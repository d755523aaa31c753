"""Settings as data: what is known of each field, which values it takes, and how it is written."""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytriton.proxy_backend.wire.settings import (
    LONGEST_S,
    ServingSettings,
    Setting,
    SettingField,
    serving_settings,
    setting_fields,
)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One setting of each kind, and a field that is none."""

    plain: int = 3
    count: Annotated[int, Setting("how many", minimum=2, maximum=5, option="--count")] = 2
    wait_s: Annotated[float | None, Setting("how long", minimum=0.5, maximum=9, unset="for ever")] = None
    is_on: Annotated[bool, Setting("whether")] = False
    label: Annotated[str, Setting("its name")] = ""
    needed: Annotated[int, Setting("how much")]


FIELDS = {field.name: field for field in setting_fields(Sample)}


def test_what_is_known_of_fields() -> None:
    # Those without a default first, the others in their order.
    assert list(FIELDS) == ["needed", "count", "wait_s", "is_on", "label"]
    assert [(field.type, field.optional, field.default) for field in FIELDS.values()] == [
        (int, False, MISSING), (int, False, 2), (float, True, None), (bool, False, False), (str, False, "")
    ]  # fmt: skip
    assert FIELDS["count"].about == Setting("how many", 2, 5, "", "--count")
    assert [field.key for field in FIELDS.values()] == ["needed", "count", "wait_ms", "is_on", "label"]
    assert FIELDS["wait_s"].parameter == "PYTRITON_WAIT_S"
    assert FIELDS["needed"].about.maximum == 2**64 - 1


@pytest.mark.parametrize(
    ("name", "value", "is_good"),
    [
        ("count", 2, True), ("count", 5, True), ("count", 1, False), ("count", 6, False), ("count", True, False),
        ("count", "3", False), ("wait_s", None, True), ("wait_s", 0.5, True), ("wait_s", 0.4, False),
        ("wait_s", math.inf, False), ("wait_s", math.nan, False), ("is_on", 7, True), ("label", None, True),
        ("needed", 0, True), ("needed", -1, False), ("needed", 2**64 - 1, True),
    ],
)  # fmt: skip
def test_which_values_a_setting_takes(name: str, value: Any, is_good: bool) -> None:
    if is_good:
        FIELDS[name].check(value)
    else:
        with pytest.raises(ValueError, match=f"^{name} must be a number from "):
            FIELDS[name].check(value)


def test_none_is_no_value_of_what_is_not_optional() -> None:
    with pytest.raises(TypeError):
        FIELDS["count"].check(None)


def test_what_a_wrong_value_is_told() -> None:
    with pytest.raises(ValueError, match=r"^wait_s must be a number from 0\.5 to 9, or None: for ever, got 10$"):
        FIELDS["wait_s"].check(10)
    with pytest.raises(ValueError, match=r"^count must be a number from 2 to 5, got 1$"):
        FIELDS["count"].check(1)


def test_values_of_parameters() -> None:
    read = {name: field.from_parameter for name, field in FIELDS.items()}
    assert read["count"]("4") == 4
    assert read["wait_s"]("2.5") == 2.5
    assert read["label"]("x") == "x"
    assert (read["is_on"]("true"), read["is_on"]("false")) == (True, False)
    for name, text, problem in (
        ("is_on", "True", "must be true or false, got 'True'"),
        ("count", "2.5", "must be a whole number, got '2.5'"),
        ("wait_s", "x", "must be a number of seconds, got 'x'"),
        ("count", "9", "count must be a number from 2 to 5, got 9"),
    ):
        with pytest.raises(ValueError, match=f"^{problem}$"):
            read[name](text)


@given(st.floats(0, LONGEST_S), st.integers(0, 2**64 - 1))
def test_how_values_are_written(seconds: float, number: int) -> None:
    written = {name: field.to_conf for name, field in FIELDS.items()}
    # Whole milliseconds, which is exact enough; what is not set is 0.
    assert abs(int(written["wait_s"](seconds)) - seconds * 1000) <= 0.5 + seconds * 1e-12
    assert written["needed"](number) == str(number)
    assert (written["wait_s"](None), written["needed"](None), written["label"]("x")) == ("0", "0", "x")
    assert (written["is_on"](True), written["is_on"](False), written["is_on"](1)) == ("true", "false", "true")


def test_settings_are_checked_when_they_are_made() -> None:
    ServingSettings(execution_timeout_s=0.001)
    with pytest.raises(ValueError, match="execution_timeout_s must be a number from"):
        ServingSettings(execution_timeout_s=0.0)
    with pytest.raises(ValueError, match="arena_budget_bytes must be a number from"):
        ServingSettings(arena_budget_bytes=0)


def test_settings_of_another_object() -> None:
    class Source:
        attach_timeout_s = 3.0
        repeatable = True
        other = 1

    assert serving_settings(Source()) == {"attach_timeout_s": 3.0, "repeatable": True}
    assert serving_settings(ServingSettings()) == {
        field.name: field.default for field in setting_fields(ServingSettings)
    }
    assert isinstance(FIELDS["count"], SettingField)
