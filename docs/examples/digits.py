"""Two models on one server: a classifier that reads scanned digits, and one that spells a digit in a language.

`python docs/examples/digits.py` serves them on the default ports until Ctrl+C; `tools/demo.py` serves them for a moment
and sends them every image that the classifier has not seen.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.svm import SVC

from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton

Images = npt.NDArray[np.float32]
"""Scans of 8 x 8 pixels, 0 for paper to 16 for ink."""
Labels = npt.NDArray[np.int64]

WORDS = {
    "en": ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"],
    "de": ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"],
    "pl": ["zero", "jeden", "dwa", "trzy", "cztery", "pięć", "sześć", "siedem", "osiem", "dziewięć"],
    "el": ["μηδέν", "ένα", "δύο", "τρία", "τέσσερα", "πέντε", "έξι", "επτά", "οκτώ", "εννέα"],
    "ja": ["零", "一", "二", "三", "四", "五", "六", "七", "八", "九"],
}


def load_images() -> tuple[Images, Images, Labels, Labels]:
    """Return half of scikit-learn's digits to learn from and half to test with: images, images, labels, labels."""
    digits = load_digits()
    images, labels = digits.images.astype(np.float32), digits.target.astype(np.int64)
    learn, test, learn_labels, test_labels = train_test_split(
        images, labels, test_size=0.5, stratify=labels, random_state=0
    )
    return learn, test, learn_labels, test_labels


class DigitReader:
    """A support vector machine behind an inference callable."""

    def __init__(self, images: Images, labels: Labels) -> None:
        self._classifier: Any = SVC(gamma=0.001, break_ties=True).fit(images.reshape(-1, 64), labels)

    def predict(self, images: Images) -> Labels:
        """Return the labels of images `(n, 8, 8)`, without any server."""
        labels: Labels = self._classifier.predict(images.reshape(-1, 64))
        return labels

    # Triton gathers requests that come at the same time; @batch hands them over as one array of all their images.
    @batch
    def infer(self, image: Images) -> dict[str, Labels]:
        """Return the best and the second best label for each image of a batch `(n, 8, 8)`, as `(n, 1)`."""
        scores = self._classifier.decision_function(image.reshape(-1, 64))
        ranking = np.argsort(-scores, axis=1)
        labels = self._classifier.classes_[ranking]
        return {"label": labels[:, :1], "second_guess": labels[:, 1:2]}


@batch
def spell(digit: Labels, language: npt.NDArray[np.object_]) -> dict[str, npt.NDArray[np.object_]]:
    """Return the word for each digit, UTF-8 encoded as all of Triton's strings; both inputs are `(n, 1)`."""
    words = []
    for number, code in zip(digit[:, 0], language[:, 0], strict=True):
        if code.decode() not in WORDS:
            raise ValueError(f"expected one of the languages {', '.join(WORDS)}, received {code.decode()!r}")
        words.append([WORDS[code.decode()][number].encode()])
    return {"word": np.array(words, dtype=np.object_)}


def bind_models(triton: Triton, reader: DigitReader) -> None:
    """Make both callables models of a server, which may run already or be started later."""
    triton.bind(
        model_name="digits",
        infer_func=reader.infer,
        inputs=[Tensor(name="image", dtype=np.float32, shape=(8, 8))],
        outputs=[
            Tensor(name="label", dtype=np.int64, shape=(1,)),
            Tensor(name="second_guess", dtype=np.int64, shape=(1,)),
        ],
        config=ModelConfig(max_batch_size=64, batcher=DynamicBatcher(max_queue_delay_microseconds=500)),
    )
    triton.bind(
        model_name="spell",
        infer_func=spell,
        inputs=[
            Tensor(name="digit", dtype=np.int64, shape=(1,)),
            Tensor(name="language", dtype=np.bytes_, shape=(1,)),
        ],
        outputs=[Tensor(name="word", dtype=np.bytes_, shape=(1,))],
        config=ModelConfig(max_batch_size=16),
    )


def main() -> None:
    """Train, serve until Ctrl+C."""
    learn, _test, learn_labels, _test_labels = load_images()
    with Triton() as triton:
        bind_models(triton, DigitReader(learn, learn_labels))
        triton.serve()


if __name__ == "__main__":
    main()
