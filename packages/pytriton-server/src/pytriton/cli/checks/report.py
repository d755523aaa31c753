"""The folder that a command writes its logs and files to, and the ZIP that they end in."""

import datetime
import logging
import shutil
import tempfile
import zipfile
from pathlib import Path
from types import TracebackType

_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(threadName)s: %(message)s"


class ReportError(Exception):
    """The folder or the ZIP cannot be made; the text says why and what to do."""


class Report:
    """Context manager: makes a folder, collects the logs of this process in it, and zips and removes it."""

    def __init__(self, command: str, workspace: Path | None, *, zip_report: bool) -> None:
        self._command = command
        self._workspace = workspace
        self._zip_report = zip_report
        self._handler: logging.Handler | None = None
        self._level = logging.NOTSET
        self._propagate = True
        self.folder = Path()
        """The folder to write to."""
        self.kept: list[Path] = []
        """The files that stay: the folder, the ZIP."""

    def __enter__(self) -> "Report":
        """Make the folder and start to collect the logs."""
        try:
            if self._workspace is None:
                self.folder = Path(tempfile.mkdtemp(prefix=f"pytriton-{self._command}-"))
            else:
                self.folder = self._workspace.expanduser().absolute()
                self.folder.mkdir(parents=True)
        except FileExistsError:
            raise ReportError(
                f"The workspace {self.folder} exists already. Give a path that does not exist yet, or none at all."
            ) from None
        except OSError as error:
            raise ReportError(f"The workspace {self.folder} cannot be made: {error.strerror or error}.") from error
        logger = logging.getLogger("pytriton")
        self._handler = logging.FileHandler(self.folder / f"{self._command}.log", encoding="utf-8")
        self._handler.setFormatter(logging.Formatter(_LOG_FORMAT))
        self._level, self._propagate = logger.level, logger.propagate
        logger.addHandler(self._handler)
        logger.setLevel(logging.DEBUG)
        # The steps print what the terminal has to show.
        logger.propagate = False
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the log, make the ZIP, and remove a temporary folder."""
        logger = logging.getLogger("pytriton")
        if self._handler is not None:
            logger.removeHandler(self._handler)
            self._handler.close()
        logger.setLevel(self._level)
        logger.propagate = self._propagate
        try:
            # After an interrupt no ZIP is made.
            if self._zip_report and (exc_type is None or issubclass(exc_type, Exception)):
                self.kept.append(self._make_zip())
        finally:
            if self._workspace is None:
                shutil.rmtree(self.folder, ignore_errors=True)
            else:
                self.kept.append(self.folder)

    def _make_zip(self) -> Path:
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S-%f")
        path = Path.cwd() / f"pytriton-{self._command}-{stamp}.zip"
        try:
            with zipfile.ZipFile(path, "x", zipfile.ZIP_DEFLATED) as archive:
                for file in sorted(self.folder.rglob("*")):
                    if file.is_file():
                        archive.write(file, file.relative_to(self.folder))
        except OSError as error:
            raise ReportError(
                f"The ZIP {path} cannot be written: {error.strerror or error}. Go to a folder that you may write to, "
                "or leave --zip out."
            ) from error
        return path
