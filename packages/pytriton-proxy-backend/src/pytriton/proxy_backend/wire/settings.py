"""The settings of a model that both proxies have, and what is known of any setting: meaning, limits, forms.

They travel from `ModelConfig` or the command `add` through a side file to a proxy, and some of them in the greeting on
to its workers; `proxy_backend/settings.py` has what one proxy alone needs. From these classes come the side files and
their checks, the options of `add`, and, written by `python3 tools/dev.py reference`, the table of the native proxy
(`native/proxy/wire/settings_table.h`) and those in `docs/`.

A time is in seconds here, and in whole milliseconds in `pytriton.conf` and in greetings. What is not set is `None`
here, and 0 or an empty text there.
"""

from __future__ import annotations

import math
import types
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

# In nanoseconds it fits into 64 bits.
LONGEST_S = 9e9
_LARGEST = (1 << 64) - 1


@dataclass(frozen=True)
class Setting:
    """What is to be known of a setting beyond its name, type and default."""

    meaning: str  # what it is, in words
    minimum: float = 0  # the smallest number
    maximum: float = _LARGEST  # the largest one
    unset: str = ""  # what `None` means
    option: str = ""  # the option of `add` that sets it; empty for none


@dataclass(frozen=True, kw_only=True)
class SettingField:
    """One setting of a class of settings."""

    name: str  # its name; the suffix is its unit
    type: type
    optional: bool  # whether it may be `None`
    default: Any  # its default; `dataclasses.MISSING` where there is none
    about: Setting  # the rest

    @property
    def key(self) -> str:
        """Its name in `pytriton.conf`."""
        return f"{self.name.removesuffix('_s')}_ms" if self.type is float else self.name

    def check(self, value: Any) -> None:
        """Check a value; raises `ValueError` if it is out of the limits."""
        if self.type not in (int, float) or (value is None and self.optional):
            return
        low, high = self.about.minimum, self.about.maximum
        if isinstance(value, (bool, str)) or not low <= value <= high or not math.isfinite(value):
            or_none = f", or None: {self.about.unset}" if self.optional else ""
            raise ValueError(f"{self.name} must be a number from {low:g} to {high:g}{or_none}, got {value}")

    @property
    def parameter(self) -> str:
        """The parameter of `config.pbtxt` that sets it for a `model.py` on workers."""
        return f"PYTRITON_{self.name.upper()}"

    def from_parameter(self, text: str) -> Any:
        """Return the value that a parameter of `config.pbtxt` says; raises `ValueError` if it says none."""
        if self.type is bool:
            if text not in ("true", "false"):
                raise ValueError(f"must be true or false, got {text!r}")
            return text == "true"
        kind = "a whole number" if self.type is int else "a number of seconds"
        try:
            value = self.type(text)
        except ValueError:
            raise ValueError(f"must be {kind}, got {text!r}") from None
        self.check(value)
        return value

    def to_conf(self, value: Any) -> str:
        """Return a value as it is written in `pytriton.conf`."""
        if self.type is bool:
            return str(bool(value)).lower()
        if self.type is float:
            return str(round(float(value or 0) * 1000))
        return str(int(value or 0) if self.type is int else value)


@dataclass(frozen=True, kw_only=True)
class ServingSettings:
    """What both proxies must know of a model. Fields of `ModelConfig` with the same names set them."""

    attach_timeout_s: Annotated[
        float,
        Setting(
            "how long a request waits where no worker is attached, in seconds",
            maximum=LONGEST_S,
            option="--attach-timeout",
        ),
    ] = 10.0
    arena_budget_bytes: Annotated[
        int, Setting("shared memory per direction and worker, in bytes", minimum=1, option="--arena-budget")
    ] = 4 << 30
    arena_idle_s: Annotated[
        float, Setting("how long memory beyond the first MiB is kept unused, in seconds", maximum=LONGEST_S)
    ] = 10.0
    execution_timeout_s: Annotated[
        float | None,
        Setting(
            "how long a worker may take for a batch, or for the next response of a stream, in seconds",
            minimum=0.001,
            maximum=LONGEST_S,
            unset="as long as it likes",
            option="--execution-timeout",
        ),
    ] = None
    repeatable: Annotated[
        bool,
        Setting(
            "whether the requests of a worker that was lost before it answered may go to another one, once",
            option="--repeatable",
        ),
    ] = False

    def __post_init__(self) -> None:
        for field in setting_fields(type(self)):
            field.check(getattr(self, field.name))


def setting_fields(settings: type[Any]) -> tuple[SettingField, ...]:
    """Return the settings of a class, those without a default first."""
    hints = get_type_hints(settings, include_extras=True)
    found = []
    for field in fields(settings):
        if get_origin(hints[field.name]) is not Annotated:
            continue
        annotated, about = get_args(hints[field.name])
        optional = get_origin(annotated) in (Union, types.UnionType)
        plain = get_args(annotated)[0] if optional else annotated
        found.append(SettingField(name=field.name, type=plain, optional=optional, default=field.default, about=about))
    return tuple(sorted(found, key=lambda field: field.default is not MISSING))


def serving_settings(source: object) -> dict[str, Any]:
    """Return those of the `ServingSettings` that an object, such as a `ModelConfig`, has as attributes."""
    names = (field.name for field in setting_fields(ServingSettings))
    return {name: getattr(source, name) for name in names if hasattr(source, name)}
