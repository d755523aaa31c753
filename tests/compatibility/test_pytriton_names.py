"""Every name that PyTriton 0.7.0's documentation refers to can be imported from its place and takes the same arguments.

The tables hold facts about that release: where a name is, what its parameters are called, in which order, and which of
them have a default. `*` begins those that go by keyword alone. A parameter of ours more is no difference.
"""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton.model_config.common import ModelWarmup, WarmupInput

CLIENT = """
    url model_name model_version= * lazy_init= init_timeout_s= inference_timeout_s= model_config= ensure_model_is_ready=
"""
INFER = "*inputs parameters= headers= **named_inputs"
BIND = "model_name infer_func inputs outputs model_version= config= strict= trace_config="

CALLABLES = {
    "pytriton.triton:Triton": "* config= workspace= triton_lifecycle_policy= security_config=",
    "pytriton.triton:Triton.bind": BIND,
    "pytriton.triton:Triton.connect": "",
    "pytriton.triton:Triton.get_access_token": "",
    "pytriton.triton:Triton.is_alive": "",
    "pytriton.triton:Triton.is_connected": "",
    "pytriton.triton:Triton.run": "",
    "pytriton.triton:Triton.serve": "monitoring_period_s=",
    "pytriton.triton:Triton.stop": "",
    "pytriton.triton:RemoteTriton": "url workspace= access_token=",
    "pytriton.triton:RemoteTriton.bind": BIND,
    "pytriton.triton:RemoteTriton.connect": "",
    "pytriton.triton:RemoteTriton.serve": "monitoring_period_s=",
    "pytriton.triton:RemoteTriton.stop": "",
    "pytriton.triton:TritonConfig.from_dict": "config",
    "pytriton.triton:TritonConfig.from_env": "",
    "pytriton.triton:TritonConfig.to_dict": "",
    "pytriton.triton:TritonLifecyclePolicy": "launch_triton_on_startup= local_model_store=",
    "pytriton.triton:TritonSecurityConfig": "access_token= restricted_endpoints=",
    "pytriton.model_config:DynamicBatcher": "max_queue_delay_microseconds= preferred_batch_size= preserve_ordering= "
    "priority_levels= default_priority_level= default_queue_policy= priority_queue_policy=",
    "pytriton.model_config:ModelConfig": "batching= max_batch_size= batcher= response_cache= decoupled= model_warmup=",
    "pytriton.model_config:QueuePolicy": "timeout_action= default_timeout_microseconds= allow_timeout_override= "
    "max_queue_size=",
    "pytriton.model_config:Tensor": "shape dtype name= optional=",
    "pytriton.model_config.common:ModelWarmup": "name batch_size inputs count",
    "pytriton.model_config.common:WarmupInput": "dtype shape zero_data= random_data= input_data_file=",
    "pytriton.model_config.common:generate_warmup_data": "warmup_input batch_size",
    "pytriton.model_config.common:generate_warmup_requests": "model_warmup input_specs outputs_specs",
    "pytriton.model_config.generator:ModelConfigGenerator": "config",
    "pytriton.model_config.generator:ModelConfigGenerator.get_config": "",
    "pytriton.model_config.generator:ModelConfigGenerator.to_file": "config_path",
    "pytriton.model_config.parser:ModelConfigParser.from_dict": "model_config_dict",
    "pytriton.model_config.parser:ModelConfigParser.from_file": "* config_path",
    "pytriton.model_config.parser:ModelConfigParser.rewrite_io_spec": "item io_type idx",
    "pytriton.model_config.triton_model_config:ResponseCache": "enable",
    "pytriton.model_config.triton_model_config:TensorSpec": "name shape dtype optional=",
    "pytriton.model_config.triton_model_config:TritonModelConfig": "model_name model_version= max_batch_size= "
    "batching= batcher= instance_group= decoupled= backend_parameters= inputs= outputs= response_cache= model_warmup=",
    "pytriton.decorators:ConstantPadder": "pad_value=",
    "pytriton.decorators:convert_output": "outputs wrapped= instance= model_config=",
    "pytriton.decorators:fill_optionals": "**defaults",
    "pytriton.decorators:first_value": "*keys squeeze_single_values= strict=",
    "pytriton.decorators:get_inference_request_batch_size": "inference_request",
    "pytriton.decorators:get_model_config": "wrapped instance",
    "pytriton.decorators:get_triton_context": "wrapped instance",
    "pytriton.decorators:group_by_values": "*keys pad_fn=",
    "pytriton.client:AsyncioDecoupledModelClient": CLIENT,
    "pytriton.client:AsyncioDecoupledModelClient.infer_batch": INFER,
    "pytriton.client:AsyncioDecoupledModelClient.infer_sample": INFER,
    "pytriton.client:AsyncioModelClient": CLIENT,
    "pytriton.client:AsyncioModelClient.close": "",
    "pytriton.client:AsyncioModelClient.infer_batch": INFER,
    "pytriton.client:AsyncioModelClient.infer_sample": INFER,
    "pytriton.client:AsyncioModelClient.wait_for_model": "timeout_s",
    "pytriton.client:DecoupledModelClient": CLIENT,
    "pytriton.client:DecoupledModelClient.infer_batch": INFER,
    "pytriton.client:DecoupledModelClient.infer_sample": INFER,
    "pytriton.client:FuturesModelClient": "url model_name model_version= * max_workers= max_queue_size= non_blocking= "
    "init_timeout_s= inference_timeout_s=",
    "pytriton.client:FuturesModelClient.close": "wait=",
    "pytriton.client:FuturesModelClient.infer_batch": INFER,
    "pytriton.client:FuturesModelClient.infer_sample": INFER,
    "pytriton.client:FuturesModelClient.model_config": "",
    "pytriton.client:FuturesModelClient.wait_for_model": "timeout_s",
    "pytriton.client:ModelClient": f"{CLIENT} access_token=",
    "pytriton.client:ModelClient.close": "",
    "pytriton.client:ModelClient.create_client_from_url": "url network_timeout_s=",
    "pytriton.client:ModelClient.from_existing_client": "existing_client",
    "pytriton.client:ModelClient.infer_batch": INFER,
    "pytriton.client:ModelClient.infer_sample": INFER,
    "pytriton.client:ModelClient.load_model": "config= files=",
    "pytriton.client:ModelClient.unload_model": "",
    "pytriton.client:ModelClient.wait_for_model": "timeout_s",
    "pytriton.client:ModelClient.wait_for_server": "timeout_s",
    "pytriton.client.asyncio_utils:asyncio_get_model_config": "client model_name model_version= timeout_s=",
    "pytriton.client.asyncio_utils:asyncio_get_model_state": "client model_name model_version=",
    "pytriton.client.asyncio_utils:asyncio_wait_for_model_ready": "asyncio_client model_name model_version= timeout_s=",
    "pytriton.client.asyncio_utils:asyncio_wait_for_model_status_loaded": "asyncio_client model_name sleep_time_s "
    "model_version=",
    "pytriton.client.asyncio_utils:asyncio_wait_for_server_ready": "asyncio_client sleep_time_s",
    "pytriton.client.auth:create_auth_headers": "access_token protocol",
    "pytriton.client.auth:extract_access_token_from_headers": "headers",
    "pytriton.client.utils:TritonUrl": "scheme hostname port",
    "pytriton.client.utils:TritonUrl.from_url": "url",
    "pytriton.client.utils:create_client_from_url": "url network_timeout_s=",
    "pytriton.client.utils:get_model_config": "client model_name model_version= timeout_s= headers=",
    "pytriton.client.utils:get_model_state": "client model_name model_version= headers=",
    "pytriton.client.utils:parse_grpc_response": "models",
    "pytriton.client.utils:parse_http_response": "models",
    "pytriton.client.utils:wait_for_model_ready": "client model_name model_version= timeout_s= headers=",
    "pytriton.client.utils:wait_for_server_ready": "client timeout_s= headers=",
    "pytriton.proxy.telemetry:build_proxy_tracer_from_triton_config": "trace_config",
    "pytriton.proxy.telemetry:end_span": "span error=",
    "pytriton.proxy.telemetry:get_span_dict": "span",
    "pytriton.proxy.telemetry:get_telemetry_tracer": "",
    "pytriton.proxy.telemetry:parse_trace_config": "trace_config_list",
    "pytriton.proxy.telemetry:raise_if_no_telemetry": "",
    "pytriton.proxy.telemetry:set_telemetry_tracer": "tracer",
    "pytriton.proxy.telemetry:start_span_from_remote": "span_dict name",
    "pytriton.proxy.telemetry:start_span_from_span": "span name",
    "pytriton.proxy.telemetry:traced_span": "request span_name **kwargs",
    "pytriton.proxy.types:Request": "data parameters= span= requested_output_names=",
    "pytriton.proxy.types:Request.items": "",
    "pytriton.proxy.types:Request.keys": "",
    "pytriton.proxy.types:Request.traced_span": "span_name",
    "pytriton.proxy.types:Request.values": "",
    "pytriton.proxy.types:Response": "data",
    "pytriton.triton:Workspace": "workspace_path=",
}

