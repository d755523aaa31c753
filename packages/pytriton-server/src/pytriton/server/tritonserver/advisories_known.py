"""The published vulnerabilities of tritonserver, as data.

Sources: ids, severities (CVSS 3.1 base scores), descriptions and first fixed releases are those of NVIDIA's security
bulletins 5509 (2023), 5535, 5546, 5565 (2024), 5612, 5687, 5691, 5723, 5734 (2025), 5790, 5816, 5828, 5848, 5853, 5865
and 5875 (2026) in the repository NVIDIA/product-security on GitHub, read as they were on 2026-09-08. Versions are those
that the repository triton-inference-server/server names for the branches of these releases.

The bulletins rarely say which request does the harm. Where a change between a release and the one before fits, `change`
names its pull request, and component and summary follow it. That it is the one is our reading, not NVIDIA's word; where
two numbers fit two changes alike, which is which is arbitrary. Where none is known to fit, `change` is empty.

Left out: the plugin for MLflow (CVE-2026-47487), which is no part of the server.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["ADVISORIES", "KNOWN_AS_OF", "NEWEST_KNOWN_VERSION", "RELEASES", "Advisory", "Guard"]

KNOWN_AS_OF = "2026-09-08"
"""Day of the newest bulletin in the list."""

NEWEST_KNOWN_VERSION = "2.71.0"
"""The newest version whose changes were read for the list."""

RELEASES = {
    "2.40.0": "23.11",
    "2.45.0": "24.04",
    "2.46.0": "24.05",
    "2.50.0": "24.09",
    "2.53.0": "24.12",
    "2.58.0": "25.05",
    "2.59.0": "25.06",
    "2.59.1": "25.07",
    "2.60.0": "25.08",
    "2.61.0": "25.09",
    "2.62.0": "25.10",
    "2.65.0": "26.01",
    "2.66.0": "26.02",
    "2.67.0": "26.03",
    "2.68.0": "26.04",
    "2.69.0": "26.05",
    "2.70.0": "26.06",
    "2.71.0": "26.07",
}
"""Versions and the releases that they came with."""


class Guard(enum.Enum):
    """What the guard does about a vulnerability."""

    COVERED = "covered"
    PARTLY = "partly"
    NOT_COVERED = "not covered"
    UNKNOWN = "not known"
    """Nobody outside of NVIDIA was told which request does it."""


@dataclass(frozen=True)
class Advisory:
    """A published vulnerability of tritonserver.

    Attributes:
        id: Its number.
        severity: CVSS 3.1 base score of the bulletin.
        fixed_in: First version of tritonserver without it.
        component: Where it is.
        guard: What the guard does about it.
        summary: What happens, in a sentence.
        also: What else helps, by default or by a setting; empty where nothing does.
        change: Pull request that fits, `repository#number`; empty where none is known.
    """

    id: str
    severity: float
    fixed_in: str
    component: str
    guard: Guard
    summary: str
    also: str = ""
    change: str = ""

    @property
    def release(self) -> str:
        """The release that `fixed_in` came with, such as `25.07`."""
        return RELEASES[self.fixed_in]


_TOKEN = "Asks for the access token by default."
_PYTHON = "Only models of Triton's Python backend have it; bound models do not."
_SHARED = f"{_PYTHON} The guard refuses to register that memory, and registering asks for the access token by default."
_CLOUD = "Vertex AI and SageMaker are off by default; let only the cloud's proxy reach their port."
_DALI = "Only models of the DALI backend have it, which the bundled server lacks."
_HOSTED = "Only who may write models or load them can do it."
_PROXY = "A proxy in front that limits requests helps."

_COVERED, _PARTLY, _NOT, _UNKNOWN = Guard.COVERED, Guard.PARTLY, Guard.NOT_COVERED, Guard.UNKNOWN

# fmt: off
ADVISORIES: tuple[Advisory, ...] = (
    Advisory("CVE-2023-31036", 7.5, "2.40.0", "model control", _NOT,
             "A path that climbs out of the model repository reaches other files when a model is loaded.", _TOKEN),
    Advisory("CVE-2024-0087", 9.0, "2.45.0", "log settings", _NOT,
             "A caller makes the server log into any of its files.", _TOKEN),
    Advisory("CVE-2024-0100", 6.5, "2.45.0", "trace settings", _NOT,
             "A caller makes the server write traces over system files.", _TOKEN),
    Advisory("CVE-2024-0088", 5.5, "2.45.0", "shared memory", _NOT,
             "A registered region leads to accesses outside of it.", _TOKEN),
    Advisory("CVE-2024-0103", 5.4, "2.46.0", "not told", _UNKNOWN,
             "Trouble in the network leaves something uninitialised, which tells what it should not."),
    Advisory("CVE-2024-0095", 4.3, "2.46.0", "log", _NOT,
             "Texts of a request forge lines of the log."),
    Advisory("CVE-2024-0116", 4.9, "2.50.0", "shared memory", _NOT,
             "A region that is released while a request uses it is read out of bounds.", _TOKEN),
    Advisory("CVE-2024-53880", 4.9, "2.53.0", "model control", _NOT,
             "The size of a file that is sent along with a load request overflows.", _TOKEN, "server#7787"),
    Advisory("CVE-2025-23323", 7.5, "2.58.0", "inference requests", _COVERED,
             "A shape whose product overflows ends the server.", "", "server#8182"),
    Advisory("CVE-2025-23324", 7.5, "2.58.0", "inference requests", _COVERED,
             "A size in a request overflows and ends the server.", "", "server#8182"),
    Advisory("CVE-2025-23325", 7.5, "2.58.0", "HTTP front end", _COVERED,
             "Deeply nested JSON overflows the stack.", "", "server#8172"),
    Advisory("CVE-2025-23326", 7.5, "2.58.0", "inference requests", _COVERED,
             "An overflow of an integer makes a buffer too small.", "", "core#434"),
    Advisory("CVE-2025-23327", 7.5, "2.58.0", "shared memory", _PARTLY,
             "Offset and size of a region overflow, and memory outside of it is read and written.",
             "Needs the name of a registered region; registering asks for the access token by default.", "server#8170"),
    Advisory("CVE-2025-23335", 4.4, "2.58.0", "TensorRT backend", _NOT,
             "A certain configuration of a model and a certain input make an integer wrap.",
             "Only models of the TensorRT backend have it, which the bundled server lacks."),
    Advisory("CVE-2025-23322", 7.5, "2.59.0", "gRPC front end", _NOT,
             "Streams that are cancelled before they are processed free memory twice.",
             "Calls over HTTP are not affected; `allow_grpc=False` closes the port.", "server#8220"),
    Advisory("CVE-2025-23331", 7.5, "2.59.0", "HTTP front end", _COVERED,
             "A shape asks for more memory than there is, and the server ends.", "", "server#8174"),
    Advisory("CVE-2025-23310", 9.8, "2.59.1", "HTTP front end", _COVERED,
             "Many small chunks of a request overflow the stack.", "", "server#8305"),
    Advisory("CVE-2025-23311", 9.8, "2.59.1", "HTTP front end", _COVERED,
             "Crafted HTTP requests overflow the stack.", "", "server#8305"),
    Advisory("CVE-2025-23317", 9.1, "2.59.1", "HTTP front end", _UNKNOWN,
             "A crafted HTTP request runs code of its sender.",
             "No other change of that release fits than the one of CVE-2025-23310, which the guard covers."),
    Advisory("CVE-2025-23318", 8.1, "2.59.1", "Python backend", _PARTLY,
             "Memory shared with its processes is written out of bounds.", _SHARED, "python_backend#405"),
    Advisory("CVE-2025-23319", 8.1, "2.59.1", "Python backend", _PARTLY,
             "A request leads to writes outside of shared memory.", _SHARED, "python_backend#405"),
    Advisory("CVE-2025-23268", 8.0, "2.59.1", "DALI backend", _NOT,
             "Loading a crafted model runs code.", f"{_DALI} {_HOSTED}"),
    Advisory("CVE-2025-23320", 7.5, "2.59.1", "Python backend", _PARTLY,
             "The error for a request that is too large tells the name of the backend's shared memory.", _SHARED,
             "python_backend#403"),
    Advisory("CVE-2025-23321", 7.5, "2.59.1", "inference requests", _COVERED,
             "Asking for the classification of an output of texts divides by zero.", "", "server#8267"),
    Advisory("CVE-2025-23333", 5.9, "2.59.1", "Python backend", _PARTLY,
             "Altered shared memory is read out of bounds.", _SHARED, "python_backend#406"),
    Advisory("CVE-2025-23334", 5.9, "2.59.1", "Python backend", _PARTLY,
             "A request leads to reads outside of shared memory.", _SHARED, "python_backend#406"),
    Advisory("CVE-2025-23316", 9.8, "2.60.0", "Python backend, model control", _NOT,
             "The name of a model in a load request runs as a command of the shell.", _TOKEN, "python_backend#404"),
    Advisory("CVE-2025-23328", 7.5, "2.60.0", "shared memory", _NOT,
             "A crafted request writes outside of a registered region.",
             "Needs the name of a registered region; registering asks for the access token by default.", "server#8335"),
    Advisory("CVE-2025-23329", 7.5, "2.60.0", "Python backend", _COVERED,
             "A caller who finds the backend's shared memory registers it and corrupts it.", _TOKEN, "server#8336"),
    Advisory("CVE-2025-23336", 4.4, "2.60.0", "Python backend", _NOT,
             "Loading a misconfigured model ends the server.", _HOSTED, "python_backend#408"),
    Advisory("CVE-2025-33202", 7.5, "2.61.0", "HTTP front end", _COVERED,
             "Very large requests overflow the stack.", "", "server#8411"),
    Advisory("CVE-2025-33211", 7.5, "2.62.0", "HTTP front end", _COVERED,
             "A quantity in a request is not checked.", "", "server#8432"),
    Advisory("CVE-2025-33201", 7.5, "2.62.0", "HTTP front end", _COVERED,
             "Very large requests meet an error that nobody expects.", "", "server#8447"),
    Advisory("CVE-2025-33238", 7.5, "2.65.0", "SageMaker", _NOT,
             "Requests at the same time meet an exception.", _CLOUD, "server#8563"),
    Advisory("CVE-2025-33254", 7.5, "2.65.0", "SageMaker", _NOT,
             "Requests at the same time corrupt what the front end knows of its models.", _CLOUD, "server#8571"),
    Advisory("CVE-2026-24158", 7.5, "2.65.0", "HTTP front end", _COVERED,
             "A small compressed request takes all memory when it is unpacked.", "", "server#8570"),
    Advisory("CVE-2026-24146", 7.5, "2.66.0", "inference requests", _PARTLY,
             "A large number of outputs ends the server.", _PROXY, "server#8603"),
    Advisory("CVE-2026-24173", 7.5, "2.66.0", "HTTP front end", _COVERED,
             "A malformed request overflows an integer.", "", "server#8619"),
    Advisory("CVE-2026-24174", 7.5, "2.66.0", "HTTP front end", _COVERED,
             "A malformed request has a number converted wrongly.", "", "server#8611"),
    Advisory("CVE-2026-24175", 7.5, "2.66.0", "HTTP front end", _COVERED,
             "A malformed header, Accept-Encoding, ends the server.", "", "server#8637"),
    Advisory("CVE-2026-24147", 4.8, "2.66.0", "model control", _NOT,
             "The file of labels that a configuration names may be any file.", _HOSTED, "core#465"),
    Advisory("CVE-2026-24207", 9.8, "2.67.0", "Vertex AI, SageMaker", _NOT,
             "Their ports do not ask for the token.", _CLOUD, "server#8680"),
    Advisory("CVE-2026-24213", 8.0, "2.67.0", "DALI backend", _NOT,
             "Memory is read out of bounds.", _DALI),
    Advisory("CVE-2026-24214", 8.0, "2.67.0", "DALI backend", _NOT,
             "An integer overflows.", _DALI),
    Advisory("CVE-2026-24209", 7.5, "2.67.0", "SageMaker", _NOT,
             "The path of a model climbs out of the folder of models.", _CLOUD, "server#8659"),
    Advisory("CVE-2026-24210", 7.5, "2.67.0", "inference requests", _COVERED,
             "A shape whose product overflows passes the checks of the core.", "", "core#475"),
    Advisory("CVE-2026-24206", 7.3, "2.67.0", "Vertex AI, SageMaker", _NOT,
             "Their ports do not ask for the token.", _CLOUD, "server#8686"),
    Advisory("CVE-2026-24215", 5.7, "2.67.0", "DALI backend", _NOT,
             "A request takes resources without limit.", _DALI),
    Advisory("CVE-2026-24208", 5.3, "2.67.0", "model control", _NOT,
             "The name of a model climbs out of the model repository.", _TOKEN, "core#472"),
    Advisory("CVE-2026-24264", 7.5, "2.68.0", "not told", _PARTLY,
             "A compressed request takes far more memory than it has bytes.",
             "The guard covers HTTP; whether gRPC is meant is not told."),
    Advisory("CVE-2026-24266", 5.9, "2.68.0", "gRPC front end", _NOT,
             "A stream that asked for gRPC's errors uses memory that is freed already.",
             "Calls over HTTP are not affected; `allow_grpc=False` closes the port.", "server#8708"),
    Advisory("CVE-2026-47625", 7.5, "2.68.0", "shared memory", _NOT,
             "Shared memory may be registered without authorization.", _TOKEN, "server#8721"),
    Advisory("CVE-2026-47476", 7.5, "2.69.0", "HTTP front end", _COVERED,
             "Small chunks without end take memory.", "", "server#8770"),
    Advisory("CVE-2026-47477", 7.5, "2.69.0", "HTTP front end", _COVERED,
             "Deeply nested JSON overflows the stack of the parser.", "", "common#156"),
    Advisory("CVE-2026-47478", 7.5, "2.69.0", "shared memory", _NOT,
             "Registering a region anew uses a descriptor that was closed.", _TOKEN, "server#8733"),
    Advisory("CVE-2026-47479", 7.5, "2.69.0", "gRPC front end", _NOT,
             "Many short texts take far more memory than they have bytes.", _PROXY, "server#8769"),
    Advisory("CVE-2026-47480", 7.5, "2.69.0", "model control", _NOT,
             "An exception about a path ends the server when a model is loaded.", _TOKEN, "core#491"),
    Advisory("CVE-2026-47482", 7.5, "2.69.0", "HTTP front end", _PARTLY,
             "Compressed requests that fail leave their memory behind.", _PROXY, "server#8764"),
    Advisory("CVE-2026-47481", 6.5, "2.69.0", "not told", _UNKNOWN,
             "Another path or channel leads past authentication."),
    Advisory("CVE-2026-47627", 9.8, "2.70.0", "model control", _NOT,
             "A path that climbs out of its folder passes the check.", _TOKEN, "core#497"),
    Advisory("CVE-2026-47628", 7.5, "2.70.0", "not told", _UNKNOWN,
             "Resources are taken without limit."),
    Advisory("CVE-2026-47629", 7.5, "2.70.0", "HTTP front end", _COVERED,
             "A number in a header is not checked.", "", "server#8794"),
    Advisory("CVE-2026-47606", 6.5, "2.70.0", "SageMaker", _NOT,
             "An absolute path leads out of the folder of models.", _CLOUD, "server#8791"),
    Advisory("CVE-2026-47630", 5.5, "2.70.0", "Python backend", _NOT,
             "An archive of an environment unpacks to any place.", _HOSTED, "python_backend#437"),
    Advisory("CVE-2026-16497", 7.5, "2.71.0", "not told", _UNKNOWN,
             "A loop runs for far too long."),
)
# fmt: on
"""All of them, in the order of the versions that fixed them."""
