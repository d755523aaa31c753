"""The commands that try out an installation: `check`, `env`, `examples`."""
