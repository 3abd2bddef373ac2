"""Flags of the HTTP side of `jaxllm serve`."""

import argparse
import json
import os
from dataclasses import dataclass
from typing import Any, Literal

from jaxllm.engine_args import parse_json_object
from server.settings import CorsSettings, ServerSettings

DEFAULT_NAME = "SmolLM2-135M-Instruct"
UVICORN_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What the HTTP side was told.

    Attributes:
        settings: of the application.
        host, port: where to listen; port 0 takes a free one.
        uds: path of a Unix socket instead.
        ssl_keyfile, ssl_certfile, ssl_ca_certs, ssl_cert_reqs, ssl_ciphers: TLS, as Python's ssl module has it.
        chat_template_content_format: what the template takes a message's content as.
        uvicorn_log_level, access_log: of the HTTP server.
        log_requests: log each request.
        shutdown_timeout: seconds that running requests get to finish after a signal.
    """

    settings: ServerSettings
    host: str = "0.0.0.0"
    port: int = 8000
    uds: str | None = None
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0
    ssl_ciphers: str | None = None
    chat_template_content_format: Literal["auto", "string", "openai"] = "auto"
    uvicorn_log_level: str = "info"
    access_log: bool = True
    log_requests: bool = False
    shutdown_timeout: int = 0

    def __post_init__(self):
        if not 0 <= self.port < 65536:
            raise ValueError(f"--port must be in 0 .. 65535, got {self.port}")
        if self.shutdown_timeout < 0:
            raise ValueError(f"--shutdown-timeout must not be negative, got {self.shutdown_timeout}")
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs):
            raise ValueError("--ssl-keyfile and --ssl-ca-certs need --ssl-certfile")


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `ServeOptions` and `ServerSettings`."""
    switch: dict[str, Any] = {"action": argparse.BooleanOptionalAction, "default": False}
    group = parser.add_argument_group("address")
    group.add_argument("--host", default=ServeOptions.host, help="interface to listen on (%(default)s: all of them)")
    group.add_argument("--port", type=int, default=ServeOptions.port, help="0 takes a free one (%(default)s)")
    group.add_argument("--uds", metavar="PATH", help="listen on a Unix socket instead")
    group.add_argument("--root-path", default="", metavar="PATH", help="path prefix that a proxy strips")
    group.add_argument("--ssl-keyfile", metavar="FILE", help="private key of the certificate, if not in its file")
    group.add_argument("--ssl-certfile", metavar="FILE", help="certificate; turns HTTPS on")
    group.add_argument("--ssl-ca-certs", metavar="FILE", help="authorities of client certificates")
    group.add_argument(
        "--ssl-cert-reqs", type=int, choices=(0, 1, 2), default=0, help="client certificates: 0 no, 1 optional, 2 must"
    )
    group.add_argument("--ssl-ciphers", help="ciphers allowed, in OpenSSL's notation")

    group = parser.add_argument_group("access")
    group.add_argument(
        "--api-key",
        nargs="+",
        metavar="KEY",
        help="any of these opens the API (else JAXLLM_API_KEY, else VLLM_API_KEY, else it is open)",
    )
    for name, default, what in (
        ("origins", "none", "web pages that may call this server"),
        ("methods", "all", "methods they may use"),
        ("headers", "all", "headers they may send"),
    ):
        group.add_argument(
            f"--allowed-{name}", type=_json_list, metavar="JSON", help=f"{what}, a JSON list like '[\"*\"]' ({default})"
        )
    group.add_argument("--allow-credentials", **switch, help="let those pages send cookies and authorization")

    group = parser.add_argument_group("requests and answers")
    group.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="names requests may use; answers carry the first (MODEL)"
    )
    group.add_argument("--response-role", default="assistant", help="role of answers in chat (%(default)s)")
    group.add_argument(
        "--chat-template-content-format",
        choices=("auto", "string", "openai"),
        default="auto",
        help="what the template takes a message's content as (%(default)s: looks at the template)",
    )
    group.add_argument(
        "--default-chat-template-kwargs",
        type=json_object,
        default={},
        metavar="JSON",
        help="variables of the chat template, unless a request sets them",
    )
    group.add_argument("--trust-request-chat-template", **switch, help="accept chat_template in requests")
    group.add_argument("--enable-prompt-tokens-details", **switch, help="report cached prompt tokens in usage")
    group.add_argument("--enable-force-include-usage", **switch, help="report usage in every stream")
    group.add_argument("--enable-request-id-headers", **switch, help="answer with X-Request-Id, sent or not")

    group = parser.add_argument_group("log and end")
    group.add_argument(
        "--uvicorn-log-level", choices=UVICORN_LEVELS, default="info", help="of the HTTP server (%(default)s)"
    )
    group.add_argument("--disable-uvicorn-access-log", **switch, help="no line for each HTTP request")
    group.add_argument("--enable-log-requests", **switch, help="log token ids and parameters of each request")
    group.add_argument("--show-legacy-metrics", **switch, help="also expose metrics under the names of old versions")
    group.add_argument(
        "--shutdown-timeout",
        type=int,
        default=0,
        metavar="SECONDS",
        help="how long running requests may go on after a signal (%(default)s: they are aborted)",
    )


def serve_options(options: argparse.Namespace, model: str) -> ServeOptions:
    """The options of a parsed command line.

    Args:
        options: with everything that `add_server_arguments` adds.
        model: as the user named it; empty for the default one.

    Raises:
        ValueError: values that cannot be.
    """
    cors = {
        name: tuple(value)
        for name in ("allowed_origins", "allowed_methods", "allowed_headers")
        if (value := getattr(options, name)) is not None
    }
    settings = ServerSettings(
        served_model_names=tuple(options.served_model_name or (model or DEFAULT_NAME,)),
        model_path=model or None,
        api_keys=_api_keys(options.api_key),
        root_path=options.root_path,
        cors=CorsSettings(allow_credentials=options.allow_credentials, **cors),
        response_role=options.response_role,
        default_chat_template_kwargs=options.default_chat_template_kwargs,
        trust_request_chat_template=options.trust_request_chat_template,
        enable_prompt_tokens_details=options.enable_prompt_tokens_details,
        enable_force_include_usage=options.enable_force_include_usage,
        enable_request_id_headers=options.enable_request_id_headers,
        show_legacy_metrics=options.show_legacy_metrics,
    )
    return ServeOptions(
        settings=settings,
        host=options.host,
        port=options.port,
        uds=options.uds,
        ssl_keyfile=options.ssl_keyfile,
        ssl_certfile=options.ssl_certfile,
        ssl_ca_certs=options.ssl_ca_certs,
        ssl_cert_reqs=options.ssl_cert_reqs,
        ssl_ciphers=options.ssl_ciphers,
        chat_template_content_format=options.chat_template_content_format,
        uvicorn_log_level=options.uvicorn_log_level,
        access_log=not options.disable_uvicorn_access_log,
        log_requests=options.enable_log_requests,
        shutdown_timeout=options.shutdown_timeout,
    )


def json_object(text: str) -> dict[str, Any]:
    """argparse's type for JSON objects."""
    try:
        return parse_json_object(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _json_list(text: str) -> list[str]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON list of strings; write '[\"*\"]'")
    return value


def _api_keys(given: list[str] | None) -> tuple[str, ...]:
    if given is not None:
        return tuple(given)
    key = os.environ.get("JAXLLM_API_KEY") or os.environ.get("VLLM_API_KEY")
    return (key,) if key else ()
