"""Constants that scripts written for NVIDIA PyTriton may import."""

from pytriton.server.tritonserver.binary import BUNDLED_FOLDER

TRITONSERVER_DIST_DIR = BUNDLED_FOLDER
"""Where the server that comes with this distribution is; the one in use may be another."""

MODEL_URL = "/v2/models/{model_name}"
"""Path of a model on the HTTP endpoint; to be filled in with `str.format`."""
MODEL_READY_URL = f"{MODEL_URL}/ready"
"""Path that tells whether a model is ready."""
MODEL_CONFIG_URL = f"{MODEL_URL}/config"
"""Path of the configuration of a model."""
MODEL_INFER_URL = f"{MODEL_URL}/infer"
"""Path that inferences are sent to."""

INITIAL_BACKEND_SHM_SIZE = 4 << 20
"""In bytes. Has no effect: this proxy backend takes the shared memory that it needs."""
GROWTH_BACKEND_SHM_SIZE = 1 << 20
"""In bytes. Has no effect, as `INITIAL_BACKEND_SHM_SIZE`."""
