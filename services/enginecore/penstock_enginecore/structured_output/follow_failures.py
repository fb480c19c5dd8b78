"""Why a request whose constraint is followed ends."""

from penstock_common.errors import Internal, InvalidArgument, RequestFailed, ResourceExhausted, Unavailable
from penstock_common.observability.incidents import incident
from penstock_enginecore.config import StructuredOutputConfig
from penstock_enginecore.structured_output.constraints.source import FIELD
from penstock_enginecore.structured_output.followed import FollowedGrammar
from penstock_enginecore.structured_output.messages import Result
from penstock_enginecore.structured_output.process import TOO_COSTLY, over_budget


def failure(config: StructuredOutputConfig, grammar: FollowedGrammar, result: Result) -> RequestFailed:
    """What a result other than a mask means."""
    if result.kind == "costly":
        return over(config, grammar)
    if result.kind == "memory":
        return ResourceExhausted(
            f"{grammar.compiled.field} takes too much memory to follow; all constraints together may take "
            f"{config.follow_memory} bytes (structured_output.follow_memory)",
            field=grammar.compiled.field,
            reason=TOO_COSTLY,
        )
    if result.kind == "refused" and not grammar.begun.done():
        return InvalidArgument(
            "prior_output_token_ids do not follow the constraint of structured_output",
            field="prior_output_token_ids",
        )
    what = result.text or "a token that the mask allows was not accepted"
    return incident(RuntimeError(what), request=str(grammar.number), doing="following the constraint")


def over(config: StructuredOutputConfig, grammar: FollowedGrammar) -> ResourceExhausted:
    """A token took too long."""
    message = over_budget(grammar.compiled.field, config.token_budget)
    return ResourceExhausted(message, field=grammar.compiled.field, reason=TOO_COSTLY)


def fatal(grammar: FollowedGrammar) -> Internal:
    """The process ended of it."""
    error = RuntimeError("the process that followed the constraint ended")
    return incident(error, request=str(grammar.number), doing="following the constraint")


def gone(*, closed: bool) -> RequestFailed:
    """There is no process any more; ``closed``: since the engine stops."""
    if closed:
        return Unavailable("the engine is stopping", field=FIELD)
    return Internal("the process that follows constraints ended", field=FIELD)
