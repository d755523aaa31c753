"""What inference callables touch: the types of requests and responses."""

from pytriton.proxy._namespace import require_namespace_package as _require_namespace_package

_require_namespace_package()
