"""The address a server listens on: taken before the model is loaded, told when it is ready."""

import json
import logging
import shlex
import socket
import ssl
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from server.cli_server import ServeOptions

logger = logging.getLogger(__name__)

ExampleKind = Literal["chat", "text", "tokens"]
"""What a server takes best."""

_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}


@contextmanager
def bind(options: ServeOptions) -> Iterator[socket.socket]:
    """A bound socket that does not listen yet, so that nobody is let in before there is an engine.

    Raises:
        OSError: the address is taken, not this machine's, or not allowed; in words for the user.
    """
    if options.uds is not None:
        path = Path(options.uds)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            _bind_path(listener, path)
            try:
                yield listener
            finally:
                path.unlink(missing_ok=True)
        return
    try:
        found = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise OSError(f"--host {options.host}: {error.strerror}") from error
    family, _, _, _, address = found[0]
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        # Else the connections of a server that has just ended would hold the port for minutes.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            raise OSError(
                f"cannot listen on {options.host} port {options.port}: {error.strerror}; choose another with --port"
            ) from error
        yield listener


def _bind_path(listener: socket.socket, path: Path) -> None:
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode) and not _answers(path):
            path.unlink()  # left behind by a server that was killed
        listener.bind(str(path))
    except OSError as error:
        raise OSError(f"cannot listen on --uds {path}: {error.strerror or error}") from error


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) == 0


def check_certificate(options: ServeOptions) -> None:
    """Load the TLS files once before the model, as uvicorn does it after.

    Raises:
        ValueError: they are missing or do not fit together.
    """
    if options.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
        if options.ssl_ca_certs is not None:
            context.load_verify_locations(options.ssl_ca_certs)
        if options.ssl_ciphers is not None:
            context.set_ciphers(options.ssl_ciphers)
    except OSError as error:
        raise ValueError(
            f"the TLS files cannot be used (--ssl-certfile {options.ssl_certfile}, --ssl-keyfile "
            f"{options.ssl_keyfile}, --ssl-ca-certs {options.ssl_ca_certs}): {error.strerror or error}"
        ) from error


def log_address(options: ServeOptions, listener: socket.socket, *, kind: ExampleKind) -> None:
    """Log where the server is, and a command that asks it something.

    Args:
        options: of the server.
        listener: its socket; knows the port where 0 was asked for.
        kind: what the example sends.
    """
    if not options.settings.api_keys and options.uds is None and options.host in _ANY_HOST:
        logger.info("every interface is open and there is no --api-key: whoever reaches this machine may ask")
    if options.uds is None:
        scheme = "http" if options.ssl_certfile is None else "https"
        port = listener.getsockname()[1]
        host = f"[{options.host}]" if ":" in options.host else options.host
        url = f"{scheme}://{_ANY_HOST.get(options.host, host)}:{port}"
        logger.info("listening on %s://%s:%d", scheme, host, port)
    else:
        url = "http://localhost"
        logger.info("listening on %s", options.uds)
    logger.info("try: %s", _curl(options, url, kind))


def _curl(options: ServeOptions, url: str, kind: ExampleKind) -> str:
    name = options.settings.model_name
    path, body = {
        "chat": ("chat/completions", {"messages": [{"role": "user", "content": "Say hello."}]}),
        "text": ("completions", {"prompt": "Hello"}),
        "tokens": ("completions", {"prompt": [1, 2, 3]}),
    }[kind]
    words = ["curl"]
    if options.uds is not None:
        words += ["--unix-socket", options.uds]
    if options.ssl_certfile is not None:
        words += ["--insecure"]
    words += [f"{url}/v1/{path}", "-H", "Content-Type: application/json"]
    body = {"model": name, **body, "max_tokens": 32, "temperature": 0}
    line = f"{shlex.join(words)} -d {shlex.quote(json.dumps(body, ensure_ascii=False))}"
    # The log must not show a key.
    return line + (" -H 'Authorization: Bearer YOUR_API_KEY'" if options.settings.api_keys else "")
