"""What processes find that a model spawns: in the host itself the module is there already."""

from pytriton.proxy_backend.python_models.module import install

install()
