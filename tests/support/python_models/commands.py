"""Expressions that tests send to the models `faults` and `streams`, which evaluate them."""

FAULTS = [
    # What is right.
    "[ok]",
    "[response(np.float32([]))]",
    "[response(np.float32([1, 2, 3, 4])[::2])]",
    "[error('an error')]",
    *(
        f"[error('an error', pb_utils.TritonError.{code})]"
        for code in (
            "UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS",
            "CANCELLED",
        )
    ),
    "[error('')]",
    "[error('zażółć')]",
    # The wrong number of responses.
    "[]",
    "[ok, ok]",
    # The wrong type.
    "5",
    "ok",
    "'text'",
    "{}",
    "(ok,)",
    "[5]",
    "['text']",
    "[[ok]]",
    "iter([ok])",
    # The wrong tensors.
    "[pb_utils.InferenceResponse([])]",
    "[response(np.float32([1]), name='UNDECLARED')]",
    "[response(np.float64([1]))]",
    "[response(np.array(['a'], np.object_))]",
    "[response(np.float32(1))]",
    "[response(np.zeros((2, 2), np.float32))]",
    "[response(np.array([1, 2], '>f4'))]",
    "[response(np.array([1, 2], '>i8'))]",
    "[response(np.array(['a\\ud83d'], np.object_))]",
    "[pb_utils.InferenceResponse([5])]",
    "[pb_utils.InferenceResponse([None])]",
    "[pb_utils.InferenceResponse(pb_utils.Tensor('OUTPUT', np.float32([1])))]",
    "[pb_utils.InferenceResponse(error='text')]",
    "[pb_utils.InferenceResponse([pb_utils.Tensor('OUTPUT', [1.0])])]",
    "[response(np.array([1j]))]",
    # What is raised.
    "fail(ValueError('no such value'))",
    "fail(ValueError(''))",
    "fail(ValueError())",
    "fail(KeyError('key'))",
    "fail(OwnError('own', 2))",
    "fail(pb_utils.TritonModelException('mine'))",
    "fail(pb_utils.TritonModelException('zażółć'))",
    "fail(ValueError('two\\nlines'))",
    "fail(UnspeakableError())",
    "fail_below(3)",
    "1 / 0",
    "undefined",
    "np.zeros(3).reshape(2, 2)",
    "__import__('nowhere')",
    "eval('1 +')",
    "[pb_utils.get_input_tensor_by_name(requests[0], 'NONE').as_numpy()]",
    "fail(GeneratorExit())",
    "fail(StopIteration('over'))",
    "fail(SystemExit(3))",
    "fail(KeyboardInterrupt())",
    "fail(MemoryError())",
]  # fmt: skip
"""What `execute` returns, or raises."""

STREAMS = [
    # What is right.
    "send(response(1), FINAL)",
    "send(response(1, 2), flags=FINAL)",
    "nothing(send(response(1)), send(response(2)), send(flags=FINAL))",
    "send(flags=FINAL)",
    "nothing(send(error('early')), send(response(2)), send(flags=FINAL))",
    "send(error('only', pb_utils.TritonError.NOT_FOUND), FINAL)",
    "nothing(send(response(1)), send(error('late'), FINAL))",
    "self.later(lambda: send(response(1)), lambda: send(response(2), FINAL))",
    "self.later(lambda: send(flags=FINAL))",
    # What is not.
    "nothing(send(response(1), FINAL), send(response(2)))",
    "nothing(send(response(1), FINAL), send(flags=FINAL))",
    "nothing(send(caught(lambda: send())), send(flags=FINAL))",
    "nothing(send(caught(lambda: send(None, 0))), send(flags=FINAL))",
    "nothing(send(caught(lambda: send(response(1), 7))), send(flags=FINAL))",
    "self.later(lambda: send(response(1), FINAL), lambda: send(response(2)))",
    "nothing(send(response(1, name='UNDECLARED')), send(flags=FINAL))",
    "nothing(send(pb_utils.InferenceResponse([])), send(flags=FINAL))",
    "fail(ValueError('before any response'))",
    "nothing(send(response(1)), fail(ValueError('after one')))",
    "nothing(send(response(1), FINAL), fail(ValueError('after the last')))",
    "nothing(send(response(1), FINAL)) or [response(2)]",
    "nothing(send(response(1), FINAL)) or []",
    "[response(1)]",
    "5",
]
"""What a decoupled model does with the sender of a request, and what it returns."""
