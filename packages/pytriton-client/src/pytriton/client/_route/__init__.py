"""The way to a server: what the environment says of proxies."""
