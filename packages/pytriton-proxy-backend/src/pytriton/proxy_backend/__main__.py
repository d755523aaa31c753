"""`python -m pytriton.proxy_backend`: the `pytriton-proxy-backend` command where its script is not on `PATH`."""

from pytriton.proxy_backend.cli import main

if __name__ == "__main__":
    main()
