"""The command `init`: the files of a new project."""

import importlib.metadata
from pathlib import Path

_APP = '''"""A model: `pytriton serve app.py --reload` serves it, and serves it anew whenever this file is saved."""

from pytriton.decorators import model


# The hints say what comes and what goes. Triton joins up to 16 samples of requests that wait at the same time.
@model(max_batch_size=16)
def shout(text: str) -> str:
    """Return the text in capitals."""
    return text.upper()
'''
_TEST = '''"""Calls the model as the server would, without a server: `pip install pytest`, then `pytest`."""

from app import shout
from pytriton.decorators.testing import Harness


def test_text_comes_back_in_capitals() -> None:
    # Two samples, each with one text.
    result = Harness(shout).infer({"text": [["hello"], ["you"]]})
    assert result["output"].tolist() == [[b"HELLO"], [b"YOU"]]
'''
_REQUIREMENTS = """pytriton-server=={version}
"""
_DOCKERFILE = """# docker build -t {name} . && docker run --rm -p 8000-8002:8000-8002 {name}
FROM python:3.12-slim
WORKDIR /app
COPY requirements.txt .
RUN pip install --no-cache-dir -r requirements.txt
COPY app.py .
# Sockets and logs of the server go there: the only place that is written to.
ENV PYTRITON_HOME=/run/pytriton PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
RUN install -d -m 0700 -o 65532 -g 65532 /run/pytriton
USER 65532:65532
# HTTP, gRPC, metrics.
EXPOSE 8000 8001 8002
HEALTHCHECK --start-period=60s --interval=10s --timeout=3s \\
    CMD ["python", "-c", "import http.client as c; h = c.HTTPConnection('127.0.0.1', 8000, timeout=2); \
h.request('GET', '/v2/health/ready'); exit(h.getresponse().status != 200)"]
# No shell around it: the program itself gets SIGTERM, also as process 1.
ENTRYPOINT ["pytriton", "serve", "app.py", "--log-format", "json"]
"""
_DOCKERIGNORE = """*
!app.py
!requirements.txt
"""
_README = """# {name}

```
pytriton serve app.py --reload
pytriton models localhost:8000 shout
pytriton infer localhost:8000 shout text=hello
pytest
```

`app.py` has the model, `test_app.py` its test, which needs no server, `Dockerfile` makes an image of it.
"""


class ProjectError(Exception):
    """The files cannot be written; the text says why."""


def make_project(folder: Path) -> list[str]:
    """Write the files of a new project, and return their names. If one of them exists, none is written."""
    name = folder.absolute().name or "app"
    version = importlib.metadata.version("pytriton-server")
    files = {
        "app.py": _APP,
        "test_app.py": _TEST,
        "requirements.txt": _REQUIREMENTS.format(version=version),
        "Dockerfile": _DOCKERFILE.format(name=name.lower()),
        ".dockerignore": _DOCKERIGNORE,
        "README.md": _README.format(name=name),
    }
    there = [file for file in files if (folder / file).exists()]
    if there:
        raise ProjectError(f"{folder} has {', '.join(there)} already: name another folder, or move them away.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            with (folder / file).open("x", encoding="utf-8") as opened:
                opened.write(text)
    except OSError as error:
        raise ProjectError(f"{error.filename} cannot be written: {error.strerror or error}.") from error
    return list(files)
