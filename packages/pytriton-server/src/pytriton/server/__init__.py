"""The parts that start, feed and stop tritonserver."""

from pytriton.exceptions._namespace import require_namespace_package as _require_namespace_package

_require_namespace_package()
