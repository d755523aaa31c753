"""When a tritonserver is started, and when one that died is started again."""

import collections
import dataclasses
import time

from pytriton.exceptions import PyTritonValidationError

_GROWTH = 2.0


@dataclasses.dataclass
class TritonLifecyclePolicy:
    """When the server is started."""

    launch_triton_on_startup: bool = True
    """Whether entering the context manager starts the server, so that `bind` loads each model at once."""
    local_model_store: bool = False
    """Kept for old scripts. Models bound before the start are always read from files."""


DefaultTritonLifecyclePolicy = TritonLifecyclePolicy()
"""Entering the context manager starts the server."""

VertextAILifecyclePolicy = TritonLifecyclePolicy(launch_triton_on_startup=False, local_model_store=True)
"""`run` or `serve` starts the server with all models in place, as Vertex AI wants it: its front end picks the model
then."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """For `Triton(restart=...)`: starts tritonserver again when it dies, with its models and on the same ports.

    Raises:
        PyTritonValidationError: A number is out of its range.
    """

    max_crashes: int = 5
    """After this many deaths or failed starts within `crash_window_s`, it is given up; at least 1."""
    crash_window_s: float = 60.0
    """See `max_crashes`; more than 0 seconds."""
    first_delay_s: float = 0.1
    """How long after the first death within `crash_window_s` the start is, in seconds. Each one more doubles it."""
    max_delay_s: float = 10.0
    """How long it may become, in seconds."""

    def __post_init__(self) -> None:
        """Refuse numbers that are out of range."""
        if isinstance(self.max_crashes, bool) or not isinstance(self.max_crashes, int) or self.max_crashes < 1:
            raise _bad("max_crashes", self.max_crashes, "a whole number of at least 1")
        for name in ("crash_window_s", "first_delay_s", "max_delay_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
                raise _bad(name, value, "a number of seconds of at least 0")
        if not self.crash_window_s > 0:
            raise _bad("crash_window_s", self.crash_window_s, "more than 0 seconds")
        if self.first_delay_s > self.max_delay_s:
            raise _bad("first_delay_s", self.first_delay_s, f"at most max_delay_s, {self.max_delay_s:g}")


class RestartSchedule:
    """Counts crashes and says how long to wait after each."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._crashes: collections.deque[float] = collections.deque(maxlen=policy.max_crashes)

    @property
    def crashes(self) -> int:
        """The number of crashes in the `crash_window_s` up to the last one, which counts as well."""
        return len(self._crashes)

    def next_delay_s(self) -> float | None:
        """Count one crash; return how long to wait before the next start, in seconds, or None: no more of them."""
        policy = self._policy
        now = time.monotonic()
        self._crashes.append(now)
        while now - self._crashes[0] > policy.crash_window_s:
            self._crashes.popleft()
        if len(self._crashes) >= policy.max_crashes:
            return None
        return min(policy.first_delay_s * _GROWTH ** (len(self._crashes) - 1), policy.max_delay_s)


def _bad(name: str, value: object, rule: str) -> PyTritonValidationError:
    return PyTritonValidationError(
        f"RestartPolicy.{name} must be {rule}; got {value!r}.", expected=rule, received=value
    )
