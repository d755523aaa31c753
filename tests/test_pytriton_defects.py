"""Every known defect of PyTriton 0.7.0 is held off by tests of ours, which would fail on it. Here: which ones.

The numbers and titles are those of the compatibility reference. A test that is renamed or removed is missed here.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CLIENT, DECORATORS, SERVER = (f"packages/pytriton-{dist}/tests" for dist in ("client", "decorators", "server"))

HELD_OFF_BY: dict[str, tuple[str, ...]] = {
    "1 numpy 1 and 2, any Python, no libpython, plain wheel": (
        "tests/test_installed_wheels.py::test_wheels_in_an_empty_environment_serve_a_model",
        "tests/test_inference.py::test_every_type",
    ),
    "2 from_existing_client, access_token and the scheme of gRPC for every client": (
        "tests/test_asyncio_clients.py::test_one_client_in_loops_and_classes",
        "tests/test_futures_client.py::test_many_workers",
        "tests/test_pytriton_scripts.py::test_a_script_prints_what_it_did",
    ),
    "3 token on readiness and configuration calls": (
        "tests/test_clients.py::test_token_on_every_kind_of_call",
        "tests/test_security.py::test_our_client_passes_where_everything_is_protected",
        "tests/test_security.py::test_the_controller_passes_where_everything_is_protected",
    ),
    "4 no hang on an output that cannot be cast or a double yield, unrecoverable errors answered at once": (
        "tests/test_requests_and_responses.py::test_what_cannot_be_sent_is_an_error_and_nothing_hangs",
        "tests/test_requests_and_responses.py::test_a_generator_of_a_coupled_model_yields_once",
        f"{SERVER}/test_triton.py::test_an_unrecoverable_error_answers_and_stops",
    ),
    "5 asynchronous callables under decorators, parameters under decorators": (
        "tests/test_decorators_served.py::test_requests_of_every_kind_in_shared_batches",
        f"{DECORATORS}/test_stacks.py",
    ),
    "6 dtypes as text and builtins, requests, tuples and mappings as results, numpy scalars, empty arrays of objects": (
        f"{DECORATORS}/test_dtypes.py",
        "tests/test_requests_and_responses.py::test_results_of_every_form",
        "tests/test_requests_and_responses.py::test_the_request_itself_is_a_result",
        "tests/test_requests_and_responses.py::test_scalars_are_outputs_of_a_model_without_batching",
        "tests/test_requests_and_responses.py::test_strings_of_every_form",
    ),
    "7 booleans and lists in the environment": (f"{SERVER}/test_settings.py",),
    "8 decoupled client: timeouts, parameters, no stuck lock, HTTP, early end, cancellation": (
        "tests/test_client_timeouts.py::test_slow_stream",
        "tests/test_clients.py::test_stream",
        "tests/test_clients.py::test_stream_that_fails_after_some_results",
        "tests/test_clients.py::test_callable_learns_that_its_caller_left",
        "tests/test_clients.py::test_wrong_kind_of_client",
        "tests/test_streaming.py::test_each_request_of_a_batch_ends_when_its_own_responses_do",
        f"{CLIENT}/test_decoupled.py",
    ),
    "9 asyncio client: asks once, polls sanely, one or two round trips before the first inference": (
        f"{CLIENT}/test_asyncio.py",
        f"{CLIENT}/test_startup.py",
        "tests/test_clients.py::test_round_trips_before_the_first_inference",
    ),
    "10 readiness, SIGTERM, the death of the server, port 0": (
        "tests/test_pytriton_scripts.py::test_a_server_script_and_its_client",
        f"{SERVER}/test_triton.py",
        f"{SERVER}/test_ports.py",
    ),
    "11 inputs that may be kept, large tensors, bounded memory that is given back, nothing in /dev/shm": (
        "tests/test_inference.py::test_inputs_that_a_callable_keeps_stay_valid",
        "tests/test_inference.py::test_a_large_tensor_and_its_memory",
        "tests/test_protocol_faults.py::test_memory_goes_back_when_nobody_uses_it",
        "tests/test_inference.py::test_inputs_over_the_budget",
    ),
    "12 versions, unbind and rebind, response parameters, details of requests, metrics": (
        "tests/test_model_configuration.py::test_versions_have_callables_of_their_own",
        "tests/test_rebind.py::test_rebind_under_load_loses_no_request",
        "tests/test_rebind.py::test_unbind_leaves_nothing",
        "tests/test_clients.py::test_results_and_what_comes_along_with_them",
        "tests/test_requests_and_responses.py::test_everything_about_a_request",
        "tests/test_metrics.py::test_metrics_of_the_user_are_on_the_page",
    ),
    "13 a command without undeclared dependencies, types, a client of its own": (
        "tests/test_command_line.py::test_check_is_what_it_does_without_a_command",
        "tests/test_packaging.py::test_every_package_is_typed",
        "tests/test_installed_wheels.py::test_type_checkers_see_the_types_of_the_wheels",
        f"{CLIENT}/test_package.py",
    ),
    "what PyTriton's own tests, examples and documentation found, in the order of the reference": (
        "tests/test_front_ends.py::test_vertex_ai_brings_its_policy",
        "tests/test_sample_scalars.py::test_scalars_and_bytes",
        f"{SERVER}/test_triton.py::test_a_name_is_bound_again_after_stop",
        "tests/test_remote.py::test_a_name_is_bound_again_after_stop",
        "tests/test_client_timeouts.py::test_a_stream_goes_on_over_inference_timeout_s",
        "tests/test_model_warmup.py::test_some_of_the_inputs_are_passed_on",
        f"{DECORATORS}/test_values.py::test_a_key_that_is_no_input_of_the_model",
        f"{CLIENT}/test_auth.py::test_extract",
        "tests/test_pytriton_texts.py::test_bind",
        "tests/test_inprocess_tensor.py::test_what_is_made_of_a_capsule_holds_one_reference_to_the_tensor",
        f"{DECORATORS}/test_common.py::test_times_that_were_calculated_are_taken",
    ),
}


@pytest.mark.parametrize("defect", HELD_OFF_BY)
def test_a_defect_of_pytriton_has_tests(defect: str) -> None:
    missing = []
    for test in HELD_OFF_BY[defect]:
        path, _, name = test.partition("::")
        text = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).is_file() else ""
        if not re.search(rf"^ *(async )?def {name or 'test_'}", text, re.MULTILINE):
            missing.append(test)
    assert missing == []
