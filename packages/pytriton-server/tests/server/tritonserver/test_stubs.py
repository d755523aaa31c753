"""The processes and the shared memory of Triton's Python backend, as they are found from outside."""

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytriton.server.tritonserver.stubs import STUB, Stub, remove_shared_memory, shared_memory_of, stubs_of


@pytest.mark.parametrize("is_script", [False, True], ids=["program", "start script"])
def test_stubs_are_found_with_their_model_and_memory(tmp_path: Path, is_script: bool) -> None:
    program = tmp_path / "backends" / "python" / STUB
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho started\nread line\n")
    program.chmod(0o755)
    model = tmp_path / "models" / "linear" / "3" / "model.py"
    model.parent.mkdir(parents=True)
    model.write_text("print('started', flush=True)\ninput()\n")
    command = [str(program), str(model), "region_1", "1048576"]
    executable = None if is_script else sys.executable

    with subprocess.Popen(
        command, executable=executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"

        assert list(stubs_of(os.getpid())) == [Stub(process.pid, ("linear", "3"), Path("/dev/shm/region_1"))]
        assert list(stubs_of(process.pid)) == []

        process.communicate("\n")

    assert list(stubs_of(os.getpid())) == []


def test_shared_memory_is_found_while_it_is_there() -> None:
    prefix = f"pytriton_test_{os.getpid()}_"
    file = Path("/dev/shm", f"{prefix}1")
    file.write_bytes(bytes(mmap.PAGESIZE))
    try:
        with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0):
            assert shared_memory_of(os.getpid(), prefix) == {file}
            assert file not in shared_memory_of(os.getpid())
            remove_shared_memory([file])
            assert shared_memory_of(os.getpid(), prefix) == set()
            remove_shared_memory([file])
    finally:
        file.unlink(missing_ok=True)


def test_a_process_that_has_ended_has_no_shared_memory() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert shared_memory_of(process.pid) == set()
