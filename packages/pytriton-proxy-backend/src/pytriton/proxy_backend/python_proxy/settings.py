"""The side file of a model that the Python proxy serves: `pytriton-proxy.json` in its version folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from ..errors import DescriptionError

SETTINGS_NAME = "pytriton-proxy.json"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class PythonProxySettings:
    """What the Python proxy must know and Triton does not tell it.

    Attributes:
        address: Where it listens, `tcp://host:port` or `ipc:///path`.
        attach_timeout_s: How long a request waits where no worker is attached, in seconds.
        budget_bytes: The largest record of a batch or a response, and the shared memory per direction and worker where
            there is some, in bytes.
        execution_timeout_s: How long a worker may take for a batch, or for the next response of a stream, in seconds; 0
            is as long as it likes.
        repeatable: Whether the requests of a worker that was lost may go to another one, once.
        link_timeout_s: How long a link may be dead before both ends know, in seconds.
        secret_key_file: The proxy's own CURVE keys; empty: no encryption.
        workers_keys_dir: Folder with the public keys of the workers that may attach.
        insecure: Whether anybody who reaches a `tcp://` address may attach without keys.
    """

    address: str
    attach_timeout_s: float = 10.0
    budget_bytes: int = 4 << 30
    execution_timeout_s: float = 0.0
    repeatable: bool = False
    link_timeout_s: float = 3.0
    secret_key_file: str = ""
    workers_keys_dir: str = ""
    insecure: bool = False

    @property
    def keys(self) -> tuple[Path, Path] | None:
        """The proxy's keys, and the folder of those of workers; `None` without encryption."""
        return (Path(self.secret_key_file), Path(self.workers_keys_dir)) if self.secret_key_file else None

    def to_text(self) -> str:
        """Return the content of the side file. It names keys, and holds none."""
        return json.dumps({"format": FORMAT, **self.__dict__}, indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> PythonProxySettings:
        """Read the side file.

        Raises:
            DescriptionError: If it is missing, of another format, or has fields that this version does not know.
        """
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(fields, dict) or fields.pop("format", None) != FORMAT:
                raise DescriptionError(f"{path} is no side file of format {FORMAT}: add the model again with --replace")
            return cls(**fields)
        except (OSError, TypeError, ValueError) as error:
            if isinstance(error, DescriptionError):
                raise
            raise DescriptionError(f"the side file {path} cannot be read: {error}") from error
