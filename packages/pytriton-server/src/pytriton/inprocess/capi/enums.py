"""The enumerations of Triton's C API, with the values of the C declarations (`tritonserver.h`, API 1.34)."""

# ruff: noqa: N815 - the device types have the names of dlpack.h, which code for Triton's own API spells out.

from __future__ import annotations

from enum import IntEnum, IntFlag


class DataType(IntEnum):
    """Element type of a tensor. `BYTES` is a string of any length per element."""

    INVALID = 0
    BOOL = 1
    UINT8 = 2
    UINT16 = 3
    UINT32 = 4
    UINT64 = 5
    INT8 = 6
    INT16 = 7
    INT32 = 8
    INT64 = 9
    FP16 = 10
    FP32 = 11
    FP64 = 12
    BYTES = 13
    BF16 = 14


class MemoryType(IntEnum):
    """Where the elements of a tensor lie."""

    CPU = 0
    CPU_PINNED = 1
    GPU = 2


class ParameterType(IntEnum):
    """Type of the value of a parameter of a request, a response, a load or a metric."""

    STRING = 0
    INT = 1
    BOOL = 2
    DOUBLE = 3
    BYTES = 4


class InstanceGroupKind(IntEnum):
    """What the instances of a model run on."""

    AUTO = 0
    CPU = 1
    GPU = 2
    MODEL = 3


class LogFormat(IntEnum):
    """How a log line begins: `DEFAULT` is glog's short form, `ISO8601` has a whole date."""

    DEFAULT = 0
    ISO8601 = 1


class MetricFormat(IntEnum):
    """Text form of the metrics."""

    PROMETHEUS = 0


class MetricKind(IntEnum):
    """Kind of a metric: `COUNTER` only grows, `GAUGE` holds any value, `HISTOGRAM` counts observations in buckets."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


class TraceLevel(IntFlag):
    """What a trace of a request records."""

    DISABLED = 0
    MIN = 1
    MAX = 2
    TIMESTAMPS = 4
    TENSORS = 8


class TraceActivity(IntEnum):
    """A point in the life of a request that a trace records."""

    REQUEST_START = 0
    QUEUE_START = 1
    COMPUTE_START = 2
    COMPUTE_INPUT_END = 3
    COMPUTE_OUTPUT_START = 4
    COMPUTE_END = 5
    REQUEST_END = 6
    TENSOR_QUEUE_INPUT = 7
    TENSOR_BACKEND_INPUT = 8
    TENSOR_BACKEND_OUTPUT = 9
    CUSTOM_ACTIVITY = 10


class RequestFlag(IntFlag):
    """Place of a request in a sequence."""

    SEQUENCE_START = 1
    SEQUENCE_END = 2


class LogLevel(IntEnum):
    """Severity of a record of Triton's log."""

    INFO = 0
    WARN = 1
    ERROR = 2
    VERBOSE = 3


class ModelControlMode(IntEnum):
    """Who decides which models are loaded.

    `NONE`: all models of the repository, once, at the start. `POLL`: also what changes there, on
    `Server.poll_model_repository()`. `EXPLICIT`: `Options.startup_models`, then `Server.load()` and `Server.unload()`.
    """

    NONE = 0
    POLL = 1
    EXPLICIT = 2


class RateLimitMode(IntEnum):
    """Whether executions wait for their turn: `OFF`, or `EXEC_COUNT` by priority and count of executions."""

    OFF = 0
    EXEC_COUNT = 1


class ModelBatchFlag(IntFlag):
    """How a model batches requests: unknown, or along the first dimension."""

    UNKNOWN = 1
    FIRST_DIM = 2


class ModelTxnPropertyFlag(IntFlag):
    """How many responses a request gets: exactly one, or any number."""

    ONE_TO_ONE = 1
    DECOUPLED = 2


class DLDeviceType(IntEnum):
    """Device of a DLPack tensor, with the values of `dlpack.h`."""

    kDLCPU = 1
    kDLCUDA = 2
    kDLCUDAHost = 3
    kDLOpenCL = 4
    kDLVulkan = 7
    kDLMetal = 8
    kDLVPI = 9
    kDLROCM = 10
    kDLROCMHost = 11
    kDLExtDev = 12
    kDLCUDAManaged = 13
    kDLOneAPI = 14
    kDLWebGPU = 15
    kDLHexagon = 16
    kDLMAIA = 17
