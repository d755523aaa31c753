"""Every known defect of PyTriton 0.7.0 is held off by tests of ours, which would fail on it. Here: which ones.

The numbers and titles are those of the compatibility reference. A test that is renamed or removed is missed here.
"""

from __future__ import annotations

import re

import pytest

from support.paths import ROOT

CLIENT, DECORATORS, SERVER = (f"packages/pytriton-{dist}/tests" for dist in ("client", "decorators", "server"))

HELD_OFF_BY: dict[str, tuple[str, ...]] = {
    "1 numpy 1 and 2, any Python, no libpython, plain wheel": (
        "tests/project/test_installed_wheels.py::test_wheels_in_an_empty_environment_serve_a_model",
        "tests/serving/test_inference.py::test_every_type",
    ),
    "2 from_existing_client, access_token and the scheme of gRPC for every client": (
        "tests/clients/test_asyncio.py::test_one_client_in_loops_and_classes",
        "tests/clients/test_futures.py::test_many_workers",
        "tests/compatibility/test_pytriton_scripts.py::test_a_script_prints_what_it_did",
    ),
    "3 token on readiness and configuration calls": (
        "tests/clients/test_sync.py::test_token_on_every_kind_of_call",
        "tests/server/test_security.py::test_our_client_passes_where_everything_is_protected",
        "tests/server/test_security.py::test_the_controller_passes_where_everything_is_protected",
    ),
    "4 no hang on an output that cannot be cast or a double yield, unrecoverable errors answered at once": (
        "tests/serving/test_requests_and_responses.py::test_what_cannot_be_sent_is_an_error_and_nothing_hangs",
        "tests/serving/test_requests_and_responses.py::test_a_generator_of_a_coupled_model_yields_once",
        f"{SERVER}/triton/test_triton.py::test_an_unrecoverable_error_answers_and_stops",
    ),
    "5 asynchronous callables under decorators, parameters under decorators": (
        "tests/serving/test_decorators_served.py::test_requests_of_every_kind_in_shared_batches",
        f"{DECORATORS}/decorators/test_stacks.py",
    ),
    "6 dtypes as text and builtins, requests, tuples and mappings as results, numpy scalars, empty arrays of objects": (
        f"{DECORATORS}/model_config/test_dtypes.py",
        "tests/serving/test_requests_and_responses.py::test_results_of_every_form",
        "tests/serving/test_requests_and_responses.py::test_the_request_itself_is_a_result",
        "tests/serving/test_requests_and_responses.py::test_scalars_are_outputs_of_a_model_without_batching",
        "tests/serving/test_requests_and_responses.py::test_strings_of_every_form",
    ),
    "7 booleans and lists in the environment": (f"{SERVER}/server/settings/test_settings.py",),
    "8 decoupled client: timeouts, parameters, no stuck lock, HTTP, early end, cancellation": (
        "tests/clients/test_timeouts.py::test_slow_stream",
        "tests/clients/test_sync.py::test_stream",
        "tests/clients/test_sync.py::test_stream_that_fails_after_some_results",
        "tests/clients/test_sync.py::test_callable_learns_that_its_caller_left",
        "tests/clients/test_sync.py::test_wrong_kind_of_client",
        "tests/serving/test_streaming.py::test_each_request_of_a_batch_ends_when_its_own_responses_do",
        f"{CLIENT}/client/test_decoupled.py",
    ),
    "9 asyncio client: asks once, polls sanely, one or two round trips before the first inference": (
        f"{CLIENT}/client/test_asyncio.py",
        f"{CLIENT}/client/core/test_startup.py",
        "tests/clients/test_sync.py::test_round_trips_before_the_first_inference",
    ),
    "10 readiness, SIGTERM, the death of the server, port 0": (
        "tests/compatibility/test_pytriton_scripts.py::test_a_server_script_and_its_client",
        f"{SERVER}/triton/test_triton.py",
        f"{SERVER}/server/tritonserver/test_ports.py",
    ),
    "11 inputs that may be kept, large tensors, bounded memory that is given back, nothing in /dev/shm": (
        "tests/serving/test_inference.py::test_inputs_that_a_callable_keeps_stay_valid",
        "tests/serving/test_inference.py::test_a_large_tensor_and_its_memory",
        "tests/workers/test_protocol_faults.py::test_memory_goes_back_when_nobody_uses_it",
        "tests/serving/test_inference.py::test_inputs_over_the_budget",
    ),
    "12 versions, unbind and rebind, response parameters, details of requests, metrics": (
        "tests/serving/test_model_configuration.py::test_versions_have_callables_of_their_own",
        "tests/serving/test_rebind.py::test_rebind_under_load_loses_no_request",
        "tests/serving/test_rebind.py::test_unbind_leaves_nothing",
        "tests/clients/test_sync.py::test_results_and_what_comes_along_with_them",
        "tests/serving/test_requests_and_responses.py::test_everything_about_a_request",
        "tests/server/test_metrics.py::test_metrics_of_the_user_are_on_the_page",
    ),
    "13 a command without undeclared dependencies, types, a client of its own": (
        "tests/command_line/test_command_line.py::test_without_a_command_it_shows_the_commands_by_use",
        "tests/project/test_packaging.py::test_every_package_is_typed",
        "tests/project/test_installed_wheels.py::test_type_checkers_see_the_types_of_the_wheels",
        f"{CLIENT}/client/test_package.py",
    ),
    "what PyTriton's own tests, examples and documentation found, in the order of the reference": (
        "tests/server/test_front_ends.py::test_vertex_ai_brings_its_policy",
        "tests/compatibility/test_sample_scalars.py::test_scalars_and_bytes",
        f"{SERVER}/triton/test_triton.py::test_a_name_is_bound_again_after_stop",
        "tests/remote/test_remote.py::test_a_name_is_bound_again_after_stop",
        "tests/clients/test_timeouts.py::test_a_stream_goes_on_over_inference_timeout_s",
        "tests/serving/test_model_warmup.py::test_some_of_the_inputs_are_passed_on",
        f"{DECORATORS}/decorators/test_values.py::test_a_key_that_is_no_input_of_the_model",
        f"{CLIENT}/client/test_auth.py::test_extract",
        "tests/compatibility/test_pytriton_texts.py::test_bind",
        "tests/inprocess/test_tensor.py::test_what_is_made_of_a_capsule_holds_one_reference_to_the_tensor",
        f"{DECORATORS}/model_config/test_common.py::test_times_that_were_calculated_are_taken",
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
