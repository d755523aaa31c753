"""The reference names everything that is public, and every name that scripts for PyTriton import is there.

`PROMISED` is written from the description of PyTriton's API, not from our code: a name that is dropped or forgotten
here fails there.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import runpy
from typing import Any

import pytest

from pytriton.client import FuturesModelClient
from pytriton.client.client import BaseModelClient
from pytriton.exceptions import PyTritonBadParameterError
from pytriton.model_config import ModelConfig
from pytriton.proxy_backend.wire.settings import ServingSettings, setting_fields
from support.paths import ROOT

REFERENCE: dict[str, Any] = runpy.run_path(str(ROOT / "tools" / "reference.py"))
SETTINGS: dict[str, Any] = runpy.run_path(str(ROOT / "tools" / "settings.py"))
MODULES = [module for modules in REFERENCE["PAGES"].values() for module in modules]

PROMISED = {
    "pytriton.triton": """
        Triton RemoteTriton TritonBase TritonConfig TritonLifecyclePolicy TritonSecurityConfig
        DefaultTritonLifecyclePolicy VertextAILifecyclePolicy
        TRITONSERVER_DIST_DIR MONITORING_PERIOD_S WAIT_FORM_MODEL_TIMEOUT_S INITIAL_BACKEND_SHM_SIZE
        GROWTH_BACKEND_SHM_SIZE MODEL_URL MODEL_READY_URL MODEL_CONFIG_URL MODEL_INFER_URL VALID_TRITON_ENDPOINTS
        DEFAULT_PROTECTED_ENDPOINTS TRITON_ACCESS_HEADER Tensor ModelConfig Workspace ModelClient TritonContext
    """,
    "pytriton.model_config": "DeviceKind DynamicBatcher QueuePolicy TimeoutAction ModelConfig Tensor",
    "pytriton.model_config.model_config": "ModelConfig",
    "pytriton.model_config.tensor": "Tensor",
    "pytriton.model_config.common": """
        DynamicBatcher QueuePolicy TimeoutAction DeviceKind WarmupInput ModelWarmup generate_warmup_data
        generate_warmup_requests
    """,
    "pytriton.model_config.triton_model_config": "TritonModelConfig TensorSpec ResponseCache",
    "pytriton.decorators": """
        InputNames InferenceRequest InferenceRequests InferenceResult InferenceResults
        get_inference_request_batch_size ModelConfigDict TritonContext get_triton_context get_model_config
        convert_output sample batch group_by_values ConstantPadder group_by_keys fill_optionals triton_context pad_batch
        first_value
    """,
    "pytriton.client": """
        ModelClient FuturesModelClient DecoupledModelClient AsyncioModelClient AsyncioDecoupledModelClient
    """,
    "pytriton.client.client": """
        BaseModelClient ModelClient FuturesModelClient DecoupledModelClient AsyncioModelClient
        AsyncioDecoupledModelClient DEFAULT_INFERENCE_TIMEOUT_S
    """,
    "pytriton.client.exceptions": """
        PyTritonClientError PyTritonClientValueError PyTritonClientInvalidUrlError PyTritonClientTimeoutError
        PyTritonClientModelUnavailableError PyTritonClientClosedError PyTritonClientModelDoesntSupportBatchingError
        PyTritonClientInferenceServerError PyTritonClientQueueFullError
    """,
    "pytriton.client.warnings": "PyTritonWarning NotSupportedTimeoutWarning",
    "pytriton.client.auth": "create_auth_headers extract_access_token_from_headers",
    "pytriton.client.utils": """
        LATEST_MODEL_VERSION ModelState parse_http_response parse_grpc_response get_model_state get_model_config
        wait_for_server_ready wait_for_model_ready create_client_from_url TritonUrl
    """,
    "pytriton.client.asyncio_utils": """
        asyncio_get_model_state asyncio_get_model_config asyncio_wait_for_server_ready
        asyncio_wait_for_model_status_loaded asyncio_wait_for_model_ready
    """,
    "pytriton.exceptions": """
        PyTritonError PyTritonValidationError PyTritonInvalidOperationError PyTritonBadParameterError
        PyTritonModelConfigError PyTritonUnrecoverableError PyTritonRuntimeError
    """,
    "pytriton.proxy.types": "Request Response Requests Responses ResponsesOrError ResponsesNoneOrError Scope",
    "pytriton.proxy.outputs": "empty_outputs",
    "pytriton.proxy.telemetry": """
        set_telemetry_tracer get_telemetry_tracer get_span_dict start_span_from_remote start_span_from_span
        parse_trace_config traced_span build_proxy_tracer_from_triton_config raise_if_no_telemetry end_span
        TracableModel
    """,
}
# Modules without a leading underscore that are the inside of a distribution all the same.
INTERNAL = (
    "pytriton.catalog",
    "pytriton.cli.",
    "pytriton.console",
    "pytriton.dynamo",
    "pytriton.guests.",
    "pytriton.mcp",
    "pytriton.openai.",
    "pytriton.ray.",
    "pytriton.server.",
    "pytriton.inprocess.",
    "pytriton.proxy_backend.",
    "pytriton.proxy.trace",
    "pytriton.decorators.harness_checks",
    "pytriton.decorators.serving",
    "pytriton.testing.",
    "pytriton.model_config.dtypes",
    "pytriton.model_config.warmup",
    "pytriton.client.management",
)


@functools.cache
def pages() -> dict[str, str]:
    """Return the generated pages, by file name."""
    made: dict[str, str] = REFERENCE["pages"]()
    return made


PROMISED_NAMES = [(module, name) for module, names in PROMISED.items() for name in names.split()]


@pytest.mark.parametrize(("module", "name"), PROMISED_NAMES)
def test_a_promised_name_is_at_its_path_and_public(module: str, name: str) -> None:
    found = importlib.import_module(module)
    assert hasattr(found, name), f"from {module} import {name}"
    assert name in found.__all__


@pytest.mark.parametrize("module", sorted(set(MODULES) | set(PROMISED)))
def test_every_public_name_is_in_the_reference(module: str) -> None:
    assert module in MODULES, f"add {module} to PAGES of tools/reference.py"
    page = next(page for page, modules in REFERENCE["PAGES"].items() if module in modules)
    text = pages()[f"{page}.md"]
    found = importlib.import_module(module)
    missing = [name for name in found.__all__ if f"## {module}.{name}\n" not in text]
    assert missing == []


def test_every_public_module_is_in_the_reference() -> None:
    modules = set()
    for source in ROOT.glob("packages/*/src"):
        for file in source.glob("pytriton/**/*.py"):
            parts = file.relative_to(source).with_suffix("").parts
            path = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            if not any(part.startswith("_") for part in parts[:-1]) and not path.rpartition(".")[2].startswith("_"):
                modules.add(path)
    public = {
        path for path in modules if not path.startswith(INTERNAL) and path not in ("pytriton.cli", "pytriton.server")
    }
    # A package that only holds others, and names kept for scripts of PyTriton, which docs/migrating.md has.
    public -= {"pytriton.proxy", "pytriton.constants"}
    assert public - set(MODULES) == set()


def test_the_page_of_signatures_is_what_the_sources_say() -> None:
    written = REFERENCE["SIGNATURES"].read_text(encoding="utf-8")
    assert written == REFERENCE["signatures"](), "run `python3 tools/dev.py reference`, and commit what it writes"


def test_the_menu_has_every_page_of_the_reference() -> None:
    menu = re.findall(r":\s+reference/([\w.-]+\.md)\s*$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(menu) == sorted(pages())


def test_the_reference_holds_signatures_and_examples() -> None:
    for name, text in pages().items():
        for language, block in re.findall(r"^```(\w*)[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            assert language in ("pyi", "python"), f"{name}: a block {language!r} in the reference"
            if language == "python":
                compile(block, name, "exec")


def test_every_public_name_says_what_it_is() -> None:
    silent = [
        f"{entry.module}.{entry.name}"
        for entry in REFERENCE["entries"](REFERENCE["load"]())
        if not REFERENCE["summary"](entry.described)
    ]
    assert silent == []


def test_what_follows_from_the_settings_is_up_to_date() -> None:
    assert sorted(SETTINGS["stale"]()) == [], "run `python3 tools/dev.py reference`, and commit what it writes"


def test_the_settings_of_a_model_are_those_of_its_proxy() -> None:
    """`ModelConfig` lies in another distribution: names, defaults and limits have to be the same."""
    ours = {field.name: field for field in setting_fields(ServingSettings)}
    theirs = ModelConfig()
    assert ours.keys() - vars(theirs).keys() == {"arena_idle_s"}
    for name in ours.keys() & vars(theirs).keys():
        field = ours[name]
        assert getattr(theirs, name) == field.default, name
        if field.type is bool:
            continue
        low, high = field.about.minimum, field.about.maximum
        for value in (low, min(high, 2**63 - 1)):
            ModelConfig(**{name: field.type(value)}).validate()
        for value in (low - 0.001 if field.type is float else low - 1, high * 2):
            with pytest.raises(PyTritonBadParameterError, match=name):
                ModelConfig(**{name: field.type(value)}).validate()


def test_the_page_on_clients_has_every_option_of_a_call() -> None:
    page = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    table = page.partition("| option | |\n")[2].partition("\n\n")[0]
    named = [name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    options = set(inspect.signature(BaseModelClient.with_options).parameters) - {"self"}
    assert set(named) == options


def test_every_client_takes_the_options_of_all_and_hands_them_on() -> None:
    """A copy of a client, and one that was pickled, have the settings that `_settings` names."""
    options = list(inspect.signature(BaseModelClient).parameters)
    with FuturesModelClient("localhost", "m") as client:
        assert list(client._settings()) == options
    own = client._own_settings().keys()
    assert [name for name in inspect.signature(FuturesModelClient).parameters if name not in own] == options


def test_the_page_on_models_has_every_field_of_the_configuration() -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    table = page.partition("## ModelConfig\n\n")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|", table, flags=re.MULTILINE)
    assert [name for name, _ in rows] == list(vars(ModelConfig()))
    said = {name: default.strip("`") for name, default in rows}
    assert (said.pop("arena_budget_bytes"), said.pop("stream_backlog_bytes")) == ("4 GiB", "4 MiB")
    assert said.pop("batcher") == "DynamicBatcher()"
    values = vars(ModelConfig())
    assert said == {name: f"{values[name]:g}" if type(values[name]) is float else str(values[name]) for name in said}
