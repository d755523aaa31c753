"""Limits that Python and C++ obey alike, beside the numbers of the protocol in `layout.py`.

`python3 tools/dev.py reference` writes `native/proxy/shared_limits.h` from them.
"""

from __future__ import annotations

from typing import Final

ACCELERATED_DIMS: Final = 8
"""Batches with a tensor of more dimensions are served by Python, not by the accelerator."""
COMPARED_BYTES: Final = 64 << 10
"""Metadata of a record is compared with that of earlier records up to so many bytes."""
LARGEST_COPIED_BYTES: Final = 2 << 20
"""Outputs up to so many bytes are copied, which costs less than to send them from where they are."""
SMALL_RECORD_BYTES: Final = 64 << 10
"""Payloads of a record up to so many bytes are copied without letting other threads run meanwhile."""
ACKNOWLEDGED_LATER_BYTES: Final = 64 << 10
"""A response up to so many bytes may be acknowledged with the next batch, a larger one is at once."""