NAMES = {
    "pytriton.triton": "DEFAULT_PROTECTED_ENDPOINTS DefaultTritonLifecyclePolicy GROWTH_BACKEND_SHM_SIZE "
    "INITIAL_BACKEND_SHM_SIZE MODEL_CONFIG_URL MODEL_INFER_URL MODEL_READY_URL MODEL_URL MONITORING_PERIOD_S "
    "ModelClient ModelConfig TRITONSERVER_DIST_DIR TRITON_ACCESS_HEADER Tensor TritonBase TritonContext "
    "VALID_TRITON_ENDPOINTS VertextAILifecyclePolicy WAIT_FORM_MODEL_TIMEOUT_S",
    "pytriton.decorators": "InferenceRequest InferenceRequests InferenceResult InferenceResults InputNames "
    "ModelConfigDict TritonContext batch group_by_keys pad_batch sample triton_context",
    "pytriton.exceptions": "PyTritonBadParameterError PyTritonError PyTritonInvalidOperationError "
    "PyTritonModelConfigError PyTritonRuntimeError PyTritonUnrecoverableError PyTritonValidationError",
    "pytriton.model_config": "DeviceKind TimeoutAction",
    "pytriton.model_config.common": "DeviceKind DynamicBatcher QueuePolicy TimeoutAction",
    "pytriton.model_config.model_config": "ModelConfig",
    "pytriton.model_config.tensor": "Tensor",
    "pytriton.client.client": "AsyncioDecoupledModelClient AsyncioModelClient BaseModelClient "
    "DEFAULT_INFERENCE_TIMEOUT_S DecoupledModelClient FuturesModelClient ModelClient",
    "pytriton.client.exceptions": "PyTritonClientClosedError PyTritonClientError PyTritonClientInferenceServerError "
    "PyTritonClientInvalidUrlError PyTritonClientModelDoesntSupportBatchingError PyTritonClientModelUnavailableError "
    "PyTritonClientQueueFullError PyTritonClientTimeoutError PyTritonClientValueError",
    "pytriton.client.utils": "LATEST_MODEL_VERSION ModelState",
    "pytriton.client.warnings": "NotSupportedTimeoutWarning PyTritonWarning",
    "pytriton.proxy.types": "Requests Responses ResponsesNoneOrError ResponsesOrError Scope",
}

