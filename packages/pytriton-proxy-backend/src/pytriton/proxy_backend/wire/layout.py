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

    DECOUPLED = 1 << 0  # the worker may answer one request with any number of responses
    CANCEL = 1 << 1  # the worker reads CANCEL
    CALLS = 1 << 2  # calls into the server, over a connection of their own
    RESCHEDULE = 1 << 3  # a response may be RESCHEDULE
    EXECUTED = 1 << 4  # the worker says when it can take the next batch: EXECUTED
    CONTINUES = 1 << 5  # a response that is an error may be CONTINUES
    AHEAD = 1 << 6  # the worker may get its next batch before it has answered the current one
    REFERENCES = 1 << 7  # a tensor of a response may be one of the inputs
    STANDS_IN = 1 << 8  # the worker only answers batches with the reason why the model is not ready
    PACE = 1 << 9  # the worker reads PAUSE and RESUME
    ASLEEP = 1 << 10  # the worker keeps the place of one that sleeps: it gets WAKE and no batches
    TOGETHER = 1 << 11  # the worker may send response records of several batches together: RESPONSES


# The capabilities of every worker here and of the Python proxy; others are added where they exist.
CAPABILITIES = Capability.DECOUPLED | Capability.CANCEL


class MessageType(enum.IntEnum):
    """The first field of every packet."""

    HELLO = 1  # worker -> proxy: greeting
    WELCOME = 2  # proxy -> worker: greeting
    REFUSE = 3  # proxy -> worker: greeting whose text is the reason; the connection ends
    SEGMENT = 4  # owner -> peer, with the memfd: a new segment of the sender's arena
    SEGMENT_CLOSE = 5  # owner -> peer: the segment will not be used again
    BATCH = 6  # proxy -> worker: a batch record lies at (segment, offset, length)
    RESPONSE = 7  # worker -> proxy: a response record lies at (segment, offset, length)
    FAIL = 8  # worker -> proxy: the whole batch failed; the reason is in the message
    RELEASE = 9  # peer -> owner: the block at (segment, offset) is free again
    CANCEL = 10  # proxy -> worker: request `index` of the batch is not wanted any more
    DETACH = 11  # worker -> proxy: asks for no more batches; the proxy closes when all are answered
    ACTIVITY = 12  # in place of a greeting: asks for the batches in flight; also the answer, which ends the connection
    CALLER = 13  # in place of HELLO, with the same greeting: this connection is for calls
    CALL = 14  # worker -> proxy, in one: an operation, with a CallBody and a text; a batch record may lie there
    RESULT = 15  # proxy -> worker, in one: the call is done, and its value
    EXECUTED = 16  # worker -> proxy: the callable has returned from the batch, whether or not it is answered
    PAUSE = 17  # proxy -> worker: the caller of request `index` does not read: send no more for now
    RESUME = 18  # proxy -> worker: the caller reads again
    WAKE = 19  # proxy -> worker that is asleep: a batch waits, and no worker is awake
    RESPONSES = 20  # worker -> proxy: response records of several batches lie there, one behind the other


class MessageFlag(enum.IntFlag):
    """Flags of a packet."""

    INPUT_RELEASED = 1 << 0  # RESPONSE, FAIL, RESULT: the batch's input block is free again
    BATCH_DONE = 1 << 1  # RESPONSE, FAIL, RESULT: nothing more comes for this batch
    STREAM = 1 << 2  # CALL of INFER: any number of responses may come
    EXECUTING = 1 << 3  # RESPONSE, FAIL, with BATCH_DONE: EXECUTED is still to come


class Operation(enum.IntEnum):
    """What a CALL asks for; its `index`."""

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

    FINAL = 1 << 0  # nothing more comes for this request
    ERROR = 1 << 1
    EMPTY = 1 << 2  # no outputs: only ends the request (decoupled)
    RESCHEDULE = 1 << 3  # no outputs: the request goes back to Triton's scheduler
    CONTINUES = 1 << 4  # with ERROR: more comes for this request (decoupled)


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
