"""What each decorator adds to a call: `python benchmarks/decorators.py`, in an environment with pytriton-decorators.

Every decorator around a callable that does nothing, less that callable on its own: microseconds per batch, the best of
many rounds. The two are timed in turns, so that a machine that is busy for a while is busy for both. Two inputs `(rows,
4)` and, where a decorator needs it, a third `(rows, 1)`; one output. Where a decorator has work to do with the arrays,
it is also compared with a function that does the same work by hand.

"above @batch" is the call of a server that has the batch as one array per input, as nearly always; "a list of requests"
that of a unit test, or of a server whose requests differ in their inputs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import Any

import numpy as np

from pytriton.decorators import (
    batch,
    fill_optionals,
    first_value,
    group_by_keys,
    group_by_values,
    pad_batch,
    sample,
    triton_context,
)
from pytriton.decorators.serving import set_served_model
from pytriton.model_config import DynamicBatcher
from pytriton.model_config.triton_model_config import TensorSpec, TritonModelConfig

DEFAULT = np.zeros(1, np.float32)
Call = Callable[[], Any]


def arrays(a: Any, b: Any, t: Any = None, triton_context: Any = None) -> dict[str, Any]:
    """Return the bare callable of arrays."""
    return {"y": a}


def requests(requests: Any, triton_context: Any = None) -> Any:
    """Return the bare callable of requests."""
    return requests


def padded_by_hand(a: Any, b: Any) -> dict[str, Any]:
    """Return what `pad_batch` does, written out for two inputs and 8, 40 or 64 rows."""
    rows = len(a)
    missing = next(size for size in (8, 40, 64) if size >= rows) - rows
    a = np.concatenate([a, np.repeat(a[-1:], missing, axis=0)])
    b = np.concatenate([b, np.repeat(b[-1:], missing, axis=0)])
    return {"y": arrays(a, b)["y"][:rows]}


def grouped_by_hand(a: Any, b: Any, t: Any) -> dict[str, Any]:
    """Return what `group_by_values` does, written out for three inputs."""
    output = np.empty_like(a)
    for value in np.unique(t):
        rows = np.flatnonzero(t[:, 0] == value)
        output[rows] = arrays(a[rows], b[rows], t[rows])["y"]
    return {"y": output}


def columns(rows: int, *, keyed: int = 0) -> dict[str, Any]:
    """Return the inputs of a batch; `keyed` values in turn in the third of them."""
    inputs = {name: np.zeros((rows, 4), np.float32) for name in "ab"}
    if keyed:
        inputs["t"] = (np.arange(rows) % keyed).astype(np.float32).reshape(rows, 1)
    return inputs


def cases(rows: int) -> dict[str, tuple[Call, Call]]:
    """Return the decorated call and the bare one, by what is measured."""
    two, keyed, several = columns(rows), columns(rows, keyed=1), columns(rows, keyed=4)
    full = columns(64)
    single = [{name: array[row : row + 1] for name, array in two.items()} for row in range(rows)]
    made = {
        "group_by_values, one group": group_by_values("t")(arrays),
        "group_by_values + first_value": group_by_values("t")(first_value("t")(arrays)),
        "first_value": first_value("t")(arrays),
        "pad_batch, nothing to pad": pad_batch(arrays),
        "pad_batch, to the next size": pad_batch(arrays),
        "triton_context": triton_context(arrays),
        "group_by_values, four groups": group_by_values("t")(arrays),
    }
    inputs: dict[str, dict[str, Any]] = {
        **dict.fromkeys(made, keyed),
        "pad_batch, nothing to pad": full,
        "pad_batch, to the next size": two,
        "triton_context": two,
        "group_by_values, four groups": several,
    }
    found: dict[str, tuple[Call, Call]] = {
        name: (partial(func, **inputs[name]), partial(arrays, **inputs[name])) for name, func in made.items()
    }
    found["pad_batch, over padding by hand"] = (
        partial(made["pad_batch, to the next size"], **two),
        partial(padded_by_hand, **two),
    )
    found["group_by_values, over grouping by hand"] = (
        partial(made["group_by_values, four groups"], **several),
        partial(grouped_by_hand, **several),
    )
    sizes = [1] * rows
    base: Any = batch(arrays)
    below = base.__pytriton_whole__
    relays: dict[str, tuple[Any, dict[str, Any]]] = {
        "group_by_keys above @batch": (group_by_keys(base), two),
        "fill_optionals above @batch, nothing missing": (fill_optionals(t=DEFAULT)(base), keyed),
        "fill_optionals above @batch": (fill_optionals(t=DEFAULT)(base), two),
        "triton_context above @batch": (triton_context(base), two),
    }
    for name, (func, given) in relays.items():
        whole = func.__pytriton_whole__
        found[name] = (partial(whole, given, sizes, list), partial(below, given, sizes, list))
    found["batch"] = (partial(below, two, sizes, list), partial(arrays, **two))
    lists = {
        "batch": base,
        "group_by_keys": group_by_keys(requests),
        "fill_optionals": fill_optionals(t=DEFAULT)(requests),
        "triton_context": triton_context(requests),
    }
    if rows == 1:
        lists["sample"] = sample(arrays)
    for name, func in lists.items():
        found[f"{name}, a list of requests"] = (partial(func, single), partial(requests, single))
    return found


def measure(pairs: dict[str, tuple[Call, Call]], rounds: int) -> dict[str, float]:
    """Return by how many microseconds each decorated call takes longer than the bare one."""
    best = {name: [float("inf"), float("inf")] for name in pairs}
    for _ in range(rounds):
        for name, pair in pairs.items():
            for side, call in enumerate(pair):
                count = 200
                begin = time.perf_counter()
                for _ in range(count):
                    call()
                best[name][side] = min(best[name][side], (time.perf_counter() - begin) / count * 1e6)
    return {name: decorated - bare for name, (decorated, bare) in best.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100, help="rounds of 200 calls each (default: %(default)s)")
    rounds: int = parser.parse_args().rounds
    specs = [TensorSpec("a", (4,), np.float32), TensorSpec("b", (4,), np.float32), TensorSpec("t", (1,), np.float32)]
    config = TritonModelConfig(
        "benchmark", max_batch_size=64, batcher=DynamicBatcher(preferred_batch_size=[8, 40, 64]), inputs=specs
    )
    context = copy_context()
    context.run(set_served_model, arrays, config)
    tables = {rows: context.run(measure, cases(rows), rounds) for rows in (1, 32)}
    names = list(dict.fromkeys(name for table in tables.values() for name in table))
    print("Added to a batch, in microseconds:")
    print("| | 1 request | 32 requests |\n|---|---|---|")
    for name in names:
        cells = [f"{table[name]:.1f}" if name in table else "" for table in tables.values()]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
