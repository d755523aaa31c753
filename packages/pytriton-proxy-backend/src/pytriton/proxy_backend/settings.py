"""What each of the proxies must know of a model, and the side file that says it.

The settings that both have, and how settings are described, are in `wire/settings.py`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from .errors import DescriptionError
from .model import ModelSpec, check_endpoint
from .wire.settings import LONGEST_S, ServingSettings, Setting, SettingField, setting_fields

SIDE_FILE_NAME = "pytriton.conf"
"""Name of the file in the folder of a model version that holds its `ProxySettings`."""
HOSTS_FILE_NAME = "pytriton-hosts.conf"
"""Name of the file beside the library as the backend of Python models: where it asks for their processes."""
HOSTS_VARIABLE = "PYTRITON_HOSTS_FILE"
"""Environment variable of a tritonserver: the path of such a file, which counts for all models, converted ones too."""
PYTHON_SIDE_FILE_NAME = "pytriton-proxy.json"
"""Name of the file in the folder of a model version that holds its `PythonProxySettings`."""
FORMAT = 1
SIZE = "a number of bytes, or text such as 2GiB, 500MiB or 1.5GB"
"""What `read_size` takes, for error messages."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]i?B?|B)?")
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}

DURATION = "a time above 0, such as 90s, 5m or 1h"
"""What `read_duration` takes, for error messages."""

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, kw_only=True)
class ProxySettings(ServingSettings):
    """What the native proxy must know and Triton's API does not tell it: the side file in a model's version folder."""

    # Written only where they are set.
    _SPARSE: ClassVar[tuple[str, ...]] = (
        *("max_waiting", "cache_bytes", "ignores_parameters", "tensors_digest"),
        *("stream_backlog_bytes", "stream_stall_timeout_s"),
        *("cost_limit", "cost_overhead", "cost_packed", "cost_alone", "cost_alike"),
    )

    endpoint: Annotated[Path, Setting("path of the unix socket that the proxy will listen on, at most 107 bytes")]
    batching: Annotated[bool, Setting("whether tensors have a batch axis in front")] = True
    decoupled: Annotated[bool, Setting("whether a request may get any number of responses")] = False
    max_waiting: Annotated[
        int,
        Setting(
            "how many requests wait for a worker outside of Triton's queue, which may have a limit and takes what is "
            "beyond; 0: any number"
        ),
    ] = 0
    cache_bytes: Annotated[
        int,
        Setting(
            "what answers that are given again to the same requests may take in memory, in bytes, together with those "
            "of other models of the same library; 0: none is",
            option="--response-cache",
        ),
    ] = 0
    stream_backlog_bytes: Annotated[
        int,
        Setting(
            "how many bytes of a stream may wait for its caller, each response counting 1 KiB at least, before its "
            "callable is not asked for more; 0: any number",
            option="--stream-backlog",
        ),
    ] = 4 << 20
    stream_stall_timeout_s: Annotated[
        float | None,
        Setting(
            "how long a caller may take less than a sixteenth of that (256 KiB at most) of a stream that waits for it, "
            "in seconds; then the stream ends with an error",
            minimum=0.001,
            maximum=LONGEST_S,
            unset="as long as it stays connected",
            option="--stream-stall-timeout",
        ),
    ] = 60.0
    ignores_parameters: Annotated[
        bool,
        Setting(
            "whether no worker reads the parameters of requests, so that a name in a request to `generate` that is no "
            "input is a mistake"
        ),
    ] = False
    cost_limit: Annotated[
        int,
        Setting(
            "what a batch may cost, where requests of different shapes share one: the elements that the free "
            "dimensions of its costliest input take, padded or packed; 0: the shapes of a batch are equal, and nothing "
            "is counted"
        ),
    ] = 0
    cost_overhead: Annotated[
        int, Setting("what each batch costs by itself, against padding; 0: as much as is measured")
    ] = 0
    cost_packed: Annotated[
        bool, Setting("whether inputs are packed, so that the sizes of rows are added up, and not padded")
    ] = False
    cost_alone: Annotated[
        bool, Setting("whether a request that costs more than `cost_limit` is served alone, and not refused")
    ] = False
    cost_alike: Annotated[
        int,
        Setting(
            "which inputs have the same free dimensions within each request, which is refused otherwise: a bit for "
            "each input in the order of the model's configuration"
        ),
    ] = 0
    tensors_digest: Annotated[
        str,
        Setting("digest of the model's tensors, `ModelSpec.tensors_digest`; workers that say another one are refused"),
    ] = ""

    def __post_init__(self) -> None:
        check_endpoint(self.endpoint)
        super().__post_init__()

    def to_text(self, only: Collection[str] | None = None) -> str:
        """Return the content of the side file, `pytriton.conf`; of some settings alone, where they are named."""
        lines = ["# Written by pytriton-proxy-backend, read by libtriton_pytriton.so.", f"format = {FORMAT}"]
        for field in setting_fields(type(self)):
            value = getattr(self, field.name)
            if (value != field.default or field.name not in self._SPARSE) and (only is None or field.name in only):
                lines.append(f"{field.key} = {field.to_conf(value)}")
        return "\n".join([*lines, ""])


