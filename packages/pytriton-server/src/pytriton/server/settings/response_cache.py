"""How much memory the answers of bound models may take that are given again: what is said of Triton's local cache."""

from collections.abc import Iterable

_SIZE = "local,size="


def local_cache_bytes(cache_config: Iterable[str] | None) -> int:
    """Return the bytes that `TritonConfig.cache_config` gives the cache `local`; 0 without one."""
    sizes = [item.removeprefix(_SIZE).strip() for item in cache_config or () if item.startswith(_SIZE)]
    # Triton refuses a size that is no number.
    return int(sizes[-1]) if sizes and sizes[-1].isdecimal() else 0
