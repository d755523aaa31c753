"""Protocol 1 in Python: every number that crosses the process border.

`docs/protocol.md` is the normative text and `native/proxy/wire/protocol.h` the twin in C++; the golden vectors in
`tests/golden` are read by both. All numbers are little-endian. A record in an arena looks like this::

    0            64                     tensors_offset                        metadata_length
    +------------+----------------------+--------------------+----------------+-----------+-----------+--
    | header     | one entry per        | one entry per      | dims, names,   | payload 0 | payload 1 | ..
    | (64 bytes) | request or response  | tensor             | ids, texts     |           |           |
    +------------+----------------------+--------------------+----------------+-----------+-----------+--
                                                                              aligned to 64 bytes each
"""

from __future__ import annotations

import enum
import struct

MAGIC = b"PYTRITON"
MAJOR = 1
MINOR = 0


class Capability(enum.IntFlag):
    """What a peer can do beyond the base of the protocol; a pair uses what both have."""

    DECOUPLED = 1 << 0
    CANCEL = 1 << 1
    CALLS = 1 << 2
    RESCHEDULE = 1 << 3
    EXECUTED = 1 << 4
    CONTINUES = 1 << 5
    AHEAD = 1 << 6
    REFERENCES = 1 << 7
    STANDS_IN = 1 << 8
    PACE = 1 << 9
    ASLEEP = 1 << 10
    TOGETHER = 1 << 11


# The capabilities of every worker here and of the Python proxy; others are added where they exist.
CAPABILITIES = Capability.DECOUPLED | Capability.CANCEL


class MessageType(enum.IntEnum):
    """The first field of every packet."""

    HELLO = 1
    WELCOME = 2
    REFUSE = 3
    SEGMENT = 4
    SEGMENT_CLOSE = 5
    BATCH = 6
    RESPONSE = 7
    FAIL = 8
    RELEASE = 9
    CANCEL = 10
    DETACH = 11
    ACTIVITY = 12
    CALLER = 13
    CALL = 14
    RESULT = 15
    EXECUTED = 16
    PAUSE = 17
    RESUME = 18
    WAKE = 19
    RESPONSES = 20


class MessageFlag(enum.IntFlag):
    """Flags of RESPONSE, FAIL and RESULT; STREAM also of CALL, and EXECUTING of RESPONSE and FAIL alone."""

    INPUT_RELEASED = 1 << 0
    BATCH_DONE = 1 << 1
    STREAM = 1 << 2
    EXECUTING = 1 << 3


class Operation(enum.IntEnum):
    """What a CALL is about."""

    INFER = 1
    LOAD_MODEL = 2
    UNLOAD_MODEL = 3
    MODEL_READY = 4
    METRIC_FAMILY = 5
    METRIC = 6
    METRIC_INCREMENT = 7
    METRIC_SET = 8
    METRIC_OBSERVE = 9
    METRIC_VALUE = 10
    METRIC_DELETE = 11
    METRIC_FAMILY_DELETE = 12
    LOG = 13
    READINESS = 14


class ModelFlag(enum.IntFlag):
    """Flags of WELCOME."""

    BATCHING = 1 << 0
    DECOUPLED = 1 << 1


class RequestFlag(enum.IntFlag):
    """Flags of a request entry."""

    SEQUENCE_START = 1 << 0
    SEQUENCE_END = 1 << 1


class ResponseFlag(enum.IntFlag):
    """Flags of a response entry."""

    FINAL = 1 << 0
    ERROR = 1 << 1
    EMPTY = 1 << 2
    RESCHEDULE = 1 << 3
    CONTINUES = 1 << 4


class TensorSource(enum.IntEnum):
    """What the place of a payload counts from."""

    RECORD = 0
    BATCH = 1


class ErrorCode(enum.IntEnum):
    """Triton's `TRITONSERVER_Error_Code`."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7


class ParameterType(enum.IntEnum):
    """Triton's `TRITONSERVER_ParameterType`."""

    STRING = 0
    INT = 1
    BOOL = 2
    DOUBLE = 3


# type, flags, size, batch, consumed, segment, index, offset, length
MESSAGE = struct.Struct("<HHIQQIIQQ")
# magic, major, minor, pid, uid, max_in_flight, capabilities, model_flags, text_length, model_version, arena_budget,
# arena_idle_ms, execution_timeout_ms; then the text
GREETING = struct.Struct("<8sHHIIIQIIQQQQ")
GREETING_VERSION = struct.Struct("<8sHH")
# subject, value, parent_batch, parent_request; then the text
CALL = struct.Struct("<qdQI4x")
MAX_PACKET = 4096
MAX_TEXT = MAX_PACKET - MESSAGE.size - GREETING.size

ALIGNMENT = 64
MAX_METADATA = 1 << 30
BATCH_MAGIC = 0x31425450
RESPONSE_MAGIC = 0x31525450
WHOLE_BATCH = 0xFFFFFFFF

# magic, entry_count, tensor_count, batch, metadata_length, record_length, entries_offset, tensors_offset, received_ns,
# sent_ns
RECORD = struct.Struct("<III4xQQQIIQQ")
RECORD_BATCH_OFFSET = 16
RECORD_LENGTH_OFFSET = 32
# rows, flags, priority, timeout_us, correlation_id, id, correlation_string, trace_context (offset and length each),
# parameters_offset, parameters_count, outputs_offset, outputs_count, cancelled
REQUEST = struct.Struct("<IIQQQIIIIIIIIIIB7x")
# the fields of it that every batch needs: rows, outputs_offset, outputs_count
REQUEST_BRIEF = struct.Struct("<I60xII8x")
REQUEST_CANCELLED_OFFSET = 72
REQUEST_ROWS = struct.Struct("<I")
REQUEST_TRACE_LENGTH_OFFSET = 52
# request, flags, rows, error_code, error (offset and length), parameters_offset, parameters_count
RESPONSE = struct.Struct("<IIIIIIII16x")
# name (offset and length), dtype, dims_count, owner, dims_offset, payload_offset, payload_length, source
TENSOR = struct.Struct("<IIIIIIQQQ")
# The bytes of an entry that hold place and length of the payload.
TENSOR_PLACE = (24, 40)
TENSOR_LENGTH = struct.Struct("<32xQ")
# place of the payload, its length, and what the place counts from
TENSOR_PAYLOAD = struct.Struct("<QQQ")
# key (offset and length), type, length, value
PARAMETER = struct.Struct("<IIIIQ")
# The bytes of an entry that hold the type.
PARAMETER_TYPE = (8, 12)
STRING_REF = struct.Struct("<II")


def align(value: int, alignment: int = ALIGNMENT) -> int:
    """Round `value` up to a multiple of `alignment`, a power of two."""
    return (value + alignment - 1) & -alignment
