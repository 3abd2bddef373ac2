"""`python -m jaxllm.entrypoints.api_server --model M`: the same as `jaxllm serve M`."""

from server.cli import serve_main

if __name__ == "__main__":
    raise SystemExit(serve_main())
