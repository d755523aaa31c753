"""`MemoryBudget`: how much memory the worker processes of a server may take together, and who sleeps for whom."""

from __future__ import annotations

import bisect
import dataclasses
import enum
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable

from ..errors import AttachError
from ..runtime.statistics import Histogram
from ..system.processes import proportional_bytes, resident_bytes, with_descendants
from ..system.processors import usable_processors
from ..system.threads import keep_on

__all__ = ["LEAST_BUDGET_BYTES", "Account", "AccountState", "MemoryBudget", "NoRoomError", "WakeCounts", "size_text"]

logger = logging.getLogger(__name__)

LEAST_BUDGET_BYTES = 16 << 20
"""The smallest budget: a worker process takes more than that with its interpreter and numpy alone."""

# While a model waits for memory or is about to take some, the budget checks this often which processes have ended or
# are idle.
_STEP_S = 0.05
# The budget checks this often whether a process has grown.
_WATCH_S = 1.0
# The memory that a process shares with others changes with what those do, so even a process whose size has hardly
# changed is measured again after this time.
_REMEMBERED_S = 5.0
_REMEMBERED_SHARE = 0.01
# A model that was busy when the budget asked it to sleep is not asked again before this time has passed.
_DECLINED_S = 0.25
# The budget expects processes that were asked to end to give their memory back within this time.
_COMING_S = 2.0
# A signal handler that closes the budget may have interrupted the thread that holds the lock, so `close` waits for the
# lock this long at most.
_CLOSE_S = 1.0
# A model that was woken stays awake for as long as waking it took, up to this limit. Otherwise two models that do not
# fit into memory together would only wake each other in turn.
_LONGEST_GRACE_S = 5.0
# Other models wait this long at most for a model that starts for the first time. Its size is then what has been
# measured so far.
_LONGEST_START_S = 60.0
_MOST_NAMED = 6


class NoRoomError(AttachError):
    """The memory budget has no room for the workers of a model; the text has the sizes."""


