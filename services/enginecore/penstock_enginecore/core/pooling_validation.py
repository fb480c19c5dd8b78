"""Validation of pooling requests. Pure checks, safe on any thread."""

import msgspec

from penstock_common.errors import WRONG_MODEL_KIND, InvalidArgument
from penstock_common.types.request import EngineCoreRequest, PoolingParams, PoolingTask

_EMBEDS = frozenset({PoolingTask.EMBED, PoolingTask.TOKEN_EMBED})


class PoolingLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Tasks and limits of a pooling engine.

    Attributes:
        tasks: Pooling tasks that the model supports.
        embedding_size: Number of dimensions of the model's embeddings, or 0 if the model makes no embeddings.
        limits_attention: Whether requests may set ``unattended_start``.
    """

    tasks: frozenset[PoolingTask]
    embedding_size: int = 0
    limits_attention: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        """Names of the supported tasks, as engines report the names to frontends."""
        return tuple(task.name.lower() for task in sorted(self.tasks))


def validate_pooling(request: EngineCoreRequest, served: PoolingLimits | None, max_model_len: int) -> None:
    """Raise InvalidArgument, with the name of the field, if the engine cannot serve this pooling request.

    ``served`` has the engine's pooling tasks and limits, or is None if the engine generates tokens. The caller must
    have checked that the request has ``pooling_params``.
    """
    params = request.pooling_params
    if params is None:
        raise InvalidArgument("pooling_params is not set", field="pooling_params")
    _check_task(params.task, served)
    _check_params(params, served.embedding_size if served else 0)
    length = len(request.prompt_token_ids)
    if length > max_model_len:
        raise InvalidArgument(
            f"prompt_token_ids has {length} tokens; max_model_len is {max_model_len}",
            field="prompt_token_ids",
        )
    if request.prior_output_token_ids:
        raise InvalidArgument(
            f"prior_output_token_ids has {len(request.prior_output_token_ids)} tokens; a pooling request has no output",
            field="prior_output_token_ids",
        )
    start = request.second_text_start
    if start is not None and not 0 < start < length:
        raise InvalidArgument(
            f"second_text_start is {start}; it must be inside the prompt of {length} tokens", field="second_text_start"
        )
    unattended = request.unattended_start
    if unattended is not None and (served is None or not served.limits_attention):
        raise InvalidArgument(
            f"unattended_start is {unattended}, but only embedding models with bidirectional attention can hide expansion "
            "tokens from other tokens",
            field="unattended_start",
        )
    if unattended is not None and not 0 < unattended < length:
        raise InvalidArgument(
            f"unattended_start is {unattended}; it must be inside the prompt of {length} tokens",
            field="unattended_start",
        )


def refuse_generation(served: PoolingLimits) -> None:
    """Raise InvalidArgument for a generation request, because pooling engines generate no tokens."""
    raise InvalidArgument(
        f"sampling_params is set, but this engine does not generate; its pooling tasks are {', '.join(served.words)}",
        field="sampling_params",
        reason=WRONG_MODEL_KIND,
    )


def _check_task(task: PoolingTask, served: PoolingLimits | None) -> None:
    words = served.words if served else ("generate",)
    if served is None or task not in served.tasks:
        raise InvalidArgument(
            f"pooling_params.task is {task.name.lower()}; this engine supports {', '.join(words)}",
            field="pooling_params.task",
            reason=WRONG_MODEL_KIND,
        )


def _check_params(params: PoolingParams, embedding_size: int) -> None:
    if not params.use_activation and params.task in (*_EMBEDS, PoolingTask.SPARSE_EMBED):
        raise InvalidArgument(
            f"pooling_params.use_activation is false, but the task {params.task.name.lower()} does not use this field",
            field="pooling_params.use_activation",
        )
    if params.task in _EMBEDS:
        if params.dimensions is not None and not 1 <= params.dimensions <= embedding_size:
            raise InvalidArgument(
                f"pooling_params.dimensions is {params.dimensions}; it must be at least 1 and at most {embedding_size}",
                field="pooling_params.dimensions",
            )
        return
    for name in ("dimensions", "normalize"):
        if (value := getattr(params, name)) is not None:
            raise InvalidArgument(
                f"pooling_params.{name} is {value}, but the task {params.task.name.lower()} does not use this field",
                field=f"pooling_params.{name}",
            )
