"""A server script as it is started by hand or in a container."""

import argparse
import logging

import numpy as np

from pytriton.exceptions import PyTritonUnrecoverableError
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig, TritonSecurityConfig

LOGGER = logging.getLogger("examples.server")


def infer_func(requests):
    results = []
    for request in requests:
        LOGGER.debug("parameters %s", request.parameters)
        value = request.data["value"]
        if value[0, 0] < 0:
            raise PyTritonUnrecoverableError("the device is lost")
        names = "".join(f"{key}={request.parameters[key]};" for key in sorted(request.parameters))
        results.append({"doubled": value * 2, "parameters": np.array([[names.encode()]], dtype=np.bytes_)})
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000, required=False, help="HTTP port")
    parser.add_argument("--verbose", "-v", action="store_true", help="Enable verbose logging")
    args = parser.parse_args()
    log_level = logging.DEBUG if args.verbose else logging.INFO
    logging.basicConfig(level=log_level, format="%(asctime)s - %(levelname)s - %(name)s: %(message)s")
    config = TritonConfig(http_port=args.port, http_header_forward_pattern="custom.*", exit_timeout_secs=10)
    security = TritonSecurityConfig(access_token="let-me-in")
    with Triton(config=config, security_config=security) as triton:
        LOGGER.info("Loading the model")
        triton.bind(
            model_name="Doubler",
            infer_func=infer_func,
            inputs=[Tensor(name="value", dtype=np.float32, shape=(-1,))],
            outputs=[
                Tensor(name="doubled", dtype=np.float32, shape=(-1,)),
                Tensor(name="parameters", dtype=np.bytes_, shape=(1,)),
            ],
            config=ModelConfig(max_batch_size=1),
        )
        LOGGER.info("Serving")
        triton.serve()


if __name__ == "__main__":
    main()
