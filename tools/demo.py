"""Serve a real classifier for a moment and send it all the images that it has not seen: `python3 tools/dev.py demo`.

The models are in `docs/examples/digits.py`; how it looks is in `tools/demo_view.py`. Here: start the server, send
requests over HTTP and gRPC from many threads, compare the answers with the model called directly, ask Triton what
batches it formed.
"""

# ruff: noqa: E402 - what stands between the imports is for the imports

from __future__ import annotations

import json
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

# The imports below take a second or two, and nothing runs yet: Ctrl+C may just end the process, without a traceback.
signal.signal(signal.SIGINT, signal.SIG_DFL)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from docs.examples.digits import WORDS, DigitReader, Images, Labels, bind_models, load_images
from tools.demo_view import View

from pytriton.client import ModelClient
from pytriton.triton import Triton, TritonConfig

THREADS = 16
PASSES = 2
"""How often every image is sent over each protocol."""
TIMEOUT_S = 30


@dataclass
class Answers:
    """What came back for `PASSES` times all images over one protocol; unanswered ones keep the label -1."""

    labels: Labels
    second_guesses: Labels
    times_s: list[tuple[float, float]] = field(default_factory=list)
    """When each request was sent and when it was answered, in seconds."""

    @property
    def latencies_s(self) -> list[float]:
        """How long each request took, in seconds."""
        return [answered - sent for sent, answered in self.times_s]

    @property
    def requests_per_s(self) -> float:
        """Answers per second over all threads, from the first request to the last answer."""
        first, last = min(sent for sent, _ in self.times_s), max(answered for _, answered in self.times_s)
        return len(self.times_s) / (last - first)


def main() -> int:
    """Run the demo; 0 if the server's answers are those of the model, 1 if not, 130 after Ctrl+C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    view = View()
    try:
        return run(view)
    except KeyboardInterrupt:
        view.say("Interrupted; the server is stopped.")
        return 128 + signal.SIGINT


def run(view: View) -> int:
    """Train, serve, ask, report."""
    began = time.monotonic()
    learn, images, learn_labels, truth = load_images()
    reader = DigitReader(learn, learn_labels)
    expected = reader.predict(images)
    view.trained(len(learn), len(images), time.monotonic() - began)

    began = time.monotonic()
    # Port 0: any free one, so that the demo runs beside whatever else runs here.
    config = TritonConfig(
        http_address="127.0.0.1", http_port=0, grpc_address="127.0.0.1", grpc_port=0, allow_metrics=False
    )
    with Triton(config=config) as triton:
        bind_models(triton, reader)
        addresses = {"HTTP": triton.http_url, "gRPC": triton.grpc_url}
        urls = {name: url for name, url in addresses.items() if url is not None}
        view.serving(urls, time.monotonic() - began)
        answers = {}
        with view.progress(urls, PASSES * len(images)) as advance:
            for protocol, url in urls.items():
                answers[protocol] = ask_all(url, images, partial(advance, protocol))
        words = spell_all(urls["gRPC"], 7)
        batches = formed_batches(urls["HTTP"], "digits", triton.get_access_token())

    received = np.concatenate([each.labels for each in answers.values()])
    same = bool(np.array_equal(received, np.tile(expected, len(received) // len(expected))))
    over_http = answers["HTTP"]
    view.digits(images, truth, over_http.labels[: len(truth)], over_http.second_guesses[: len(truth)])
    view.words(7, words)
    view.speeds({name: (each.requests_per_s, each.latencies_s) for name, each in answers.items()}, THREADS)
    view.batches(batches)
    view.accuracy(int(np.sum(expected == truth)), len(truth), len(received), same)
    return 0 if same else 1


def ask_all(url: str, images: Images, answered: Callable[[], None]) -> Answers:
    """Send every image `PASSES` times, one to a request, from `THREADS` threads with a client each."""
    total = PASSES * len(images)
    answers = Answers(np.full(total, -1, np.int64), np.full(total, -1, np.int64))
    turns = iter(range(total))
    lock, stop = threading.Lock(), threading.Event()

    def ask() -> None:
        # Not lazy: what the client asks about the server and the model is not part of the first request's time.
        with ModelClient(url, "digits", lazy_init=False, inference_timeout_s=TIMEOUT_S) as client:
            while not stop.is_set():
                with lock:
                    turn = next(turns, None)
                if turn is None:
                    break
                began = time.perf_counter()
                answer = client.infer_sample(image=images[turn % len(images)])
                answers.times_s.append((began, time.perf_counter()))
                answers.labels[turn], answers.second_guesses[turn] = answer["label"][0], answer["second_guess"][0]
                answered()

    failures: list[Exception] = []

    def ask_or_tell() -> None:
        try:
            ask()
        except Exception as error:  # raised again below, in the thread that waits
            failures.append(error)
            stop.set()

    # Not a pool: Ctrl+C in the middle of a thread's start would leave it one that it does not know and does not wait
    # for, which then looks for a server that has gone, and keeps the process.
    threads = [threading.Thread(target=ask_or_tell, daemon=True) for _ in range(THREADS)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        stop.set()  # after Ctrl+C the threads need not go on, but have their last answers while the server is there
        for thread in threads:
            if thread.is_alive():
                thread.join(TIMEOUT_S)
    if failures:
        raise failures[0]
    return answers


def spell_all(url: str, digit: int) -> dict[str, str]:
    """Ask the string model for the word of a digit in every language, all in one request."""
    languages = np.array([[code.encode()] for code in WORDS], dtype=np.object_)
    digits = np.full((len(WORDS), 1), digit, np.int64)
    with ModelClient(url, "spell", inference_timeout_s=TIMEOUT_S) as client:
        answer = client.infer_batch(digit=digits, language=languages)
    return {code: word.decode() for code, word in zip(WORDS, answer["word"][:, 0], strict=True)}


def formed_batches(url: str, model: str, access_token: str | None) -> dict[int, int]:
    """Return how many batches of each size Triton handed to a model, from its statistics, which the token protects."""
    headers = {"triton-access-token": access_token or ""}
    request = urllib.request.Request(f"{url}/v2/models/{model}/stats", headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server is on this host
    with opener.open(request, timeout=TIMEOUT_S) as response:
        statistics = json.load(response)["model_stats"][0]
    return {entry["batch_size"]: entry["compute_infer"]["count"] for entry in statistics["batch_stats"]}


if __name__ == "__main__":
    sys.exit(main())
