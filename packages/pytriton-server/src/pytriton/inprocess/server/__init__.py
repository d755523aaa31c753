"""The server in process: options, start, models, metrics, stop."""
