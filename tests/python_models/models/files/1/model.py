"""Imports files beside it in every way, and leaves a file for each instance when it begins and when it ends."""

import json
import os
import sys
from pathlib import Path

import helper
import numpy as np
import triton_python_backend_utils as pb_utils
from package import NAME

from . import helper as relative_helper
from .package.inner import NAME as RELATIVE_NAME


class TritonPythonModel:
    def initialize(self, args):
        told = {key: value for key, value in args.items() if key != "model_config"}
        (Path(args["model_repository"]) / f"{args['model_instance_name']}.begun").write_text(json.dumps(told))
        self.end = Path(args["model_repository"]) / f"{args['model_instance_name']}.ended"

    def execute(self, requests):
        found = [
            __name__, helper.NAME, NAME, relative_helper.NAME, RELATIVE_NAME, Path(__file__).name, os.getcwd(),
            pb_utils.get_model_dir(), str(Path(helper.__file__).parent), str(__package__ in sys.modules),
        ]  # fmt: skip
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", np.array(found, np.object_))]) for _ in requests]

    def finalize(self):
        self.end.write_text("ended")
