"""What a model is: names, tensors, configuration, the context of its callables, and its warm-up."""

import contextvars
import copy
import dataclasses
import json
import logging
import weakref
from collections.abc import Mapping, Sequence

from pytriton.decorators import TritonContext
from pytriton.decorators.serving import DESCRIPTION_PARAMETER, check_callable, set_served_model
from pytriton.model_config import DeviceKind, ModelConfig, Tensor
from pytriton.model_config.generator import ModelConfigGenerator
from pytriton.model_config.triton_model_config import ResponseCache, TritonModelConfig
from pytriton.proxy.tracers import use_worker_tracer
from pytriton.proxy_backend import (
    ModelSpec,
)
from pytriton.proxy_backend.settings import ProxySettings
from pytriton.proxy_backend.wire.settings import setting_fields
from pytriton.server.models.arguments import (
    InferFunc,
    Servable,
    checked_callables,
    checked_config,
    checked_name,
    checked_tensors,
    checked_version,
    named_specs,
    wire_specs,
)
from pytriton.server.models.callers import CALLING_MODEL
from pytriton.server.models.hinted import describe, description_of, ignores_parameters, is_hinted, load_callable
from pytriton.server.models.notebooks import in_notebook
from pytriton.server.models.process_workers import (
    ProcessWorker,
    check_golden,
    common_idle_timeout,
    common_scaling,
    common_start,
)
from pytriton.server.models.warmup import WarmupBatches

_SHORT_NAME_LENGTH = 12
# The settings of a proxy that servers without one obey as well.
_OBEYED_IN_PROCESS = {"batching", "decoupled", "execution_timeout_s"}

logger = logging.getLogger(__name__)


