import math
from typing import Any

import numpy as np
import pytest

from pytriton.exceptions import PyTritonBadParameterError
from pytriton.model_config.common import DeviceKind, DynamicBatcher, QueuePolicy, TimeoutAction


def test_defaults_are_those_of_triton() -> None:
    batcher = DynamicBatcher()
    assert batcher == DynamicBatcher(0, None, False, 0, 0, None, None)
    assert QueuePolicy() == QueuePolicy(TimeoutAction.REJECT, 0, False, 0)
    batcher.validate(1)


def test_names_of_enums() -> None:
    assert [kind.name for kind in DeviceKind] == ["KIND_AUTO", "KIND_CPU", "KIND_GPU"]
    assert [action.name for action in TimeoutAction] == ["REJECT", "DELAY"]


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (QueuePolicy, {"timeout_action": "REJECT"}),
        (QueuePolicy, {"default_timeout_microseconds": -1}),
        (QueuePolicy, {"max_queue_size": 1.5}),
        (QueuePolicy, {"max_queue_size": True}),
        (DynamicBatcher, {"max_queue_delay_microseconds": -1}),
        (DynamicBatcher, {"priority_levels": "2"}),
        (DynamicBatcher, {"default_priority_level": -1}),
        (DynamicBatcher, {"preferred_batch_size": [4, 0]}),
        (DynamicBatcher, {"preferred_batch_size": 4}),
        (DynamicBatcher, {"preferred_batch_size": "4"}),
        (DynamicBatcher, {"preserve_ordering": "no"}),
        (DynamicBatcher, {"default_queue_policy": {"max_queue_size": 1}}),
        (DynamicBatcher, {"priority_queue_policy": [QueuePolicy()]}),
        (DynamicBatcher, {"max_queue_delay_microseconds": 2**63}),
        (QueuePolicy, {"allow_timeout_override": "yes"}),
        (QueuePolicy, {"max_queue_size": 2**32}),
        (QueuePolicy, {"default_timeout_microseconds": 2**62}),
    ],
)
def test_values_wrong_on_their_own_are_refused_at_construction(kind: Any, fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(PyTritonBadParameterError, match=rf"{kind.__name__}\.{name}=.* must be ") as caught:
        kind(**fields)
    assert caught.value.parameter == f"{kind.__name__}.{name}"


POLICY = QueuePolicy(max_queue_size=1)


@pytest.mark.parametrize(
    ("batcher", "message"),
    [
        (DynamicBatcher(preferred_batch_size=[4, 9]), r"preferred_batch_size=9 .* 1 to 8"),
        (DynamicBatcher(priority_levels=2), r"default_priority_level=0 .* from 1 to 2.*priority_levels=2"),
        (DynamicBatcher(priority_levels=2, default_priority_level=3), r"default_priority_level=3 .* from 1 to 2"),
        (DynamicBatcher(default_priority_level=1), r"default_priority_level=1 .* Set priority_levels"),
        (DynamicBatcher(priority_queue_policy={1: POLICY}), r"priority_queue_policy=.* Set priority_levels"),
        (
            DynamicBatcher(priority_levels=2, default_priority_level=1, priority_queue_policy={3: POLICY}),
            r"priority_queue_policy key=3 .* from 1 to 2",
        ),
        (
            DynamicBatcher(priority_levels=2, default_priority_level=1, preserve_ordering=True),
            r"preserve_ordering=True .* priority_levels=2",
        ),
    ],
)
def test_values_that_do_not_fit_together_are_refused_by_validate(batcher: DynamicBatcher, message: str) -> None:
    with pytest.raises(PyTritonBadParameterError, match=message):
        batcher.validate(8)


def test_times_that_were_calculated_are_taken() -> None:
    given: Any = 0.057 * 1e6
    timeout: Any = np.float32(2500)
    batcher = DynamicBatcher(
        max_queue_delay_microseconds=given,
        default_queue_policy=QueuePolicy(default_timeout_microseconds=timeout),
    )
    batcher.validate()
    assert batcher.max_queue_delay_microseconds == int(given)
    assert type(batcher.max_queue_delay_microseconds) is int
    assert batcher.default_queue_policy is not None
    assert batcher.default_queue_policy.default_timeout_microseconds == 2500
    for wrong in (math.nan, math.inf, "5", -1.5):
        with pytest.raises(PyTritonBadParameterError, match="max_queue_delay_microseconds"):
            DynamicBatcher(max_queue_delay_microseconds=wrong)  # type: ignore[arg-type] # wrong on purpose


@pytest.mark.parametrize("policy", [{0: POLICY}, {"1": POLICY}, {1: "REJECT"}, {True: POLICY}])
def test_policies_by_something_else_than_priority(policy: Any) -> None:
    with pytest.raises(PyTritonBadParameterError, match=r"DynamicBatcher\.priority_queue_policy"):
        DynamicBatcher(priority_levels=2, default_priority_level=1, priority_queue_policy=policy)


@pytest.mark.parametrize(
    ("delays", "name"),
    [
        ({"default_queue_policy": QueuePolicy(TimeoutAction.DELAY, 5)}, "default_queue_policy"),
        ({"default_queue_policy": QueuePolicy(TimeoutAction.DELAY, 0, True)}, "default_queue_policy"),
        (
            {
                "priority_levels": 1,
                "default_priority_level": 1,
                "priority_queue_policy": {1: QueuePolicy(TimeoutAction.DELAY, 5)},
            },
            r"priority_queue_policy\[1\]",
        ),
    ],
)
def test_delaying_breaks_an_order_that_is_to_be_preserved(delays: dict[str, Any], name: str) -> None:
    with pytest.raises(PyTritonBadParameterError, match=rf"{name}\.timeout_action=.*REJECT with preserve_ordering"):
        DynamicBatcher(preserve_ordering=True, **delays).validate()
    DynamicBatcher(preserve_ordering=True, default_queue_policy=QueuePolicy(TimeoutAction.DELAY)).validate()


def test_values_that_fit_together() -> None:
    delay: Any = np.int64(100)
    DynamicBatcher(
        max_queue_delay_microseconds=delay,
        preferred_batch_size=[4, 8],
        priority_levels=3,
        default_priority_level=2,
        default_queue_policy=POLICY,
        priority_queue_policy={1: POLICY, 3: QueuePolicy(timeout_action=TimeoutAction.DELAY)},
    ).validate(8)


def test_validate_sees_later_assignments_also_of_policies() -> None:
    policy = QueuePolicy()
    batcher = DynamicBatcher(priority_levels=1, default_priority_level=1, priority_queue_policy={1: policy})
    batcher.validate()
    policy.max_queue_size = -5
    with pytest.raises(PyTritonBadParameterError, match=r"priority_queue_policy\[1\]\.max_queue_size=-5"):
        batcher.validate()
