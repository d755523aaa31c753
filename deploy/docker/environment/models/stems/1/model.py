"""Reduces the words of English texts to their stems, with packages that the server's own Python does not have."""

import numpy as np
import snowballstemmer
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """A model for Triton's Python backend."""

    def initialize(self, args):
        """Make the stemmer, once for each instance."""
        self.stemmer = snowballstemmer.stemmer("english")

    def execute(self, requests):
        """Answer every request with the stems of its texts."""
        responses = []
        for request in requests:
            texts = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()
            stems = [" ".join(self.stemmer.stemWords(text.decode().lower().split())) for text in texts.ravel()]
            output = pb_utils.Tensor("stems", np.array(stems, dtype=object).reshape(texts.shape))
            responses.append(pb_utils.InferenceResponse([output]))
        return responses