class ModelDefinition:
    """One version of a model: its checked description, and the callables that are to serve it, wherever they run."""

    def __init__(
        self,
        *,
        name: "str | Servable",
        infer_func: "Servable | None",
        inputs: Sequence[Tensor] | None,
        outputs: Sequence[Tensor] | None,
        version: int,
        config: ModelConfig | None,
        strict: bool,
        triton_context: TritonContext,
    ) -> None:
        described = describe(name, infer_func, inputs, outputs, config)
        self.name = name = checked_name(described.name)
        self._inputs = checked_tensors(described.inputs, "inputs", name)
        self._outputs = checked_tensors(described.outputs, "outputs", name)
        self._strict = strict
        self.version = checked_version(version, name)
        infer_funcs = checked_callables(described.infer_func, name)
        named_inputs = named_specs(self._inputs, "INPUT", name)
        named_outputs = named_specs(self._outputs, "OUTPUT", name)
        config = checked_config(described.config, name, named_inputs, named_outputs)
        self.config = copy.deepcopy(config)
        """How it is served."""
        self.triton_config = TritonModelConfig(
            model_name=name,
            model_version=self.version,
            max_batch_size=int(config.max_batch_size or 0),
            batching=bool(config.batching),
            batcher=self.config.batcher,
            # A single Triton instance gives batches to all workers.
            instance_group={DeviceKind.KIND_CPU: 1},
            decoupled=bool(config.decoupled),
            inputs=named_inputs,
            outputs=named_outputs,
            response_cache=ResponseCache(enable=True) if config.response_cache else None,
            model_warmup=self.config.model_warmup,
            backend_parameters={**description_of(infer_funcs), **self.config.parameters},
            cost=config.cost,
        )
        self.callables: list[InferFunc | ProcessWorker] = [load_callable(infer, name) for infer in infer_funcs]
        """What serves it."""
        self.idle_timeout_s = common_idle_timeout(self.callables, name)
        """After how many seconds without a request its workers sleep; None is never."""
        self.starts_asleep = common_start(self.callables, name)
        """Whether its workers begin asleep."""
        check_golden(self.callables, self.config, name)
        processes = [each for each in self.callables if isinstance(each, ProcessWorker)]
        self.has_processes = bool(processes)
        """Whether processes of their own serve it, beside threads of this one or alone."""
        self.is_pinned = any(each.pinned for each in processes)
        """Whether its workers run on although another model needs their memory."""
        self.is_movable = len(processes) == len(self.callables) and not self.is_pinned
        """Whether its workers may be put to sleep when another model needs their memory."""
        self.scaling = common_scaling(self.callables, name, self.batching_delay_s)
        """When its workers get more or fewer; None where their number stays."""
        self.ignores_parameters = all(map(ignores_parameters, infer_funcs))
        """Whether none of that reads the parameters of requests."""
        # The callables that the user knows, by which their configuration is found.
        self._published = [infer for infer in infer_funcs if not isinstance(infer, ProcessWorker)]
        for infer in self.callables:
            if not isinstance(infer, ProcessWorker):
                check_callable(infer, self.triton_config)
        self.triton_context = triton_context
        """What the callables learn about the other models; the same for all models of a server."""
        self.spec = ModelSpec(
            name=name,
            version=self.version,
            inputs=wire_specs(self.triton_config.inputs),
            outputs=wire_specs(self.triton_config.outputs),
            batching=self.triton_config.batching,
            max_batch_size=self.triton_config.max_batch_size if config.batching else 0,
            decoupled=self.triton_config.decoupled,
            strict=bool(strict),
            # In a notebook, the log appears below another cell, if at all.
            send_tracebacks=bool(config.send_tracebacks) or in_notebook(),
            cost=None if config.cost is None else config.cost.fields(),
        )
        """The model as a worker sees it."""
        self._warmup = WarmupBatches(
            self.config.model_warmup or (),
            batching=bool(config.batching),
            output_names=[spec.name for spec in named_outputs],
        )

    def successor(
        self,
        infer_func: "Servable",
        *,
        inputs: Sequence[Tensor] | None = None,
        outputs: Sequence[Tensor] | None = None,
        config: ModelConfig | None = None,
        strict: bool | None = None,
    ) -> "ModelDefinition":
        """Define the model that replaces this one under its name and version; None keeps a value, or uses the hints."""
        hinted = is_hinted(infer_func)
        return ModelDefinition(
            name=self.name,
            infer_func=infer_func,
            inputs=self._inputs if inputs is None and not hinted else inputs,
            outputs=self._outputs if outputs is None and not hinted else outputs,
            version=self.version,
            config=self.config if config is None and not hinted else config,
            strict=self._strict if strict is None else strict,
            triton_context=self.triton_context,
        )

    @property
    def key(self) -> tuple[str, int]:
        """What no two models of one server share: the name without regard to case, and the version."""
        return self.name.lower(), self.version

    @property
    def settings_of_workers(self) -> list[str]:
        """The options of its `ModelConfig` that are about workers, as far as they were given."""
        names = [field.name for field in setting_fields(ProxySettings) if hasattr(ModelConfig, field.name)]
        of_workers = [name for name in names if name not in _OBEYED_IN_PROCESS]
        return [name for name in of_workers if getattr(self.config, name) != getattr(ModelConfig, name)]

    @property
    def warmup_timeout_s(self) -> float:
        """How long its warm-up may take, in seconds."""
        return float(self.config.warmup_timeout_s)

    @property
    def execution_timeout_s(self) -> float | None:
        """How long a batch may take, in seconds; None is as long as it likes."""
        return self.config.execution_timeout_s

    def new_warmup(self) -> WarmupBatches:
        """Return the batches of its warm-up, for one of its callables."""
        return copy.copy(self._warmup)

    def make_context(self, infer: InferFunc, tracer: object) -> contextvars.Context:
        """Make the context in which a callable runs: a copy of the current one that knows the model."""
        context = contextvars.copy_context()
        context.run(use_worker_tracer, tracer)
        context.run(CALLING_MODEL.set, weakref.ref(self))
        context.run(set_served_model, infer, self.triton_config, self.triton_context)
        return context

    @property
    def config_text(self) -> str:
        """The text of the model's `config.pbtxt`, which serves all versions found in the model's folder."""
        return render_config(self.triton_config)

    def differences(self, other: "ModelDefinition") -> list[str]:
        """Return the fields in which the configurations of two models differ, in words; empty if they are equal.

        What their authors call the types of the same tensors, and say about the model, makes no difference.
        """
        if self.comparable_text == other.comparable_text:
            return []
        pairs = [
            (name, getattr(self.triton_config, name), getattr(other.triton_config, name))
            for name in ("inputs", "outputs", "batching", "max_batch_size", "batcher", "decoupled", "cost")
        ]
        return [f"{name} ({mine} and {its})" for name, mine, its in pairs if mine != its] or ["its tensors"]

    @property
    def comparable_text(self) -> str:
        """`config_text` without the hints of tensors and the description, by which nothing is served."""
        config = self.triton_config
        parameters = {key: it for key, it in config.backend_parameters.items() if key != DESCRIPTION_PARAMETER}
        inputs = [dataclasses.replace(spec, hint=None) for spec in config.inputs or ()]
        outputs = [dataclasses.replace(spec, hint=None) for spec in config.outputs or ()]
        return render_config(dataclasses.replace(config, inputs=inputs, outputs=outputs, backend_parameters=parameters))

    def config_json(self, parameters: Mapping[str, str]) -> str:
        """Return `config_text` as JSON with further parameters; Triton loads the model again if they change."""
        parameters = {**self.triton_config.backend_parameters, **parameters}
        return render_config_json(dataclasses.replace(self.triton_config, backend_parameters=parameters))

    @property
    def batching_delay_s(self) -> float:
        """How long Triton may delay a request for others to join its batch, in seconds."""
        batcher = self.triton_config.batcher
        return 0.0 if batcher is None else batcher.max_queue_delay_microseconds * 1e-6

    def warn_without_cache(self, cache_bytes: int, remedy: str) -> None:
        """Warn if the model asks for cached answers, and the server has no memory for them."""
        if self.config.response_cache and not cache_bytes:
            logger.warning(
                "Model %r: response_cache=True has no effect, because the server has no cache for it. Give it one with "
                "%s.",
                self.name,
                remedy,
            )

    def publish(self) -> None:
        """Let the callables of all models of the server see this model's configuration."""
        for infer in self._published:
            self.triton_context.model_configs[infer] = self.triton_config

    def unpublish(self) -> None:
        """Take the configuration back where `publish` has put it and nobody has put another one since."""
        configs = self.triton_context.model_configs
        for infer in self._published:
            if configs.get(infer) is self.triton_config:
                del configs[infer]


def render_config(config: TritonModelConfig) -> str:
    """Return the text of `config.pbtxt`, without what is not for Triton."""
    return ModelConfigGenerator(triton_part(config)).get_text()


def render_config_json(config: TritonModelConfig) -> str:
    """Return the same as JSON, for the parameter `config` of a call of Triton's model repository extension."""
    return json.dumps(ModelConfigGenerator(triton_part(config)).get_config())


def triton_part(config: TritonModelConfig) -> TritonModelConfig:
    """Return the part of a configuration that Triton sees.

    Workers do the warm-up, and the proxy keeps answers: Triton's own cache mistakes failures for empty answers, and
    confuses requests of other shapes, parameters or outputs.
    """
    return dataclasses.replace(config, model_warmup=None, response_cache=None)