# Those with a default in PyTriton's own words; each is None there, too.
TRITON_CONFIG = """
    model_repository id log_verbose log_file exit_timeout_secs exit_on_error strict_readiness allow_http http_address
    http_port http_header_forward_pattern http_thread_count http_restricted_api allow_grpc grpc_address grpc_port
    grpc_header_forward_pattern grpc_infer_allocation_pool_size grpc_use_ssl grpc_use_ssl_mutual grpc_server_cert
    grpc_server_key grpc_root_cert grpc_infer_response_compression_level grpc_keepalive_time grpc_keepalive_timeout
    grpc_keepalive_permit_without_calls grpc_http2_max_pings_without_data
    grpc_http2_min_recv_ping_interval_without_data grpc_http2_max_ping_strikes grpc_restricted_protocol allow_metrics
    allow_gpu_metrics allow_cpu_metrics metrics_interval_ms metrics_port metrics_address allow_sagemaker sagemaker_port
    sagemaker_safe_port_range sagemaker_thread_count allow_vertex_ai vertex_ai_port vertex_ai_thread_count
    vertex_ai_default_model metrics_config trace_config cache_config cache_directory buffer_manager_thread_count
"""

CONSTANTS = {
    "CREATE_TRITON_CLIENT_TIMEOUT_S": 10,
    "DEFAULT_GRPC_PORT": 8001,
    "DEFAULT_HTTP_PORT": 8000,
    "DEFAULT_METRICS_PORT": 8002,
    "DEFAULT_TRITON_STARTUP_TIMEOUT_S": 120,
    "TRITON_CONTEXT_FIELD_NAME": "triton_context",
    "TRITON_LOCAL_IP": "127.0.0.1",
}


