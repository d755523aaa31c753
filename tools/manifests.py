"""Hold the files of deploy/ against the schemas of those who read them: Kubernetes, KServe, Compose.

`kubectl kustomize` renders the base and every overlay, so that a patch that fits nothing is found, too. Run in the
environment `deploy`, which has the tools: `python3 tools/dev.py lint`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
# The oldest Kubernetes that is still supported by its makers; what it has, newer ones have.
OLDEST_KUBERNETES = "1.33"
# Kinds of others, whose schemas are not among those of Kubernetes.
FOREIGN = ("keda.sh/", "kustomize.config.k8s.io/")
# How OpenAPI's generator names what is in a list or a dictionary.
_CONTAINER = re.compile(r"([Ll]ist|[Dd]ict)[\[(](?:str, )?(.+)[\])]")
_PLAIN = {"str": str, "int": int, "bool": bool, "float": (int, float), "object": object, "IntOrString": (int, str)}


def main() -> int:
    """Check all files; print what is wrong with them, and return the exit code."""
    problems = [*kubernetes_problems(), *kserve_problems(), *other_problems()]
    print("\n".join(problems) or "All files of deploy/ are as their readers want them.")
    return 1 if problems else 0


def kubernetes_problems() -> Iterator[str]:
    """Yield what is wrong with the rendered manifests."""
    folders = sorted(path.parent for path in (DEPLOY / "kubernetes").rglob("kustomization.yaml"))
    for folder in folders:
        place = folder.relative_to(DEPLOY.parent)
        done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            yield f"{place}: {done.stderr.strip()}"
            continue
        manifests = list(yaml.safe_load_all(done.stdout))
        for manifest in manifests:
            if manifest["apiVersion"].startswith(FOREIGN):
                continue
            try:
                kubernetes_validate.validate(manifest, OLDEST_KUBERNETES, strict=True)
            except kubernetes_validate.ValidationError as error:
                yield f"{place}, {manifest['kind']}: {error.message} at {'.'.join(map(str, error.path))}"
        yield from (f"{place}: {problem}" for problem in reference_problems(manifests))


def reference_problems(manifests: list[Any]) -> Iterator[str]:
    """Yield the references between manifests that lead nowhere: ports by name, what an autoscaler scales."""
    by_kind = {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in manifests}
    deployment = by_kind["Deployment", "pytriton-app"]
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    names = {port["name"] for port in container["ports"]}
    wanted = {
        str(port["targetPort"])
        for manifest in manifests
        if manifest["kind"] == "Service"
        for port in manifest["spec"]["ports"]
    }
    wanted |= {container[probe]["httpGet"]["port"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")}
    yield from (f"no port of the container is called {name!r}" for name in sorted(wanted - names))
    for manifest in manifests:
        target = manifest["spec"].get("scaleTargetRef") if "spec" in manifest else None
        if target is not None and ("Deployment", target["name"]) not in by_kind:
            yield f"{manifest['kind']} scales {target['name']}, which is not there"
        if target is not None and "replicas" in deployment["spec"]:
            yield f"{manifest['kind']} and the Deployment both say how many replicas there are"


def kserve_problems() -> Iterator[str]:
    """Yield what is wrong with the manifests for KServe, by the types of its own client."""
    try:
        from kserve import models
    except ImportError:
        print("deploy/kserve: not checked, since kserve has no release for this Python")
        return

    kinds = {
        "ClusterServingRuntime": models.V1alpha1ClusterServingRuntime,
        "InferenceService": models.V1beta1InferenceService,
    }
    read = {}
    for path in sorted((DEPLOY / "kserve").glob("*.yaml")):
        manifest = yaml.safe_load(path.read_text())
        read[manifest["kind"]] = manifest
        yield from type_problems(manifest, kinds[manifest["kind"]].__name__, f"deploy/kserve/{path.name}")
    runtime, model = read["ClusterServingRuntime"], read["InferenceService"]["spec"]["predictor"]["model"]
    if model["runtime"] != runtime["metadata"]["name"]:
        yield f"deploy/kserve: the InferenceService wants the runtime {model['runtime']!r}, which is not there"
    if model["modelFormat"]["name"] not in [it["name"] for it in runtime["spec"]["supportedModelFormats"]]:
        yield "deploy/kserve: the runtime does not support the format of the InferenceService"


def type_problems(value: Any, kind: str, where: str) -> Iterator[str]:
    """Yield where a value is not of a type of KServe's or Kubernetes' client.

    Args:
        value: The value, as it was read.
        kind: The name of the type, as the client has it.
        where: The place of the value, for people.
    """
    container = _CONTAINER.fullmatch(kind)
    if container is not None:
        expected: Any = list if container[1].lower() == "list" else dict
        if not isinstance(value, expected):
            yield f"{where}: expected a {expected.__name__}, got {value!r}"
            return
        for key, item in enumerate(value) if expected is list else value.items():
            yield from type_problems(item, container[2], f"{where}.{key}")
    elif kind in _PLAIN:
        if not isinstance(value, _PLAIN[kind]):  # type: ignore[arg-type] # a type or several
            yield f"{where}: expected {kind}, got {value!r}"
    else:
        model = client_model(kind)
        fields = {wire: model.openapi_types[name] for name, wire in model.attribute_map.items()}
        if not isinstance(value, dict):
            yield f"{where}: expected a {kind}, got {value!r}"
            return
        for name, item in value.items():
            if name not in fields:
                yield f"{where}: {kind} has no {name!r}; it has {', '.join(sorted(fields))}"
            else:
                yield from type_problems(item, fields[name], f"{where}.{name}")


def client_model(kind: str) -> Any:
    """Return a type of KServe's client, or of that of Kubernetes."""
    import kubernetes.client
    from kserve import models

    return getattr(models, kind, None) or getattr(kubernetes.client, kind)


def other_problems() -> Iterator[str]:
    """Yield files that cannot be read, and mounts of Compose that are not there."""
    for path in sorted(DEPLOY.rglob("*")):
        try:
            if path.suffix == ".yaml":
                list(yaml.safe_load_all(path.read_text()))
            elif path.suffix == ".json":
                json.loads(path.read_text())
        except (yaml.YAMLError, json.JSONDecodeError) as error:
            yield f"{path.relative_to(DEPLOY.parent)}: {error}"
    compose = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
    for name, service in compose["services"].items():
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            is_there = (
                (DEPLOY / "compose" / source).exists() if source.startswith(".") else source in compose["volumes"]
            )
            if not is_there:
                yield f"deploy/compose/compose.yaml: {name} mounts {source}, which is not there"
        for dependency in service.get("depends_on", ()):
            if dependency not in compose["services"]:
                yield f"deploy/compose/compose.yaml: {name} depends on {dependency}, which is not there"


if __name__ == "__main__":
    sys.exit(main())
