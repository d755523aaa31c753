"""The model of `bench variable`, and programs that serve it: texts of different lengths in, a vector of each back.

`RAGGED_MODEL` says what it does: `wait` takes 2 ms for a call and 4 us for each token of it, padding included, as an
accelerator would; `compute` computes that long with numpy; `encoder` is all-MiniLM-L6-v2 by ONNX Runtime. Each program
imports this file in an environment of its own, and is named by `RAGGED_SERVER`; the model needs numpy alone.
"""

# The frameworks are not in the environment of the type checker.
# mypy: ignore-errors
import os
import sys
import time
from pathlib import Path

import numpy as np

LONGEST, LIMIT, PEERS_ROWS = 512, 8192, 32
CALL_S, TOKEN_S = 2e-3, 4e-6
MODEL, SERVER = os.environ.get("RAGGED_MODEL", "wait"), os.environ.get("RAGGED_SERVER")
WIDTH = 384 if MODEL == "encoder" else 64
LAYERS = 3
_chance = np.random.default_rng(34)
TABLE = _chance.normal(size=(1000, WIDTH)).astype(np.float32)
WEIGHTS = _chance.normal(size=(LAYERS, WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5


def texts_of(count, seed):
    """Return texts as tokens, of which none is 0: 5 to 512 of them, lognormal."""
    chance = np.random.default_rng(seed)
    lengths = np.clip(chance.lognormal(4.0, 1.0, count), 5, LONGEST).astype(int)
    return [chance.integers(1, len(TABLE), (1, length)) for length in lengths]


def hide(tokens):
    """Return a vector for each token."""
    hidden = TABLE[tokens]
    if MODEL == "compute":
        for weight in WEIGHTS:
            hidden = np.tanh(hidden @ weight)
    return hidden


class Encoder:
    """The model, which counts the tokens that it was sent and computed, in a file that the bench reads."""

    def __init__(self):
        path = os.environ.get("RAGGED_COUNTS")
        self.counts = np.memmap(path, np.int64, "r+", shape=2) if path else np.zeros(2, np.int64)
        if MODEL == "encoder":
            # A stub of Triton's Python backend takes one folder of PYTHONPATH.
            sys.path += filter(None, [os.environ.get("RAGGED_PACKAGES")])
            import onnxruntime

            options = onnxruntime.SessionOptions()
            # The callers and the server are there as well.
            options.intra_op_num_threads = 1
            self.session = onnxruntime.InferenceSession(os.environ["RAGGED_ENCODER"], options)

    def _count(self, sent, computed):
        self.counts += [sent, computed]
        if MODEL == "wait":
            time.sleep(CALL_S + TOKEN_S * computed)

    def padded(self, tokens):
        """Return the vectors of texts `(rows, longest)`, whose padding is 0."""
        mask = tokens != 0
        self._count(int(mask.sum()), tokens.size)
        if MODEL == "encoder":
            return self.session.run(None, {"input_ids": tokens, "mask": mask})[0]
        return (hide(tokens) * mask[:, :, None]).sum(1) / mask.sum(1, keepdims=True, dtype=np.float32)

    def packed(self, tokens, offsets):
        """Return the vectors of texts that lie behind each other."""
        self._count(tokens.size, tokens.size)
        return np.add.reduceat(hide(tokens), offsets[:-1]) / np.diff(offsets)[:, None].astype(np.float32)

    def of(self, texts):
        """Return the vectors of texts that differ in length, padded to the longest."""
        return self.padded(pad(texts, max(text.shape[1] for text in texts)))


def pad(texts, longest):
    """Return texts as one array."""
    padded = np.zeros((len(texts), longest), np.int64)
    for row, text in zip(padded, texts, strict=True):
        row[: text.shape[1]] = text[0]
    return padded


def offline(seconds):
    """Print texts a second of a loop over texts that are sorted by length, in batches of the limit; no server."""
    encoder, texts = Encoder(), sorted(texts_of(1000, 1), key=lambda text: -text.shape[1])
    done, began = 0, time.perf_counter()
    # All texts as often as it may be: those that come first are the longest.
    while done % 1000 or time.perf_counter() < began + seconds:
        rows = max(1, min(128, LIMIT // texts[done % 1000].shape[1]))
        part = texts[done % 1000 : done % 1000 + rows]
        encoder.of(part)
        done += len(part)
    print(done / (time.perf_counter() - began))


def ours(http_port):
    """Serve by ours: without a cost, and with one, padded and packed."""
    from pytriton.decorators import batch
    from pytriton.model_config import Cost, ModelConfig, Tensor
    from pytriton.triton import Triton, TritonConfig

    @batch
    def padded(tokens):
        return {"pooled": encoder.padded(tokens)}

    @batch
    def packed(tokens, offsets):
        return {"pooled": encoder.packed(tokens, offsets)}

    encoder = Encoder()
    ways = {
        "alike": (padded, None),
        "padded": (padded, Cost("tokens", limit=LIMIT)),
        "tight": (padded, Cost("tokens", limit=LIMIT, overhead=128)),
        "packed": (packed, Cost("tokens", limit=LIMIT, layout="packed", offsets="offsets")),
    }
    triton = Triton(
        config=TritonConfig(http_address="127.0.0.1", http_port=http_port, allow_grpc=False, allow_metrics=False)
    )
    for name, (infer, cost) in ways.items():
        tensors = [Tensor((-1,), np.int64, "tokens")], [Tensor((WIDTH,), np.float32, "pooled")]
        triton.bind(name, infer, *tensors, config=ModelConfig(max_batch_size=128, cost=cost))
    triton.serve()


def litserve(http_port):
    """Serve by LitServe with raw bytes; it pads what it has gathered."""
    api = Api(api_path="/embed", max_batch_size=PEERS_ROWS, batch_timeout=0.005)
    server = ls.LitServer(api, accelerator="cpu", devices=1, workers_per_device=1, timeout=600, fast_queue=True)
    server.run("127.0.0.1", http_port, num_api_servers=1, generate_client_file=False, log_level="warning")


def bentoml(http_port):
    """Become BentoML's server of `Bento`."""
    settings = Path("bentoml.yaml").absolute()
    settings.write_text(
        "api_server: {logging: {access: {enabled: false}}, metrics: {enabled: false}, traffic: {timeout: 600}}\n"
    )
    variables = {"BENTOML_CONFIG": str(settings), "BENTOML_HOME": str(settings.parent), "BENTOML_DO_NOT_TRACK": "true"}
    command = ["serve", "ragged:Bento", "--working-dir", str(Path(__file__).parent), "--host", "127.0.0.1"]
    program = "from bentoml_cli.cli import cli; cli()"
    os.execve(
        sys.executable,
        [sys.executable, "-c", program, *command, "--port", str(http_port)],
        {**os.environ, **variables},
    )


# Both frameworks look for these by their names in this module.
if SERVER == "litserve":
    from typing import Annotated

    import litserve as ls
    from fastapi import Body, Response

    class Api(ls.LitAPI):
        def setup(self, device):
            self.encoder = Encoder()

        def decode_request(self, request: Annotated[bytes, Body()]):
            return np.frombuffer(request, np.int64)[None]

        def batch(self, inputs):
            return inputs

        def predict(self, x):
            return self.encoder.of(x)

        def unbatch(self, output):
            return list(output)

        def encode_response(self, output):
            return Response(output.tobytes(), media_type="application/octet-stream")


if SERVER == "bentoml":
    import bentoml as bento

    @bento.service(workers=1)
    class Bento:
        def __init__(self):
            self.encoder = Encoder()

        @bento.api(batchable=True, route="/embed", max_batch_size=PEERS_ROWS, max_latency_ms=60_000)
        def embed(self, texts: list[list[int]]) -> np.ndarray:
            return self.encoder.of([np.array([text]) for text in texts])


if __name__ == "__main__":
    {"ours": ours, "litserve": litserve, "bentoml": bentoml, "offline": offline}[SERVER](int(sys.argv[1]))
