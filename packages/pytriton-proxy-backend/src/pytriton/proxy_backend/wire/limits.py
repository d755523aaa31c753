"""Limits that Python and C++ obey alike, beside the numbers of the protocol in `layout.py`.

`python3 tools/dev.py reference` writes `native/proxy/wire/shared_limits.h` from them. Times are in seconds here and in
nanoseconds there.
"""

from __future__ import annotations

from typing import Final

ACCELERATED_DIMS: Final = 8
"""Batches with a tensor of more dimensions are served by Python, not by the accelerator."""
COMPARED_BYTES: Final = 64 << 10
"""Larger metadata of a record is not compared with that of earlier records."""
LARGEST_COPIED_BYTES: Final = 2 << 20
"""Larger outputs are sent from where they are; copying smaller ones costs less."""
SMALL_RECORD_BYTES: Final = 64 << 10
"""Larger payloads of a record are copied without the GIL, so that other threads can run."""
ACKNOWLEDGED_LATER_BYTES: Final = 64 << 10
"""A larger response is acknowledged at once, a smaller one possibly with the next batch."""
MAX_IN_FLIGHT: Final = 1024
"""A worker has no more batches at once, whatever its greeting asks for."""
FIRST_SEGMENT_BYTES: Final = 1 << 20
"""The first segment of an arena has at least so many; it is kept when the arena is idle."""
ARENA_TIMEOUT_S: Final = 30.0
"""Whoever has no room in its arena waits so long for blocks that the other side gives back."""
MAX_SEGMENTS: Final = 4096
"""An arena has no more segments at once; a peer that announces more is disconnected."""
COUNTED_BUCKETS: Final = 65
"""The powers of two by which a worker counts sizes and times: a 64-bit integer has at most 64 bits."""
COUNTED_PARTS: Final = 4
"""Each power of two of a time has so many buckets of equal width."""
MAX_FRAME_BYTES: Final = 64 << 20
"""The library in tritonserver and the supervisor of hosts send each other no larger frames."""
COLLECT_S: Final = 0.02
"""Without a worker a batch waits so long before it is set aside, while Triton collects the next one."""
DRAIN_S: Final = 0.005
"""After that, batches are set aside at once for so long, which empties Triton's queue."""
READY_GRACE_S: Final = 0.5
"""A model may be without a worker for so long before it says that it is not ready."""
SILENCE_S: Final = 1.0
"""A worker with several batches that sends nothing for so long is dropped when one of them has taken too long."""
TIME_LIMIT_TEXT: Final = "took longer for this request than the model's execution timeout"
"""A part of the text of an error, by which the guard tells what Triton has no code of its own for."""
WORKER_LOST_TEXT: Final = "was lost while it worked on this request"
"""Another one."""
