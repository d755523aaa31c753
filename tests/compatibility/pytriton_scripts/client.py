"""The client script that goes with server.py; `--break` makes the server end."""

import argparse

import numpy as np

from pytriton.client import ModelClient
from pytriton.client.exceptions import PyTritonClientInferenceServerError


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost", required=False)
    parser.add_argument("--break", dest="broken", action="store_true")
    args = parser.parse_args()
    value = np.array([[1.0, 2.0]], dtype=np.float32)
    with ModelClient(args.url, "Doubler", init_timeout_s=60, access_token="let-me-in") as client:
        result = client.infer_batch(value, parameters={"size": 3, "flag": True}, headers={"custom-header": "x"})
        print(result["doubled"].tolist(), result["parameters"].tolist())
        client.unload_model()
        client.load_model()
        client.wait_for_model(timeout_s=30)
        print(client.infer_sample(value[0])["doubled"])
        if args.broken:
            try:
                client.infer_batch(-value)
            except PyTritonClientInferenceServerError as error:
                print("the device is lost" in str(error))


if __name__ == "__main__":
    main()