def find(place: str) -> Any:
    module, _, path = place.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("place", sorted(CALLABLES))
def test_a_documented_callable_takes_the_arguments_that_pytriton_gives_to_it(place: str) -> None:
    function = find(place)
    parameters = list(inspect.signature(function).parameters.values())
    if parameters and parameters[0].name == "self":
        del parameters[0]
    positional = [it for it in parameters if it.kind is it.POSITIONAL_OR_KEYWORD]
    named = {it.name: it for it in parameters if it.kind in (it.POSITIONAL_OR_KEYWORD, it.KEYWORD_ONLY)}
    kinds = {it.kind for it in parameters}
    keyword_only = False
    for place_of, wanted in enumerate(CALLABLES[place].split()):
        name = wanted.strip("*=")
        if wanted.startswith("**"):
            assert inspect.Parameter.VAR_KEYWORD in kinds
        elif wanted.startswith("*"):
            keyword_only = True
            assert not name or inspect.Parameter.VAR_POSITIONAL in kinds
        else:
            assert name in named, f"{place} does not take {name}"
            if not keyword_only:
                assert positional[place_of].name == name, f"{place} takes {name} at another place"
            if wanted.endswith("="):
                assert named[name].default is not inspect.Parameter.empty, f"{place} has no default for {name}"
    # Nothing of ours is required that PyTriton's scripts do not give.
    required = {it.name for it in named.values() if it.default is inspect.Parameter.empty}
    assert required <= {wanted.strip("*=") for wanted in CALLABLES[place].split()}


@pytest.mark.parametrize(("module", "name"), [(module, name) for module in NAMES for name in NAMES[module].split()])
def test_a_documented_name_is_in_its_place(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)


def test_triton_config_has_every_field_and_each_is_unset() -> None:
    config = find("pytriton.triton:TritonConfig")()
    assert [name for name in TRITON_CONFIG.split() if getattr(config, name) is not None] == []


@pytest.mark.parametrize("name", sorted(CONSTANTS))
def test_a_constant_that_scripts_import_warns_and_is_the_same(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"pytriton.constants.{name} is kept") as told:
        assert getattr(importlib.import_module("pytriton.constants"), name) == CONSTANTS[name]
    assert told[0].filename == __file__


def test_the_home_of_pytriton_is_found_when_it_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    constants = importlib.import_module("pytriton.constants")
    monkeypatch.setenv("PYTRITON_HOME", str(tmp_path))
    with pytest.warns(DeprecationWarning, match=r"pass Triton\(workspace"):
        assert tmp_path == constants.PYTRITON_HOME
    with pytest.raises(AttributeError, match="no attribute 'TRITON_LOCAL_URL'"):
        _ = constants.TRITON_LOCAL_URL
    assert set(constants.__all__) == {*CONSTANTS, "PYTRITON_HOME"}


@pytest.mark.parametrize("part", ["client", "decorators", "exceptions", "model_config", "proxy", "triton"])
def test_the_namespace_has_a_version_after_any_import(part: str) -> None:
    # In a process of its own: which part is imported first decides who gives the version.
    program = (
        f"import pytriton.{part}\n"
        "from pytriton import __version__\n"
        "print(__version__, pytriton.__version__, hasattr(pytriton, 'nothing'))"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.split() == [version("pytriton-server"), version("pytriton-server"), "False"]


def test_a_warm_up_without_a_count_is_made_once() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warmup = ModelWarmup(name="w", batch_size=1, inputs={"x": WarmupInput(np.float32, (1,), zero_data=True)})
    assert warmup.count == 1
