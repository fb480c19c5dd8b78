"""Settings for authentication, limits on a single request, and limits on all requests in flight."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock_common.config.checks import check_fields, require
from penstock_common.config.settings import ByteSize
from penstock_common.errors import ConfigError
from penstock_common.types.media import Modality


class MaxMediaConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits on the media of one request, for models that support media."""

    image: Annotated[int, Meta(ge=0, description="Maximum number of images per request. 0: images are refused.")] = 16
    audio: Annotated[int, Meta(ge=0, description="Maximum number of audio items per request. 0: audio is refused.")] = 4
    video: Annotated[int, Meta(ge=0, description="Maximum number of videos per request. 0: videos are refused.")] = 2

    def __post_init__(self) -> None:
        check_fields("limits.max_media", self)

    def of(self, modality: Modality) -> int:
        """Return the maximum number of media items of this modality in one request."""
        return {"image": self.image, "audio": self.audio, "video": self.video}[modality]


class LimitsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits on a single request, and limits on all requests in flight in one frontend.

    Requests above a limit are refused.
    """

    max_requests: Annotated[
        int,
        Meta(
            ge=1,
            description=(
                "Maximum number of calls that one frontend serves at the same time. Each call has at most limits.max_n "
                "sequences."
            ),
        ),
    ] = 20_000
    max_message_bytes_in_flight: Annotated[
        ByteSize,
        Meta(
            ge=1,
            description=(
                "Maximum total bytes of the received gRPC messages of all calls in flight. Only messages over 64 KiB "
                "count. A message needs about three times its size in memory."
            ),
        ),
    ] = 512 * 1024 * 1024
    max_answer_bytes_in_flight: Annotated[
        ByteSize,
        Meta(
            ge=1,
            description=(
                "Maximum total bytes of the embeddings and scores of all pooling calls in flight. A call counts from "
                "when its inputs are sent to engines until its response is encoded. A response needs about three times "
                "its size in memory."
            ),
        ),
    ] = 512 * 1024 * 1024
    max_media_bytes_in_flight: Annotated[
        ByteSize,
        Meta(
            ge=1,
            description=(
                "Maximum total bytes of encoded images, audio and video of all requests. An item counts from its "
                "arrival until it is processed. The decoded samples of all audio files that are being transcribed have "
                "the same limit, and are counted separately."
            ),
        ),
    ] = 512 * 1024 * 1024
    max_media: MaxMediaConfig = MaxMediaConfig()
    max_prompt_length_in_flight: Annotated[
        int,
        Meta(
            ge=1,
            description=(
                "Maximum total size of all prompts in flight: characters, token ids, and bytes of embeddings and media."
            ),
        ),
    ] = 256 * 1024 * 1024
    max_tenant_requests: Annotated[
        int, Meta(ge=0, description="Maximum number of sequences of one tenant in flight. 0: no limit.")
    ] = 0
    max_session_requests: Annotated[
        int, Meta(ge=1, description="Maximum number of requests in flight in one GenerateSession.")
    ] = 1024
    max_prompt_length: Annotated[
        int,
        Meta(
            ge=1,
            description=(
                "Maximum length of a prompt, in characters of a text or in token ids of a list. The engines' own "
                "limit applies as well."
            ),
        ),
    ] = 4 * 1024 * 1024
    max_pooling_inputs: Annotated[
        int,
        Meta(
            ge=1,
            description="Maximum number of inputs of one Embed or Classify call, or of documents of one Score call.",
        ),
    ] = 2048
    pooling_truncation: Annotated[
        Literal["none", "end", "start"],
        Meta(
            description=(
                "Truncation of Embed, Classify and Score inputs that exceed the model's context. end: drop tokens at "
                "the end. start: drop tokens at the start. none: such inputs are refused. Fields of a request override "
                "this setting. Inputs with media are never truncated."
            )
        ),
    ] = "none"
    max_prompts: Annotated[
        int,
        Meta(ge=1, description="Maximum number of prompts of one completion call over HTTP. Each prompt is a request."),
    ] = 1024
    max_sequences_per_call: Annotated[
        int,
        Meta(
            ge=1,
            description=(
                "Maximum number of sequences of one completion call over HTTP: the number of its prompts times n."
            ),
        ),
    ] = 4096
    max_prompt_parts: Annotated[int, Meta(ge=1, description="Maximum number of parts of one mixed prompt.")] = 1024
    max_messages: Annotated[int, Meta(ge=1, description="Maximum number of messages of one conversation.")] = 4096
    max_content_parts: Annotated[int, Meta(ge=1, description="Maximum number of content parts of one message.")] = 1024
    max_tools: Annotated[int, Meta(ge=1, description="Maximum number of tools of one conversation.")] = 1024
    max_tool_calls: Annotated[int, Meta(ge=1, description="Maximum number of tool calls of one message.")] = 1024
    max_trace_context_bytes: Annotated[
        int, Meta(ge=1, description="Maximum bytes of the names and values in routing.trace_context.")
    ] = 8192
    max_request_id_bytes: Annotated[int, Meta(ge=1, description="Maximum bytes of a request id.")] = 256
    max_cache_salt_bytes: Annotated[int, Meta(ge=1, description="Maximum bytes of a cache salt.")] = 256
    max_tenant_bytes: Annotated[int, Meta(ge=1, description="Maximum bytes of a tenant's name.")] = 256
    max_stop_strings: Annotated[int, Meta(ge=1, description="Maximum number of stop strings per request.")] = 64
    max_stop_string_chars: Annotated[int, Meta(ge=1, description="Maximum length of a stop string, in characters.")] = (
        256
    )
    max_stop_token_ids: Annotated[int, Meta(ge=1, description="Maximum number of stop token ids per request.")] = 1024
    max_n: Annotated[int, Meta(ge=1, description="Maximum number of sequences per request (n).")] = 128
    max_logit_biases: Annotated[
        int, Meta(ge=1, description="Maximum number of token ids with a logit bias per request.")
    ] = 1024
    max_allowed_token_ids: Annotated[
        int, Meta(ge=1, description="Maximum number of allowed token ids per request.")
    ] = 65_536
    max_bad_words: Annotated[int, Meta(ge=1, description="Maximum number of bad words per request.")] = 256
    max_bad_word_chars: Annotated[
        int,
        Meta(
            ge=1,
            description="Maximum length of a bad word, in characters, or in token ids if it is given as token ids.",
        ),
    ] = 256
    max_structured_output_bytes: Annotated[
        int, Meta(ge=1, description="Maximum bytes of a structured output constraint.")
    ] = 256 * 1024

    def __post_init__(self) -> None:
        check_fields("limits", self)


# The code below is for authentication.

# Symmetric algorithms are not allowed, because every party that can verify a token with them can also create a token.
JwtAlgorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]


class JwtConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings for JSON Web Tokens, by which callers can authenticate. If ``jwks`` is empty, no tokens are accepted."""

    jwks: Annotated[
        str,
        Meta(
            description=(
                "File with the issuer's public keys, a JSON Web Key Set. The frontend reloads it when it changes. "
                "Empty: tokens are not accepted."
            )
        ),
    ] = ""
    issuer: Annotated[
        str, Meta(description="Required value of a token's claim iss. Must be set if auth.jwt.jwks is set.")
    ] = ""
    audience: Annotated[
        str, Meta(description="Required value of a token's claim aud. Must be set if auth.jwt.jwks is set.")
    ] = ""
    algorithms: Annotated[
        tuple[JwtAlgorithm, ...],
        Meta(description="Accepted signature algorithms. At least one if auth.jwt.jwks is set."),
    ] = ("RS256", "ES256", "EdDSA")
    leeway: Annotated[
        float, Meta(ge=0, le=600, description="Tolerated clock difference to the issuer, in seconds.")
    ] = 30.0
    tenant_claim: Annotated[
        str, Meta(description="Claim that names the caller's tenant. Must be set if auth.jwt.jwks is set.")
    ] = "tenant"
    scope: Annotated[
        str,
        Meta(description="Scope that a token's claim scope must contain for inference. Empty: no scope is required."),
    ] = ""
    admin_scope: Annotated[
        str,
        Meta(
            description=(
                "Scope that a token's claim scope must contain for the operators' API. Must be set if auth.jwt.jwks is "
                "set."
            )
        ),
    ] = "penstock-admin"

    def __post_init__(self) -> None:
        check_fields("auth.jwt", self)
        if not self.jwks:
            return
        require("auth.jwt.issuer", self.issuer)
        require("auth.jwt.audience", self.audience)
        require("auth.jwt.tenant_claim", self.tenant_claim)
        require("auth.jwt.admin_scope", self.admin_scope)
        if not self.algorithms:
            raise ConfigError("auth.jwt.algorithms is empty; at least one is required")


class AuthConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings for the authentication of callers.

    Authentication is on if ``api_keys`` or ``jwt.jwks`` is set. ``/health``, ``/ping`` and gRPC's health service never
    require credentials.
    """

    api_keys: Annotated[
        str,
        Meta(
            description=(
                "File with one API key per line; docs/guides/api-keys.md describes the format. The frontend reloads it when "
                "it changes. Empty: API keys are not accepted."
            )
        ),
    ] = ""
    jwt: JwtConfig = JwtConfig()
    admin: Annotated[bool, Meta(description="Require credentials for the operators' API.")] = False
    metrics: Annotated[bool, Meta(description="Require credentials for /metrics.")] = False
    cluster: Annotated[bool, Meta(description="Require credentials for /cluster, which the web page reads.")] = True

    def __post_init__(self) -> None:
        for name in ("admin", "metrics"):
            if getattr(self, name) and not self.enabled:
                raise ConfigError(
                    f"auth.{name} is true, but no client can authenticate; set auth.api_keys or auth.jwt.jwks"
                )

    @property
    def enabled(self) -> bool:
        """True if callers must send an API key or a token."""
        return bool(self.api_keys or self.jwt.jwks)
