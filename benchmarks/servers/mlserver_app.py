"""The models as MLServer runtimes. Run as a program it writes their settings into a folder and becomes the server.

A model that takes time runs in a worker process, as is the default, so that parsing goes on; else all is done in one
process, which is how MLServer is fastest.
"""

# MLServer is not in the environment of the type checker.
# mypy: ignore-errors
import json
import os
import sys
from pathlib import Path

from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse
from models import dump, load

BATCH_TIMEOUT_S = 0.005


class Runtime(MLModel):
    async def load(self):
        (self.model,) = load(self.settings.parameters.extra["model"])
        return True

    async def predict(self, payload):
        inputs = [NumpyCodec.decode_input(tensor) for tensor in payload.inputs]
        outputs = [NumpyCodec.encode_output("y", self.model.compute(inputs))]
        return InferenceResponse(model_name=self.name, outputs=outputs)


def main():
    models, port, folder = load(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    takes_time = any(model.batch_us or model.row_us for model in models)
    settings = {
        "host": "127.0.0.1",
        "http_port": port,
        "grpc_port": int(sys.argv[4]),
        "metrics_port": int(sys.argv[5]),
        "debug": False,
        "parallel_workers": 1 if takes_time else 0,
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    for model in models:
        settings = {
            "name": model.name,
            "implementation": "mlserver_app.Runtime",
            "parameters": {"extra": {"model": dump([model])}},
        }
        if model.batch_us or model.row_us:
            settings |= {"max_batch_size": model.max_batch_size, "max_batch_time": BATCH_TIMEOUT_S}
        (folder / model.name).mkdir()
        (folder / model.name / "model-settings.json").write_text(json.dumps(settings))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    program = "from mlserver.cli import main; main()"
    os.execve(sys.executable, [sys.executable, "-c", program, "start", str(folder)], environment)


if __name__ == "__main__":
    main()
