"""Limits that Python and C++ obey alike, beside the numbers of the protocol in `layout.py`.

`python3 tools/dev.py reference` writes `native/proxy/shared_limits.h` from them.
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
