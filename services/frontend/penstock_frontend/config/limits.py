"""Who may call, what one request may ask for, and how many requests there may be at once."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock_common.config.checks import check_fields, require
from penstock_common.config.settings import ByteSize
from penstock_common.errors import ConfigError
from penstock_common.types.media import Modality


class MaxMediaConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many media one request may have, for models that take them."""

    image: Annotated[int, Meta(ge=0, description="Images of one request; 0: none are taken.")] = 16
    audio: Annotated[int, Meta(ge=0, description="Sounds of one request; 0: none are taken.")] = 4
    video: Annotated[int, Meta(ge=0, description="Videos of one request; 0: none are taken.")] = 2

    def __post_init__(self) -> None:
        check_fields("limits.max_media", self)

    def of(self, modality: Modality) -> int:
        """Items of that modality."""
        return {"image": self.image, "audio": self.audio, "video": self.video}[modality]


class LimitsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one request may ask for, and how many requests one frontend takes at once. What exceeds a limit is refused."""

    max_requests: Annotated[
        int, Meta(ge=1, description="Calls that one frontend serves at once; each has limits.max_n sequences at most.")
    ] = 20_000
    max_message_bytes_in_flight: Annotated[
        ByteSize,
        Meta(
            ge=1,
            description="Bytes of the gRPC messages over 64 KiB of all calls at once, from when they have come until their calls "
            "end; they take about three times as much memory.",
        ),
    ] = 512 * 1024 * 1024
    max_answer_bytes_in_flight: Annotated[
        ByteSize,
        Meta(
            ge=1,
            description="Bytes of the vectors of all pooling calls at once, from when their inputs are sent to engines until "
            "their answers are encoded; they take about three times as much memory.",
        ),
    ] = 512 * 1024 * 1024
    max_media_bytes_in_flight: Annotated[
        ByteSize,
        Meta(
            ge=1,
            description="Bytes of the encoded images, sounds and videos of all requests at once, from when they are there until "
            "they are processed.",
        ),
    ] = 512 * 1024 * 1024
    max_media: MaxMediaConfig = MaxMediaConfig()
    max_prompt_length_in_flight: Annotated[
        int, Meta(ge=1, description="Characters, token ids and bytes of vectors and media of all prompts at once.")
    ] = 256 * 1024 * 1024
    max_tenant_requests: Annotated[int, Meta(ge=0, description="Sequences of one tenant at once; 0: no limit.")] = 0
    max_session_requests: Annotated[int, Meta(ge=1, description="Requests of one GenerateSession at once.")] = 1024
    max_prompt_length: Annotated[
        int,
        Meta(
            ge=1,
            description="Characters of a text, or ids of a list of token ids, before the engines' own limit is applied.",
        ),
    ] = 4 * 1024 * 1024
    max_pooling_inputs: Annotated[
        int, Meta(ge=1, description="Inputs of one Embed or Classify, or documents of one Score.")
    ] = 2048
    pooling_truncation: Annotated[
        Literal["none", "end", "start"],
        Meta(
            description="Where inputs of Embed, Classify and Score with more tokens than the model reads are cut: at the end or "
            "the start; none: they are refused. Fields of a request win. Inputs with media are never cut."
        ),
    ] = "none"
    max_prompts: Annotated[int, Meta(ge=1, description="Prompts of one completion call over HTTP, each a request.")] = (
        1024
    )
    max_sequences_per_call: Annotated[
        int, Meta(ge=1, description="Sequences of one completion call over HTTP: its prompts times n.")
    ] = 4096
    max_prompt_parts: Annotated[int, Meta(ge=1, description="Parts of one mixed prompt.")] = 1024
    max_messages: Annotated[int, Meta(ge=1, description="Messages of one conversation.")] = 4096
    max_content_parts: Annotated[int, Meta(ge=1, description="Parts of the content of one message.")] = 1024
    max_tools: Annotated[int, Meta(ge=1, description="Tools of one conversation.")] = 1024
    max_tool_calls: Annotated[int, Meta(ge=1, description="Tool calls of one message.")] = 1024
    max_trace_context_bytes: Annotated[
        int, Meta(ge=1, description="Bytes of the names and values of routing.trace_context.")
    ] = 8192
    max_request_id_bytes: Annotated[int, Meta(ge=1, description="Bytes of a request id.")] = 256
    max_cache_salt_bytes: Annotated[int, Meta(ge=1, description="Bytes of a cache salt.")] = 256
    max_tenant_bytes: Annotated[int, Meta(ge=1, description="Bytes of a tenant's name.")] = 256
    max_stop_strings: Annotated[int, Meta(ge=1, description="Stop strings of a request.")] = 64
    max_stop_string_chars: Annotated[int, Meta(ge=1, description="Characters of a stop string.")] = 256
    max_stop_token_ids: Annotated[int, Meta(ge=1, description="Stop token ids of a request.")] = 1024
    max_n: Annotated[int, Meta(ge=1, description="Sequences of a request.")] = 128
    max_logit_biases: Annotated[int, Meta(ge=1, description="Token ids with a logit bias of a request.")] = 1024
    max_allowed_token_ids: Annotated[int, Meta(ge=1, description="Allowed token ids of a request.")] = 65_536
    max_bad_words: Annotated[int, Meta(ge=1, description="Bad words of a request.")] = 256
    max_bad_word_chars: Annotated[
        int, Meta(ge=1, description="Characters of a bad word, or ids of one that is given as token ids.")
    ] = 256
    max_structured_output_bytes: Annotated[int, Meta(ge=1, description="Bytes of a constraint on the output.")] = (
        256 * 1024
    )

    def __post_init__(self) -> None:
        check_fields("limits", self)


# Who may call.

# Symmetric ones are missing on purpose: with them, whoever can check a token can make one.
JwtAlgorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]


class JwtConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """JSON Web Tokens that callers may show; off while ``jwks`` is empty."""

    jwks: Annotated[
        str,
        Meta(
            description="Path of the issuer's public keys, a JSON Web Key Set that is read anew when it changes; empty: no "
            "tokens."
        ),
    ] = ""
    issuer: Annotated[str, Meta(description="What the claim iss must say; required with tokens.")] = ""
    audience: Annotated[str, Meta(description="What the claim aud must say; required with tokens.")] = ""
    algorithms: Annotated[
        tuple[JwtAlgorithm, ...], Meta(description="Signature algorithms that are taken; at least one with tokens.")
    ] = ("RS256", "ES256", "EdDSA")
    leeway: Annotated[float, Meta(ge=0, le=600, description="Seconds by which clocks may differ.")] = 30.0
    tenant_claim: Annotated[str, Meta(description="Claim that names the caller's tenant; required with tokens.")] = (
        "tenant"
    )
    scope: Annotated[str, Meta(description="What the claim scope must have for inference; empty: nothing.")] = ""
    admin_scope: Annotated[
        str, Meta(description="What the claim scope must have for the operators' API; required with tokens.")
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
    """Who may call. Callers are asked for credentials as soon as ``api_keys`` or ``jwt.jwks`` is set; ``/health``, ``/ping`` and
    gRPC's health service are always open.
    """

    api_keys: Annotated[
        str,
        Meta(
            description="Path of a file with a key per line, read again when it changes "
            "(docs/guides/security.md describes its format). Empty: no keys."
        ),
    ] = ""
    jwt: JwtConfig = JwtConfig()
    admin: Annotated[bool, Meta(description="The operators' API asks for credentials.")] = False
    metrics: Annotated[bool, Meta(description="/metrics asks for credentials.")] = False
    cluster: Annotated[bool, Meta(description="/cluster, which the page reads, asks for credentials.")] = True

    def __post_init__(self) -> None:
        for name in ("admin", "metrics"):
            if getattr(self, name) and not self.enabled:
                raise ConfigError(f"auth.{name} is true; it needs auth.api_keys or auth.jwt.jwks")

    @property
    def enabled(self) -> bool:
        """Whether callers are asked for credentials."""
        return bool(self.api_keys or self.jwt.jwks)
