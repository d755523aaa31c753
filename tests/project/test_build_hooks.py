"""The build hooks of pytriton-server and pytriton-proxy-backend, in the cases that a built wheel does not show."""

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest
import tomli

from pytriton.proxy_backend.python_proxy.bundle import PACKAGE, read_bundle
from support.paths import ROOT, load_program


def load_hook(dist: str) -> types.ModuleType:
    return load_program(ROOT / "packages" / f"pytriton-{dist}" / "hatch_build.py")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    for name in ("PYTRITON_TRITONSERVER_DIR", "PYTRITON_BUILD_ARCH", "PYTRITON_BUNDLE_TRITONSERVER"):
        monkeypatch.delenv(name, raising=False)
    return load_hook("server")


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    for name in ("CXX", "PYTRITON_BUILD_ARCH", "PYTRITON_BUILD_WITH_ZIG"):
        monkeypatch.delenv(name, raising=False)
    return load_hook("proxy-backend")


# --- tritonserver --------------------------------------------------------------------------------------------------


def test_a_folder_laid_out_as_opt_tritonserver_is_taken_over(
    server: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not server.EDITABLE_FOLDER.is_dir():
        pytest.skip("no tritonserver in the source tree")
    given = tmp_path / "given"
    shutil.copytree(server.EDITABLE_FOLDER, given)
    (given / "lib" / "libpython3.13.so.1.0").write_bytes(b"not wanted")
    (given / "lib" / "libunused.so").write_bytes(b"not wanted")
    monkeypatch.setenv("PYTRITON_TRITONSERVER_DIR", str(given))
    taken = tmp_path / "taken"
    source = server.open_source(tmp_path)
    server.assemble(source, taken)
    names = [{path.relative_to(top) for path in server.files_below(top)} for top in (server.EDITABLE_FOLDER, taken)]
    assert names[0] == names[1]
    assert source.platform.startswith("linux_")
    started = subprocess.run([str(taken / "bin" / "tritonserver"), "--help"], capture_output=True, text=True)
    assert "--model-repository" in started.stdout + started.stderr


def test_needed_libraries_are_those_that_the_loader_names(server: types.ModuleType) -> None:
    library = server.EDITABLE_FOLDER / "bin" / "tritonserver"
    if not library.is_file():
        pytest.skip("no tritonserver in the source tree")
    names = server.needed_libraries(library)
    assert "libc.so.6" in names
    assert any(name.startswith("libtritonserver") for name in names)
    listed = subprocess.run(["ldd", str(library)], capture_output=True, text=True, check=True).stdout
    assert [name for name in names if name not in listed] == []


def test_a_text_file_needs_no_libraries(server: types.ModuleType) -> None:
    assert server.needed_libraries(Path(__file__)) == []


def test_a_folder_without_a_server_is_refused(
    server: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTRITON_TRITONSERVER_DIR", str(tmp_path))
    with pytest.raises(server.BundleError, match=r"there is no .*bin/tritonserver"):
        server.wanted_source()


def test_a_machine_without_a_server_is_told_what_to_do(
    server: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTRITON_BUILD_ARCH", "riscv64")
    with pytest.raises(server.BundleError, match=r"on riscv64.*x86_64 and aarch64.*PYTRITON_BUNDLE_TRITONSERVER=0"):
        server.wanted_source()


@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
def test_a_wheel_with_another_hash_is_refused(
    server: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    name = server.NVIDIA_WHEEL.format(arch=arch)
    offered, cache = tmp_path / "offered", tmp_path / "cache"
    damaged = cache / "pytriton-build" / name
    for path in (offered / name, damaged):
        path.parent.mkdir(parents=True)
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr("pytriton/tritonserver/bin/tritonserver", "something else")
    for variable in [variable for variable in os.environ if variable.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(offered))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    with pytest.raises(server.BundleError, match=r"(?s)HASHES.*PYTRITON_TRITONSERVER_DIR"):
        server.fetch_wheel(arch, tmp_path)


def test_every_file_of_others_has_a_licence_a_text_and_a_notice(server: types.ModuleType) -> None:
    components = json.loads(server.COMPONENTS.read_text())
    folder = server.COMPONENTS.parent
    project = tomli.loads((folder / "pyproject.toml").read_text())["project"]
    # As in `A AND (B OR C)`; of alternatives one part of the expression has them all.
    parts = {part.strip("()") for part in project["license"].split(" AND ")}
    assert parts == {component["license"] for component in components} | {"Apache-2.0"}
    notice = (folder / "NOTICE").read_text()
    for component in components:
        text = folder / component["text"]
        assert (text if text.name == "LICENSE" else folder / "licenses" / text.name).is_file(), component["name"]
        for name in component["files"]:
            assert name.startswith(("tritonserver", "libtriton", "triton_")) or re.search(rf"\b{name}\b", notice), name


def test_the_bill_of_materials_has_every_file_once(server: types.ModuleType) -> None:
    folder = server.EDITABLE_FOLDER
    assert folder.is_dir(), "run `python3 tools/dev.py native`"
    bill = server.bill_of_materials(folder, "9.9.9")
    assert bill == server.bill_of_materials(folder, "9.9.9")
    nested = [each for component in bill["components"] for each in component.get("components", [component])]
    files = {each["name"].removeprefix(f"{server.PACKAGE_PATH}/"): each for each in nested if each["type"] == "file"}
    there = {path.relative_to(folder).as_posix(): path for path in server.files_below(folder)}
    assert files.keys() == {name for name in there if name != "SOURCE" and not name.startswith("licenses/")}
    name = "bin/tritonserver"
    assert files[name]["hashes"] == [{"alg": "SHA-256", "content": server.sha256(there[name])}]
    # None that the table of components does not know.
    assert all(component["type"] == "library" for component in bill["components"])
    assert bill["metadata"]["component"]["purl"] == "pkg:pypi/pytriton-server@9.9.9"
    references = [each["bom-ref"] for each in [*bill["components"], *files.values()]]
    assert len(set(references)) == len(references)


def test_the_server_can_be_left_out(server: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server.is_bundled()
    monkeypatch.setenv("PYTRITON_BUNDLE_TRITONSERVER", "0")
    assert not server.is_bundled()


# --- the native proxy ----------------------------------------------------------------------------------------------


def test_the_library_exports_the_entry_points_of_a_backend_and_nothing_else(proxy: types.ModuleType) -> None:
    library = proxy.EDITABLE_FOLDER / proxy.LIBRARY_NAME
    assert library.is_file(), "run `python3 tools/dev.py native`"
    if shutil.which("nm") is None:
        pytest.skip("nm is not on PATH")
    table = subprocess.run(["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True)
    exported = {line.split()[-1].partition("@")[0] for line in table.stdout.splitlines()}
    assert "TRITONBACKEND_ModelInstanceExecute" in exported
    assert {name for name in exported if not name.startswith("TRITONBACKEND_")} == set()


def test_the_library_for_callables_in_process_needs_nothing_of_triton(proxy: types.ModuleType) -> None:
    """In a process whose Triton keeps its symbols to itself, a symbol of Triton's would not be found."""
    library = proxy.EDITABLE_FOLDER / proxy.INPROCESS_LIBRARY_NAME
    assert library.is_file(), "run `python3 tools/dev.py native`"
    if shutil.which("nm") is None:
        pytest.skip("nm is not on PATH")
    table = subprocess.run(["nm", "-D", str(library)], capture_output=True, text=True, check=True)
    symbols = [line.split() for line in table.stdout.splitlines()]
    exported = {name.partition("@")[0] for *_, kind, name in symbols if kind not in "Uw"}
    assert "TRITONBACKEND_ModelInstanceExecute" in exported
    assert "pytriton_inprocess_connect" in exported
    assert {name for name in exported if not name.startswith(("TRITONBACKEND_", "pytriton_inprocess_"))} == set()
    assert [name for *_, kind, name in symbols if kind in "Uw" and name.startswith("TRITON")] == []


def test_what_the_compiler_says_is_in_the_error(
    proxy: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'arena.cc:1: no such thing' >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", f"{compiler} -m64")
    with pytest.raises(proxy.CompileError, match=r"(?s)-m64 .*failed \(3\).*no such thing.*PYTRITON_BUILD_WITH_ZIG=1"):
        proxy.compile_library(tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_missing_compiler_is_named(proxy: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "nothing"))
    with pytest.raises(proxy.CompileError, match="There is no C\\+\\+ compiler"):
        proxy.compile_library(tmp_path)


def test_zig_is_asked_for_only_where_there_is_no_compiler(
    proxy: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = proxy.NativeProxyBuildHook.dependencies
    monkeypatch.setenv("CXX", "c++")
    assert ask(None) == []
    monkeypatch.setenv("PYTRITON_BUILD_WITH_ZIG", "1")
    assert ask(None) == [proxy.ZIG_REQUIREMENT]
    monkeypatch.delenv("PYTRITON_BUILD_WITH_ZIG")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ask(None) == [proxy.ZIG_REQUIREMENT]
    assert proxy.find_compiler().platform.startswith("manylinux_2_17_")


def test_another_machine_is_compiled_for_with_zig(proxy: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    other = "aarch64" if proxy.target_arch() == "x86_64" else "x86_64"
    monkeypatch.setenv("PYTRITON_BUILD_ARCH", other)
    compiler = proxy.find_compiler()
    assert compiler.command[:3] == (sys.executable, "-m", "ziglang")
    assert f"{other}-linux-gnu.2.17" in compiler.command
    assert compiler.platform == f"manylinux_2_17_{other}"


def test_an_unknown_machine_is_refused(proxy: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTRITON_BUILD_ARCH", "riscv64")
    with pytest.raises(proxy.CompileError, match=r"not for .* on riscv64"):
        proxy.find_compiler()


EXPORTED = 'extern "C" __attribute__((visibility("default")))'


@pytest.fixture
def small(proxy: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A library of two files with a header each and one for both, which a recording compiler compiles."""
    native, installed = tmp_path / "native", tmp_path / "installed"
    native.mkdir()
    (native / "deep.h").write_text("inline int Deep() { return 1; }\n")
    for name in ("one", "two"):
        (native / f"{name}.h").write_text('#pragma once\n#include "deep.h"\n')
        (native / f"{name}.cc").write_text(f'#include "{name}.h"\n{EXPORTED} int {name}() {{ return Deep(); }}\n')
    (native / "two.h").write_text("inline int Deep() { return 2; }\n")
    compiler, record = tmp_path / "compiler", tmp_path / "record"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {record}\nexec {shutil.which("c++")} "$@"\n')
    compiler.chmod(0o755)
    library = proxy.NativeLibrary("libsmall.so", ("*.cc",), (), (), ("one", "two"))
    for name, value in (("NATIVE", native), ("ROOT", tmp_path), ("EDITABLE_FOLDER", installed)):
        monkeypatch.setattr(proxy, name, value)
    monkeypatch.setattr(proxy, "LIBRARY_PATH", "installed")
    monkeypatch.setattr(proxy, "LIBRARIES", (library._replace(path="../installed"),))
    (tmp_path / "src").mkdir()
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("PYTRITON_BUILD_OBJECTS", str(tmp_path / "objects"))

    def build(*, force: bool = False) -> list[str]:
        """Build, and return the names of the files that were compiled, and `link`."""
        record.write_text("")
        proxy.refresh_editable(force=force)
        lines = [line.split() for line in record.read_text().splitlines()]
        return sorted(Path(line[line.index("-c") + 1]).name if "-c" in line else "link" for line in lines if line[1:])

    return types.SimpleNamespace(native=native, build=build, library=installed / "libsmall.so", objects=tmp_path)


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler on this machine")
def test_only_files_that_changed_are_compiled_again(small: types.SimpleNamespace) -> None:
    assert small.build() == ["link", "one.cc", "two.cc"]
    assert small.build() == []
    for path in small.native.iterdir():
        path.touch()
    assert small.build() == []
    before = (small.native / "deep.h").read_text()
    (small.native / "deep.h").write_text(before.replace("1", "7"))
    assert small.build() == ["link", "one.cc"]
    assert ctypes.CDLL(str(small.library)).one() == 7
    (small.native / "two.cc").write_text((small.native / "two.cc").read_text() + "// more\n")
    assert small.build() == ["link", "two.cc"]
    # What was there before is found again.
    (small.native / "deep.h").write_text(before)
    assert small.build() == ["link"]
    small.library.unlink()
    assert small.build() == ["link"]
    assert small.build(force=True) == ["link", "one.cc", "two.cc"]


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler on this machine")
def test_other_flags_and_another_compiler_find_nothing_of_the_others(
    small: types.SimpleNamespace, proxy: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert small.build() == ["link", "one.cc", "two.cc"]
    monkeypatch.setattr(proxy, "COMPILE_FLAGS", (*proxy.COMPILE_FLAGS, "-DMORE"))
    assert small.build() == ["link", "one.cc", "two.cc"]
    compiler = Path(os.environ["CXX"])
    compiler.write_text(
        compiler.read_text().replace("exec ", 'if [ "$1" = --version ]; then echo 99; exit 1; fi\nexec ')
    )
    small.library.unlink()
    assert small.build() == ["link", "one.cc", "two.cc"]
    monkeypatch.delenv("PYTRITON_BUILD_OBJECTS")
    small.library.unlink()
    assert small.build() == ["link", "one.cc", "two.cc"]


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler on this machine")
def test_compiled_files_that_nobody_used_for_a_month_are_removed(small: types.SimpleNamespace) -> None:
    small.build()
    [*objects] = small.objects.joinpath("objects").iterdir()
    assert len(objects) == 2
    long_ago = objects[0].stat().st_mtime - 31 * 24 * 3600
    for path in objects:
        os.utime(path, (long_ago, long_ago))
    (small.native / "two.cc").write_text('extern "C" int two() { return 3; }\n')
    assert small.build() == ["link", "two.cc"]
    left = small.objects.joinpath("objects").iterdir()
    assert sorted(path.name.partition("-")[0] for path in left) == ["one", "two"]


@pytest.mark.parametrize(
    ("library", "kinds", "exports"),
    [
        ("_accelerator.abi3.so", {"U"}, r"PyInit__accelerator"),
        # Found at the first call: a tritonserver without an interpreter loads it, too.
        ("_lib/libtriton_pytriton_inprocess.so", {"w", "v"}, r"TRITONBACKEND_\w+|pytriton_inprocess_\w+"),
    ],
    ids=["accelerator", "inprocess"],
)
def test_what_calls_python_is_for_every_version_of_it(library: str, kinds: set[str], exports: str) -> None:
    """It needs no function of the interpreter that the oldest and the newest do not both have."""
    path = ROOT / "packages/pytriton-proxy-backend/src/pytriton/proxy_backend" / library
    assert path.is_file(), "run `python3 tools/dev.py native`"
    if shutil.which("nm") is None:
        pytest.skip("nm is not on PATH")
    table = subprocess.run(["nm", "-D", str(path)], capture_output=True, text=True, check=True)
    symbols = {name.partition("@")[0]: kind for *_, kind, name in map(str.split, table.stdout.splitlines())}
    needed = {name: kind for name, kind in symbols.items() if kind in "Uwv" and name.startswith(("Py", "_Py"))}
    assert needed
    assert set(needed.values()) <= kinds
    assert [name for name, kind in symbols.items() if kind not in "Uwv" and not re.fullmatch(exports, name)] == []
    header = (ROOT / "packages/pytriton-proxy-backend/native/python/python_abi.h").read_text()
    assert [name for name in needed if not re.search(rf"\b{name}\b", header)] == []
    assert [name for name in needed if name.startswith("_Py")] == ["_Py_NoneStruct"]
    assert [name for name in needed if not hasattr(ctypes.pythonapi, name)] == []


def test_the_libraries_name_no_folder_of_the_machine_that_built_them(proxy: types.ModuleType) -> None:
    for library in proxy.LIBRARIES:
        path = library.editable_folder / library.name
        assert path.is_file(), "run `python3 tools/dev.py native`"
        assert os.fsencode(ROOT) not in path.read_bytes(), library.name


def test_the_proxy_is_never_unmapped(proxy: types.ModuleType) -> None:
    # Threads that wait for Triton may be in it after the last model of its is gone.
    library = proxy.EDITABLE_FOLDER / proxy.LIBRARY_NAME
    if not library.is_file() or shutil.which("readelf") is None:
        pytest.skip("the native libraries are not compiled in the source tree, or there is no readelf")
    flags = subprocess.run(["readelf", "--dynamic", str(library)], capture_output=True, text=True, check=True)
    assert re.search(r"FLAGS_1.*NODELETE", flags.stdout)


# --- the Python proxy ----------------------------------------------------------------------------------------------


def test_the_python_proxy_is_one_file_that_is_always_the_same(proxy: types.ModuleType, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first, second = (proxy.write_bundle(tmp_path / name) for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes() == read_bundle()
    with zipfile.ZipFile(first) as bundle:
        names = bundle.namelist()
        assert {f"{PACKAGE}/__init__.py", f"{PACKAGE}/python_proxy/model.py", f"{PACKAGE}/wire/batch.py"} <= set(names)
        # Of the whole distribution, and what workers alone need.
        assert bundle.read(f"{PACKAGE}/__init__.py") == b""
        assert not [name for name in names if "/worker/" in name or "/runtime/" in name or name.endswith("/bundle.py")]
