"""What the source trees of the four distributions promise to each other, to pip and to type checkers."""

import importlib
import re
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli

from pytriton.client._core import dtypes as client_types
from pytriton.inprocess.capi.enums import DataType
from pytriton.inprocess.tensors.dtypes import NUMPY_TYPES, data_type_of
from pytriton.model_config import dtypes as declared_types
from pytriton.proxy_backend.wire import dtypes as wire_types
from support.paths import ROOT

DISTS = ("client", "decorators", "proxy-backend", "server")
# Imports that a distribution does without where the sibling is not installed.
OPTIONAL = {("packages/pytriton-decorators/src/pytriton/decorators/_fake_request.py", "proxy")}
# Packages whose contents users import by name.
PUBLIC_PACKAGES = (
    "pytriton.client",
    "pytriton.decorators",
    "pytriton.exceptions",
    "pytriton.model_config",
    "pytriton.proxy_backend",
    "pytriton.triton",
)


def metadata(dist: str) -> dict[str, Any]:
    text = (ROOT / "packages" / f"pytriton-{dist}" / "pyproject.toml").read_text()
    project: dict[str, Any] = tomli.loads(text)["project"]
    return project


def namespace_folder(dist: str) -> Path:
    return ROOT / "packages" / f"pytriton-{dist}" / "src" / "pytriton"


def children(dist: str) -> list[Path]:
    return sorted(path for path in namespace_folder(dist).iterdir() if path.is_dir() and path.name != "__pycache__")


@pytest.mark.parametrize("dist", DISTS)
def test_nothing_but_packages_lies_in_the_namespace(dist: str) -> None:
    # An __init__.py or a py.typed here would belong to whichever distribution is installed or removed last. What
    # `python -m pytriton` runs has to be here, has one owner, and leaves the namespace what it is.
    files = [path.name for path in namespace_folder(dist).iterdir() if not path.is_dir()]
    assert files == (["__main__.py"] if dist == "server" else [])
    assert all((child / "__init__.py").is_file() for child in children(dist))


def test_every_child_of_the_namespace_has_one_owner() -> None:
    names = [child.name for dist in DISTS for child in children(dist)]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("dist", DISTS)
def test_every_package_is_typed(dist: str) -> None:
    assert [child.name for child in children(dist) if not (child / "py.typed").is_file()] == []


@pytest.mark.parametrize("dist", DISTS)
def test_the_root_is_no_distribution_and_the_members_are(dist: str) -> None:
    assert "project" not in tomli.loads((ROOT / "pyproject.toml").read_text())
    assert metadata(dist)["name"] == f"pytriton-{dist}"


def test_all_versions_are_equal() -> None:
    assert len({metadata(dist)["version"] for dist in DISTS}) == 1


def test_siblings_are_pinned_exactly_and_only_by_the_server() -> None:
    pins = {dist: [line for line in metadata(dist)["dependencies"] if line.startswith("pytriton-")] for dist in DISTS}
    version = metadata("server")["version"]
    assert pins.pop("server") == [f"pytriton-{dist}=={version}" for dist in DISTS if dist != "server"]
    assert pins == {dist: [] for dist in pins}


@pytest.mark.parametrize("dist", DISTS)
def test_the_licence_is_the_one_of_the_repository(dist: str) -> None:
    assert (ROOT / "packages" / f"pytriton-{dist}" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize("dist", DISTS)
def test_no_distribution_imports_a_sibling_it_does_not_depend_on(dist: str) -> None:
    own = {child.name for child in children(dist)}
    foreign = {child.name for other in DISTS for child in children(other)} - own
    if dist == "server":
        foreign = set()
    statement = re.compile(r"^\s*(?:from|import) pytriton\.(\w+)", re.MULTILINE)
    imported = {
        (path.relative_to(ROOT).as_posix(), name)
        for path in namespace_folder(dist).rglob("*.py")
        for name in statement.findall(path.read_text())
    }
    assert {(path, name) for path, name in imported if name in foreign} - OPTIONAL == set()


@pytest.mark.parametrize("name", PUBLIC_PACKAGES)
def test_all_names_what_a_package_holds(name: str) -> None:
    package = importlib.import_module(name)
    ours = {
        attribute
        for attribute, value in vars(package).items()
        if not attribute.startswith("_") and (is_ours(value) or attribute.isupper())
    }
    assert sorted(ours - {"TYPE_CHECKING", "require_namespace_package"} - set(package.__all__)) == []
    assert [attribute for attribute in package.__all__ if not hasattr(package, attribute)] == []
    assert sorted(package.__all__) == sorted(set(package.__all__))


def is_ours(value: object) -> bool:
    """Tell whether a class, a function or a value was defined by us, and not imported from elsewhere."""
    return not isinstance(value, types.ModuleType) and str(getattr(value, "__module__", "")).startswith("pytriton.")


def test_distributions_that_do_without_each_other_have_the_same_namespace_guard() -> None:
    copies = [path for dist in DISTS for path in namespace_folder(dist).glob("*/_namespace.py")]
    assert len(copies) == len(DISTS) - 1  # the server uses the one of the decorators
    assert len({path.read_text() for path in copies}) == 1


def test_every_distribution_has_the_same_data_types() -> None:
    """The client, the decorators and the proxy backend do without each other, so each has a table of its own."""
    numeric = [it for it in DataType if it not in (DataType.INVALID, DataType.BYTES, DataType.BF16)]
    assert len(numeric) == 12
    for data_type in numeric:
        dtype = wire_types.dtype_of(int(data_type))
        assert (wire_types.code_of(dtype), data_type_of(dtype), NUMPY_TYPES[data_type]) == (data_type, data_type, dtype)
        assert client_types.datatype_of(dtype) == declared_types.wire_name(dtype) == data_type.name
        assert np.dtype(client_types.dtype_of(data_type.name)) == dtype
        assert np.dtype(declared_types.type_from_config_name(f"TYPE_{data_type.name}")) == dtype
    strings = np.dtype(np.object_)
    assert wire_types.code_of(strings) == wire_types.BYTES_CODE == DataType.BYTES == data_type_of(strings)
    assert client_types.datatype_of(strings) == declared_types.wire_name(strings) == "BYTES"
    assert wire_types.BF16_CODE == DataType.BF16
