"""ServerSettings: what the HTTP front end needs to know besides the engine and the model."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class CorsSettings:
    """Cross-origin rules; the default lets no foreign origin in.

    Attributes:
        allowed_origins: origins whose pages may call this server; "*" for all.
        allowed_methods, allowed_headers: what they may use.
        allow_credentials: whether they may send cookies and authorization.
    """

    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of one application.

    Attributes:
        served_model_names: names a request may use; the first is echoed and labels the metrics.
        model_path: what was loaded, shown as `root` in /v1/models; None shows the served name.
        api_keys: each of them opens the API; empty means no authentication.
        root_path: path prefix that a proxy strips.
        cors: cross-origin rules.
        response_role: role of the answer in chat.
        default_chat_template_kwargs: passed to the template unless the request says otherwise.
        trust_request_chat_template: accept `chat_template` in a request.
        max_body_bytes: largest accepted request body.
        enable_prompt_tokens_details: report cached prompt tokens in `usage`.
        enable_force_include_usage: send usage with every stream chunk, asked for or not.
        enable_request_id_headers: answer with an X-Request-Id header even if the request had none.
        tokenizer_threads: threads that render templates and tokenise.
        show_legacy_metrics: also expose the metric names of vLLM's first engine.
    """

    served_model_names: tuple[str, ...]
    model_path: str | None = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    root_path: str = ""
    cors: CorsSettings = CorsSettings()
    response_role: str = "assistant"
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    trust_request_chat_template: bool = False
    max_body_bytes: int = 64 << 20
    enable_prompt_tokens_details: bool = False
    enable_force_include_usage: bool = False
    enable_request_id_headers: bool = False
    tokenizer_threads: int = 4
    show_legacy_metrics: bool = False

    def __post_init__(self):
        if not self.served_model_names or not all(self.served_model_names):
            raise ValueError(f"served_model_names must hold non-empty names, got {self.served_model_names!r}")
        if not all(self.api_keys):
            raise ValueError("api_keys must not hold an empty key: it would let everybody in")
        for name in ("max_body_bytes", "tokenizer_threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def model_name(self) -> str:
        """The name answers carry."""
        return self.served_model_names[0]