def read_duration(text: str) -> float:
    """Return the seconds that a text such as `90s`, `5m` or `1h` means; a number alone is seconds."""
    unit = _UNITS_S.get(text[-1:])
    try:
        seconds = float(text if unit is None else text[:-1]) * (unit or 1.0)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"expected {DURATION}; got {text!r}")
    return seconds


def read_size(value: Any) -> int:
    """Return the bytes that a number above 0, or a text such as `2GiB`, `500M` or `1.5 GB`, means.

    With an `i` a unit is a power of 1024, without one of 1000.
    """
    size: float = 0
    if isinstance(value, str) and (found := _SIZE.fullmatch(value.strip())) is not None:
        unit = (found[2] or "").removesuffix("B")
        size = float(found[1]) * (1024 if unit.endswith("i") else 1000) ** _POWERS[unit.removesuffix("i").upper()]
    elif isinstance(value, int) and not isinstance(value, bool):
        size = value
    if not 1 <= size < 1 << 62:
        raise ValueError(f"expected {SIZE}; got {value!r}")
    return math.floor(size)


def cost_settings(model: ModelSpec) -> dict[str, Any]:
    """Return the settings that say what a batch of a model may cost; none where that is not counted."""
    cost = model.cost
    if cost is None:
        return {}
    # A single input needs no comparison, and may stand at a place beyond the bits of the number.
    alike = () if isinstance(cost["inputs"], str) or len(cost["inputs"]) == 1 else cost["inputs"]
    return {
        "cost_limit": cost["limit"],
        "cost_overhead": cost["overhead"] or 0,
        "cost_packed": cost["layout"] == "packed",
        "cost_alone": cost["oversize"] == "alone",
        "cost_alike": sum(1 << place for place, tensor in enumerate(model.inputs) if tensor.name in alike),
    }


def parameter_fields() -> tuple[SettingField, ...]:
    """Return the settings that parameters of a `config.pbtxt` set for a `model.py` on workers."""
    chosen = [field for field in setting_fields(ProxySettings) if field.name.startswith(("stream_", "cost_"))]
    # A `model.py` gets requests as they were sent, and checks by itself which inputs have the same length.
    return (*setting_fields(ServingSettings), *(field for field in chosen if field.name != "cost_alike"))


def hosts_text(supervisor: Path, attach_timeout_s: float = 10.0) -> str:
    """Return the file that says where processes of Python models are asked for.

    A load, or a request, waits for `attach_timeout_s` seconds where nobody listens at that socket.
    """
    settings = ProxySettings(endpoint=supervisor, attach_timeout_s=attach_timeout_s)
    return settings.to_text(only=("endpoint", "attach_timeout_s"))


@dataclass(frozen=True, kw_only=True)
class PythonProxySettings(ServingSettings):
    """What the Python proxy must know and Triton does not tell it: the side file in the model's version folder."""

    # The name in the file, and what is written only where it is not the default.
    _KEYS: ClassVar[dict[str, str]] = {"arena_budget_bytes": "budget_bytes"}
    _SPARSE: ClassVar[tuple[str, ...]] = ("arena_idle_s",)

    address: Annotated[str, Setting("where it listens, `tcp://host:port` or `ipc:///path`")]
    link_timeout_s: Annotated[
        float,
        Setting(
            "how long the link to a worker may be dead before both ends know, in seconds",
            minimum=0.3,
            maximum=3600,
            option="--link-timeout",
        ),
    ] = 3.0
    secret_key_file: Annotated[
        Path | None,
        Setting("its own keys, made by the command keys", unset="no encryption", option="--curve-secret-key"),
    ] = None
    workers_keys_dir: Annotated[
        Path | None,
        Setting(
            "folder with the public keys of the workers that may attach",
            unset="no encryption",
            option="--curve-workers",
        ),
    ] = None
    insecure: Annotated[
        bool, Setting("whether anybody may attach who reaches a tcp:// address", option="--insecure")
    ] = False

    @property
    def keys(self) -> tuple[Path, Path] | None:
        """The proxy's keys, and the folder of those of workers; `None` without encryption."""
        if self.secret_key_file is None or self.workers_keys_dir is None:
            return None
        return self.secret_key_file, self.workers_keys_dir

    def to_text(self) -> str:
        """Return the content of the side file. It names keys, and holds none."""
        values: dict[str, Any] = {"format": FORMAT}
        for field in setting_fields(type(self)):
            value = getattr(self, field.name)
            if value != field.default or field.name not in self._SPARSE:
                unset = "" if field.type is Path else 0.0
                written = unset if value is None else str(value) if field.type is Path else value
                values[self._KEYS.get(field.name, field.name)] = written
        return json.dumps(values, indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> PythonProxySettings:
        """Read the side file; refuses one of another format, or with fields that this version does not know."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
                raise DescriptionError(f"{path} is no side file of format {FORMAT}: add the model again with --replace")
            for field in setting_fields(cls):
                key = cls._KEYS.get(field.name, field.name)
                if key in found:
                    value = found.pop(key)
                    value = None if field.optional and not value else value
                    found[field.name] = Path(value) if field.type is Path and value is not None else value
            return cls(**found)
        except (OSError, TypeError, ValueError) as error:
            if isinstance(error, DescriptionError):
                raise
            raise DescriptionError(f"the side file {path} cannot be read: {error}") from error