class WakeCounts:
    """How often a model was woken, how long that took, and how often there was no room. Threads may share it."""

    BOUNDS_S = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0)

    def __init__(self) -> None:
        """Begin with none."""
        self.refused = 0
        """How often it was to wake, and there was no room."""
        self._counts = [0] * (len(self.BOUNDS_S) + 1)
        self._sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count a wake-up."""
        self._counts[bisect.bisect_left(self.BOUNDS_S, seconds)] += 1
        self._sum_s += seconds

    @property
    def seconds(self) -> Histogram:
        """How long the wake-ups took until a worker was attached, in seconds."""
        return Histogram(self.BOUNDS_S, tuple(self._counts), self._sum_s)

    @property
    def quantiles_s(self) -> tuple[float, float] | None:
        """The time within which half of the wake-ups were over, and 95 of 100, in seconds; `None` without any."""
        middle_s, late_s = self.quantile_s(0.5), self.quantile_s(0.95)
        return None if middle_s is None or late_s is None else (middle_s, late_s)

    def quantile_s(self, share: float) -> float | None:
        """Return how long that part of the wake-ups took at most, as nearly as buckets tell; `None` without any."""
        wanted, before, low_s = share * sum(self._counts), 0, 0.0
        for high_s, count in zip((*self.BOUNDS_S, math.inf), self._counts, strict=True):
            if count and before + count >= wanted:
                return low_s if math.isinf(high_s) else low_s + (high_s - low_s) * (wanted - before) / count
            before, low_s = before + count, high_s
        return None


class AccountState(enum.Enum):
    """What the processes of a model do, as far as their memory is concerned."""

    ASLEEP = "asleep"
    WAKING = "waking"
    AWAKE = "awake"
    LEAVING = "falling asleep"


@dataclasses.dataclass(eq=False)
class Account:
    """The processes of one model, as a budget sees them. What is not given to it is guarded by the budget.

    Attributes:
        name: The model.
        pids: Returns the processes that are there, those aside that they have started.
        kept: Returns those that stay when the model sleeps, the parents of the others.
        drop: Ends these, until the model wakes, and returns at once.
        is_up: Returns whether all of them have made their callables and are to serve, so that their size is known.
        ask_to_sleep: Asks them to sleep if they have nothing to do, and returns at once; `None` where they cannot.
        extra_share: Returns which part of what they take belongs to processes beyond the fewest of the model.
        give_back: Ends those, when they have finished their requests, and returns at once.
        pinned: Whether the operator wants them awake.
        size: How much they took when they were awake the last time, in bytes; a guess before the first, or `None`.
        is_gone: Returns whether none of them will come any more: all are given up.
        least_size: The least that they took while they were awake, in bytes: what new ones are sure to take.
        leaves_since: When they were asked to sleep, or began to by themselves.
        given_back: How many bytes those take that were to end last because they are more than the fewest.
        given_back_at: When that was.
        wakes: How often they were woken, those before them included.
    """

    name: str
    pids: Callable[[], Collection[int]]
    is_up: Callable[[], bool]
    ask_to_sleep: Callable[[], None] | None = None
    kept: Callable[[], Collection[int]] = tuple
    drop: Callable[[], object] = lambda: None
    extra_share: Callable[[], float] = lambda: 0.0
    give_back: Callable[[], None] = lambda: None
    pinned: bool = False
    size: int | None = None
    is_gone: Callable[[], bool] = lambda: False
    least_size: int | None = None
    wakes: WakeCounts = dataclasses.field(default_factory=WakeCounts)
    state: AccountState = AccountState.ASLEEP
    expected: int = 0
    last_used: float = 0.0
    awake_since: float = 0.0
    woke_in_s: float = 0.0
    declined_at: float = float("-inf")
    leaves_since: float = float("-inf")
    given_back: int = 0
    given_back_at: float = float("-inf")
    is_asked: bool = False
    is_dropped: bool = False
    is_waited_for: bool = False

    @property
    def is_movable(self) -> bool:
        """Whether it can be put to sleep at all."""
        return self.ask_to_sleep is not None and not self.pinned

    @property
    def starts(self) -> bool:
        """Whether it starts for the first time, and others wait until its size is known."""
        return self._is_new and not self.starts_long

    @property
    def starts_long(self) -> bool:
        """Whether it starts for the first time, and has taken so long that nobody waits for it any more."""
        return self._is_new and time.monotonic() - self.awake_since >= _LONGEST_START_S

    @property
    def _is_new(self) -> bool:
        return self.state is AccountState.WAKING and self.least_size is None

    @property
    def what(self) -> str:
        """Why its memory is taken, in a word or two."""
        if self.pinned:
            return "pinned"
        if self.ask_to_sleep is None:
            return "cannot sleep"
        if self.state is not AccountState.AWAKE:
            return "its parent" if self.state is AccountState.ASLEEP and self.kept() else str(self.state.value)
        return "busy" if time.monotonic() - self.declined_at < 2 * _DECLINED_S else "awake"


class MemoryBudget:
    """Shares the memory of worker processes out among models: who wakes gets that of who was used least recently.

    What is compared with the limit is measured: the proportional set size (PSS) of all processes of all models, with
    those that they have started; for one that is about to start, what it took the last time. All methods may be called
    from any thread.
    """

    def __init__(self, limit_bytes: int | None = None, min_awake: int = 0) -> None:
        """Make it.

        Args:
            limit_bytes: How much all of them may take, in bytes; `None` is any amount.
            min_awake: So many models that may sleep stay awake however long nobody calls them, unless another one needs
                their memory.
        """
        self.limit_bytes = limit_bytes
        """How much all of them may take, in bytes; `None` is any amount."""
        self.min_awake = min_awake
        """How many models stay awake."""
        self._changed = threading.Condition()
        self._accounts: list[Account] = []
        # The models that wait for memory, in the order in which they asked.
        self._waiting: list[Account] = []
        self._meter = _Meter()
        self._most_starts = math.inf if limit_bytes is None else math.ceil(usable_processors())
        self._is_watched = False
        self._is_exceeded = False

    def open(self, account: Account) -> None:
        """Take a model in, which has no process yet."""
        with self._changed:
            account.last_used = time.monotonic()
            self._accounts.append(account)
            if self.limit_bytes is not None and not self._is_watched:
                self._is_watched = True
                threading.Thread(target=self._watch, name="pytriton-memory-budget", daemon=True).start()

    def close(self, account: Account) -> None:
        """Forget a model, whose processes have ended."""
        has_lock = self._changed.acquire(timeout=_CLOSE_S)
        try:
            if account in self._accounts:
                self._accounts.remove(account)
            if has_lock:
                self._changed.notify_all()
        finally:
            if has_lock:
                self._changed.release()

    def admit(
        self,
        account: Account,
        timeout_s: float,
        cancelled: Callable[[], bool],
        *,
        after_starts: bool = False,
        is_modest: bool = False,
    ) -> bool:
        """Wait until the processes of a model may start; others are put to sleep for that, if they have nothing to do.

        Args:
            account: The model.
            timeout_s: How long to wait, in seconds.
            cancelled: Asked again and again; true ends the wait.
            after_starts: Whether the time begins when no other model starts for the first time any more. How much one
                takes that does is not known yet, and its own limit ends its start. No more of them start at the same
                time than there are processors.
            is_modest: Whether nobody is put to sleep for it. Then it does not wait for room, but for such starts alone.

        Returns:
            Whether they may; false if `cancelled` says so, or the model was closed meanwhile.

        Raises:
            NoRoomError: There was no room within `timeout_s` seconds, or there never will be.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._waiting.append(account)
            try:
                # A signal handler that stops everything may close the budget in this very thread, so the loop checks
                # for both.
                while not cancelled() and account in self._accounts:
                    starts = after_starts and sum(each.starts for each in self._accounts if each is not account)
                    if starts < self._most_starts and self._make_room(account, is_modest=is_modest):
                        account.state, account.awake_since = AccountState.WAKING, time.monotonic()
                        account.is_dropped = False
                        return True
                    now = time.monotonic()
                    if starts:
                        deadline = now + timeout_s
                    elif is_modest or now >= deadline:
                        raise NoRoomError(
                            self._no_room(account, f" without work to be put to sleep within {timeout_s:.3g} s")
                        )
                    self._changed.wait(_STEP_S)
                return False
            finally:
                account.is_waited_for = False
                self._waiting.remove(account)
                self._changed.notify_all()

    def arrive(self, account: Account, *, woken: bool = True) -> None:
        """Note that the processes of a model have started, or are started again and again.

        Args:
            account: The model.
            woken: Whether it was woken for somebody.
        """
        now = time.monotonic()
        with self._changed:
            if account.state is not AccountState.AWAKE:
                account.woke_in_s = now - account.awake_since if woken else 0.0
                account.state, account.awake_since, account.last_used = AccountState.AWAKE, now, now
            account.is_asked = False
            self._charge(account)
            self._changed.notify_all()

    def grow(self, account: Account, share: float, start: Callable[[], None]) -> bool:
        """Start one more process of a model, if there is room without anybody's sleep; return whether it was started.

        Args:
            account: The model.
            share: How much it takes, as a part of what the model takes now.
            start: Starts it.
        """
        with self._changed:
            size = self._charge(account)
            if self.limit_bytes is not None:
                others = sum(self._charge(each) for each in self._accounts if each is not account)
                # A model whose last process was given up has no running process and takes no memory.
                own = size if account.pids() else 0
                if (self._waiting and own) or others + own + size * share > self.limit_bytes:
                    return False
            start()
            account.size = int(size * (1 + share))
            return True

    def use(self, account: Account) -> None:
        """Note that somebody calls a model."""
        account.last_used = time.monotonic()

    def leave(self, account: Account) -> bool:
        """Note that a model is about to sleep because nobody calls it; return whether it may, by `min_awake`."""
        with self._changed:
            awake = sum(
                each.is_movable and each.state in (AccountState.AWAKE, AccountState.WAKING) for each in self._accounts
            )
            if self.min_awake and awake <= self.min_awake:
                return False
            account.state, account.leaves_since = AccountState.LEAVING, time.monotonic()
            return True

    def stay(self, account: Account) -> None:
        """Note that a model does not sleep after all, because somebody calls it."""
        with self._changed:
            if account.state is AccountState.LEAVING:
                account.state = AccountState.AWAKE
            account.is_asked = False
            account.last_used = account.declined_at = time.monotonic()
            self._changed.notify_all()

    def sleep(self, account: Account) -> None:
        """Note that the processes of a model end."""
        with self._changed:
            # The memory that the processes take now is the estimate of what they will need after they wake.
            self._charge(account)
            account.state, account.is_asked, account.leaves_since = AccountState.ASLEEP, False, time.monotonic()
            self._changed.notify_all()

    def check(self, account: Account, old: Account | None = None) -> None:
        """Refuse a model that has started, and can never start again beside those that do not sleep.

        Args:
            account: The model.
            old: The one whose place it takes, which does not count.

        Raises:
            NoRoomError: It is too large.
        """
        if self.limit_bytes is None:
            return
        with self._changed:
            self._charge(account)
            if self._is_hopeless(account, old):
                raise NoRoomError(self._no_room(account, " who may be put to sleep"))

    def read(self, account: Account) -> int:
        """Return how much the processes of a model take now, in bytes."""
        with self._changed:
            return self._measure(account)

    @property
    def used_bytes(self) -> int:
        """How much all processes take now, in bytes."""
        with self._changed:
            return self._meter.read(pid for each in self._accounts for pid in (*each.pids(), *each.kept()))

    # ---- with the lock ----------------------------------------------------------------------------------------------

    def _measure(self, account: Account) -> int:
        return self._meter.read((*account.pids(), *account.kept()))

    def _charge(self, account: Account) -> int:
        """Return what a model takes, or is about to."""
        now = self._measure(account)
        if account.state is AccountState.ASLEEP:
            return now
        is_gone = account.is_gone()
        # A process that has just ended takes no memory, although its end was not reported yet.
        pids = account.pids()
        is_measured = bool(pids) and all(map(resident_bytes, pids)) and not is_gone and account.is_up()
        if is_measured:
            account.size = now
            account.least_size = now if account.least_size is None else min(now, account.least_size)
        if account.state is AccountState.WAKING and (is_gone or (is_measured and account.ask_to_sleep is None)):
            # No other code notes that the model is awake now.
            account.state = AccountState.AWAKE
        if is_measured or is_gone or account.starts_long:
            return now
        return max(now, account.expected if account.size is None else account.size)

    def _need(self, account: Account) -> int:
        """Return how much a model is going to take: what it took the last time, or as much as the others on average.

        It may have grown larger than what there ever is for it. Then it gets all of that: new processes take less.
        """
        limit = self.limit_bytes or 0
        known = [each.size for each in self._accounts if each.size is not None]
        # Nothing is known about the size of the very first process, so no other starts until it is known.
        likely = (sum(known) // len(known) if known else limit) if account.size is None else account.size
        return max(0, min(likely, max(account.least_size or 0, limit - self._fixed(account))))

    def _fixed(self, account: Account, old: Account | None = None) -> int:
        """Return how much those take that never sleep, or cannot now, as they start for long.

        A model itself, and the one whose place it takes, are left out.
        """
        others = (each for each in self._accounts if each not in (account, old))
        return sum(self._charge(each) for each in others if not each.is_movable or each.starts_long)

    def _is_hopeless(self, account: Account, old: Account | None = None) -> bool:
        return (account.least_size or 0) + self._fixed(account, old) > (self.limit_bytes or 0)

    def _make_room(self, account: Account, *, is_modest: bool) -> bool:
        """Return whether there is room for a model; if not, ask others to sleep, unless it is modest."""
        limit = self.limit_bytes
        if limit is None:
            return True
        if self._is_hopeless(account):
            raise NoRoomError(self._no_room(account, " who may be put to sleep"))
        earlier = self._waiting[: self._waiting.index(account)]
        if any(each.is_waited_for for each in earlier):
            return False
        account.expected = need = self._need(account)
        charges = {each: self._charge(each) for each in self._accounts}
        missing = sum(charges.values()) - charges.get(account, 0) + need - limit
        if missing <= 0:
            account.is_waited_for = False
            return True
        if is_modest:
            return False
        # While memory for this model is being freed, models behind it in the queue must not take that memory.
        account.is_waited_for = self._free(missing, charges, account)
        return False

    def _free(self, missing: int, charges: dict[Account, int], beneficiary: Account | None) -> bool:
        """Have others end, as many as it takes; return whether anybody is about to.

        Processes beyond the fewest of a model come first, then those models that were used least recently.
        """
        now = time.monotonic()
        coming = 0
        for each in charges.keys() - {beneficiary}:
            if now - each.given_back_at >= _COMING_S:
                if coming >= missing or each.state is not AccountState.AWAKE or not (share := each.extra_share()):
                    continue
                each.given_back, each.given_back_at = int(charges[each] * share), now
                each.give_back()
            coming += each.given_back
        candidates = []
        for each in charges.keys() - {beneficiary}:
            kept = self._meter.read(each.kept()) if each.state is AccountState.ASLEEP else 0
            # A process that has not ended by then may hang, so the budget asks other models as well.
            if now - each.leaves_since < _COMING_S:
                if each.is_asked or each.state is AccountState.LEAVING:
                    coming += charges[each]
                elif each.state is AccountState.ASLEEP:
                    # Counts the memory of processes that end. The memory of a parent counts only if the parent ends,
                    # too.
                    coming += charges[each] if each.is_dropped else charges[each] - kept
            if charges[each] and (self._may_ask(each) or (kept and not each.is_dropped and not each.pids())):
                candidates.append(each)
        for each in sorted(candidates, key=lambda each: each.last_used):
            if coming >= missing:
                break
            each.leaves_since = now
            coming += charges[each]
            if each.state is AccountState.ASLEEP:
                each.is_dropped = True
                each.drop()
            elif each.ask_to_sleep is not None:
                each.is_asked = True
                each.ask_to_sleep()
        return coming > 0

    @staticmethod
    def _may_ask(account: Account) -> bool:
        """Return whether a model may be asked to sleep: it is awake, and was neither woken nor busy just now."""
        now = time.monotonic()
        return (
            account.is_movable
            and not account.is_asked
            and account.state is AccountState.AWAKE
            and now - account.awake_since >= min(account.woke_in_s, _LONGEST_GRACE_S)
            and now - account.declined_at >= _DECLINED_S
        )

    def _no_room(self, account: Account, why: str) -> str:
        charges = {each: self._charge(each) for each in self._accounts if each is not account}
        taken = sorted(((size, each) for each, size in charges.items() if size), key=lambda pair: -pair[0])
        told = [f"{each.name} {size_text(size)} ({each.what})" for size, each in taken[:_MOST_NAMED]]
        told += [f"{len(taken) - _MOST_NAMED} others"] if len(taken) > _MOST_NAMED else []
        limit, need = size_text(self.limit_bytes or 0), size_text(self._need(account))
        if not told or self._need(account) > (self.limit_bytes or 0):
            return f"its worker processes need {need}, more than the memory budget of {limit}"
        return (
            f"its worker processes need {need}, and of the memory budget of {limit} others have "
            f"{size_text(sum(charges.values()))}: {', '.join(told)}. Among them was nobody{why}"
        )

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Look whether somebody has grown, as long as there is a model."""
        with self._changed:
            while self._accounts:
                keep_on(self._enforce, "The memory of worker processes cannot be looked after")
                self._changed.wait_for(lambda: not self._accounts, _WATCH_S)
            self._is_watched = False

    def _enforce(self) -> None:
        limit = self.limit_bytes or 0
        charges = {each: self._charge(each) for each in self._accounts}
        missing = sum(charges.values()) - limit
        if missing <= 0:
            self._is_exceeded = False
            return
        if self._free(missing, charges, None) or self._is_exceeded or self._waiting:
            return
        self._is_exceeded = True
        largest = sorted(filter(charges.get, charges), key=lambda each: -charges[each])[:_MOST_NAMED]
        logger.warning(
            "The worker processes take %s, more than the memory budget of %s, and none that has nothing to do is left "
            "to be put to sleep: %s.",
            size_text(sum(charges.values())),
            size_text(limit),
            ", ".join(f"{each.name} {size_text(charges[each])} ({each.what})" for each in largest),
        )


class _Meter:
    """Measures processes, those that they have started included."""

    def __init__(self) -> None:
        # By process: its resident memory when it was measured, its share of that, when it was measured, and which
        # processes shared it.
        self._known: dict[int, tuple[int, int, float, frozenset[int]]] = {}

    def read(self, pids: Iterable[int]) -> int:
        """Return how much processes take, in bytes."""
        sharers: dict[int, frozenset[int]] = {}
        for family in sorted((frozenset(with_descendants(pid)) for pid in pids), key=len):
            # A process that was forked from a parent which stays belongs to the family of the parent as well. That
            # family is the larger one, so it counts.
            sharers.update(dict.fromkeys(family, family))
        return sum(self._read_one(pid, family) for pid, family in sharers.items())

    def _read_one(self, pid: int, family: frozenset[int]) -> int:
        resident = resident_bytes(pid)
        if not resident:
            self._known.pop(pid, None)
            return 0
        now = time.monotonic()
        known = self._known.get(pid)
        if (
            known is not None
            and now - known[2] < _REMEMBERED_S
            # A forked process shares all of its memory at first, so its start and its end change the share of the
            # others.
            and known[3] == family
            and abs(resident - known[0]) <= _REMEMBERED_SHARE * known[0]
        ):
            return known[1]
        share = proportional_bytes(pid)
        # The kernel shows only the resident memory of a process of another user.
        measured = resident if share is None else share
        self._known[pid] = (resident, measured, now, family)
        if len(self._known) > 1000:
            self._known = {each: facts for each, facts in self._known.items() if now - facts[2] < _REMEMBERED_S}
        return measured


def size_text(size: int) -> str:
    """Return a number of bytes for people, such as `1.5 GiB`."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << shift:
            return f"{size / (1 << shift):.3g} {unit}"
    return f"{size} B"
