"""The file of `pytriton serve --config`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pytriton.cli.config_file import ConfigFile, ConfigFileError, read_config
from pytriton.model_config import Cost, ModelConfig
from pytriton.model_config.common import TimeoutAction
from pytriton.model_config.warmup import ModelWarmup, WarmupInput

OPTIONS = {"workers": int, "log_level": str, "unprotected": bool}
TOML = """
workers = 2
log_level = "DEBUG"

[server]
http_port = 0
cache_config = ["local,size=1048576"]

[models.net]
workers = 3
max_batch_size = 16

[models.net.batcher]
max_queue_delay_microseconds = 100
priority_levels = 2
default_priority_level = 1

[models.net.batcher.priority_queue_policy.1]
timeout_action = "DELAY"
"""
YAML = """
workers: 2
log_level: DEBUG
server: {http_port: 0, cache_config: ["local,size=1048576"]}
models:
  net:
    workers: 3
    max_batch_size: 16
    batcher:
      max_queue_delay_microseconds: 100
      priority_levels: 2
      default_priority_level: 1
      priority_queue_policy: {1: {timeout_action: DELAY}}
"""


def read(folder: Path, text: str, name: str = "serve.toml") -> ConfigFile:
    path = folder / name
    path.write_text(text)
    return read_config(path, OPTIONS)


@pytest.mark.parametrize(("name", "text"), [("serve.toml", TOML), ("serve.yaml", YAML), ("serve.yml", YAML)])
def test_options_settings_and_models(tmp_path: Path, name: str, text: str) -> None:
    if name != "serve.toml":
        pytest.importorskip("yaml")
    file = read(tmp_path, text, name)
    assert file.options == {"workers": 2, "log_level": "DEBUG"}
    assert file.server == {"http_port": 0, "cache_config": ["local,size=1048576"]}
    assert (file.workers("net", 2), file.workers("other", 2)) == (3, 2)
    config = file.configure("net", ModelConfig(response_cache=True))
    assert (config.max_batch_size, config.response_cache) == (16, True)
    assert config.batcher is not None
    assert config.batcher.max_queue_delay_microseconds == 100
    policies = config.batcher.priority_queue_policy
    assert policies is not None
    assert policies[1].timeout_action is TimeoutAction.DELAY
    assert file.configure("other", ModelConfig()) == ModelConfig()
    file.check_models(["net", "other"])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("wrokers = 2", "wrokers: expected a known key, such as workers; got 'wrokers'"),
        ("workers = true", "workers: expected an integer; got True"),
        ("unprotected = 1", "unprotected: expected true or false; got 1"),
        ("server = 1", "server: expected a table; got 1"),
        ("[server]\nhttp_prot = 1", "server.http_prot: expected a known key, such as http_port; got"),
        ("[server]\nhttp_port = 'x'", "server.http_port must be an integer; got 'x'."),
        ("[models]\nnet = 1", "models.net: expected a table; got 1"),
        ("[models.net]\nworkers = -1", "models.net.workers: expected an integer of at least 0; got -1"),
        ("[models.net]\ndecoupled = true", "models.net.decoupled: expected a known key, such as "),
        ("[models.net.batcher]\npriority_levels = -1", "models.net.batcher.priority_levels=-1 is not accepted"),
        (
            "[models.net.batcher.default_queue_policy]\ntimeout_action = 'NO'",
            "models.net.batcher.default_queue_policy.timeout_action: expected REJECT or DELAY; got 'NO'",
        ),
        (
            "[models.net.batcher.priority_queue_policy.low]\ntimeout_action = 'DELAY'",
            "models.net.batcher.priority_queue_policy: expected numbers of priority levels as keys; got 'low'",
        ),
        ("workers = = 2", "(at line 1, column 11)"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigFileError) as caught:
        read(tmp_path, text)
    told = str(caught.value)
    assert told.startswith(f"{tmp_path / 'serve.toml'}: ")
    assert problem in told
    assert "\n" not in told


def test_values_that_break_a_rule_of_the_model(tmp_path: Path) -> None:
    file = read(tmp_path, "[models.net]\nattach_timeout_s = -1\n\n[models.plain]\nmax_batch_size = 8\n")
    with pytest.raises(ConfigFileError, match=r"models\.net\.attach_timeout_s=-1 is not accepted"):
        file.configure("net", ModelConfig())
    with pytest.raises(ConfigFileError, match=r"models\.plain\.max_batch_size: expected none .*; got 8"):
        file.configure("plain", ModelConfig(batching=False))
    with pytest.raises(ConfigFileError, match=r"models\.net: expected one of the models plain; got 'net'"):
        file.check_models(["plain"])


def test_what_a_batch_may_cost(tmp_path: Path) -> None:
    """The file changes what it names; the rest is what the function says."""
    file = read(tmp_path, "[models.net.cost]\nlimit = 64\n")
    own = ModelConfig(cost=Cost("x", 8192, mask="mask", outputs=["y"]))
    assert file.configure("net", own).cost == Cost("x", 64, mask="mask", outputs=["y"])
    # What is padded, and what is cut back to each request, is known where the hints are read.
    with pytest.raises(ConfigFileError, match=r"models\.net\.cost: expected none for a model without a cost: give it"):
        file.configure("net", ModelConfig())
    for text, problem in (
        ("cost.limt = 3", "models.net.cost.limt: expected a known key, such as limit"),
        ("cost = 3", "models.net.cost: expected a table; got 3"),
        ("cost.outputs = []", r"models.net.cost.outputs: expected limit, overhead, oversize alone in this table: the"),
    ):
        with pytest.raises(ConfigFileError, match=problem):
            read(tmp_path, f"[models.net]\n{text}\n")
    with pytest.raises(ConfigFileError, match=r"Cost\.limit=0 is not accepted"):
        read(tmp_path, "[models.net.cost]\nlimit = 0\n").configure("net", own)


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigFileError, match=r"none\.toml cannot be read: No such file"):
        read_config(tmp_path / "none.toml", OPTIONS)
    with pytest.raises(ConfigFileError, match=r"expected a name that ends in \.toml, \.yaml or \.yml"):
        read(tmp_path, "{}", "serve.json")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigFileError, match=r"pip install 'pytriton-server\[yaml\]'"):
        read(tmp_path, "a: 1", "serve.yaml")


WARMUP = """
[[models.net.model_warmup]]
name = "zeros"
batch_size = 4
count = 2
inputs.x = { dtype = "float32", shape = [3], zero_data = true }
"""


def test_a_warmup(tmp_path: Path) -> None:
    config = read(tmp_path, WARMUP).configure("net", ModelConfig())
    assert config.model_warmup == [
        ModelWarmup("zeros", 4, {"x": WarmupInput(dtype="float32", shape=(3,), zero_data=True)}, 2)
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (WARMUP.replace("[[", "[").replace("]]", "]"), "models.net.model_warmup: expected a list; got"),
        (WARMUP.replace("inputs.x = ", "inputs = 1 #"), "models.net.model_warmup[0].inputs: expected a table; got 1"),
        (WARMUP.replace("float32", "float31"), "models.net.model_warmup[0].inputs.x.dtype='float31' is not an element"),
        (
            WARMUP.replace('dtype = "float32", ', ""),
            "models.net.model_warmup[0].inputs.x: expected a table with dtype;",
        ),
        (WARMUP.replace("zero_data", "zeros"), "models.net.model_warmup[0].inputs.x.zeros: expected a known key"),
    ],
)
def test_a_warmup_that_is_none(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigFileError) as raised:
        read(tmp_path, text)
    assert said in str(raised.value)
