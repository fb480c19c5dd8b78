"""Conversion between RequestFailed and a gRPC status with ``google.rpc`` details."""

import asyncio
from typing import NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from penstock_common.errors import RequestFailed, request_failed

ERROR_DOMAIN = "penstock"
DETAILS_KEY = "grpc-status-details-bin"


def to_status(error: RequestFailed) -> status_pb2.Status:
    """Return the gRPC status of an error, with code, message and details.

    The details always include ErrorInfo. BadRequest is added for an invalid field, QuotaFailure for an exhausted quota,
    and RetryInfo if a retry may help.
    """
    code: grpc.StatusCode = grpc.StatusCode[error.code]
    status = status_pb2.Status(code=code.value[0], message=error.message)
    details: list[object] = [error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN)]
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.quota_subject:
        used_up = error_details_pb2.QuotaFailure.Violation(subject=error.quota_subject, description=error.message)
        details.append(error_details_pb2.QuotaFailure(violations=[used_up]))
    if error.retry_after is not None:
        delay = duration_pb2.Duration(seconds=int(error.retry_after), nanos=int(error.retry_after % 1 * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)  # type: ignore[arg-type]
        status.details.append(packed)
    return status


async def abort(context: grpc.aio.ServicerContext[object, object], error: RequestFailed) -> NoReturn:
    """End a gRPC call with the status and details of ``error``. Raises CancelledError if the client has left."""
    status = to_status(error)
    details = ((DETAILS_KEY, status.SerializeToString()),)
    try:
        await context.abort(grpc.StatusCode[error.code], error.message, trailing_metadata=details)
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None
    raise AssertionError("context.abort always raises")


def from_rpc_error(error: grpc.aio.AioRpcError) -> RequestFailed:
    """Return the RequestFailed for a failed call. If the call has no details, as after a broken connection, only code
    and message are set.
    """
    failed = request_failed(error.code().name, error.details() or error.code().name)
    for key, value in error.trailing_metadata() or ():
        if key != DETAILS_KEY:
            continue
        for detail in status_pb2.Status.FromString(value).details:
            _read_detail(detail, failed)
    return failed


def _read_detail(detail: any_pb2.Any, failed: RequestFailed) -> None:
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    quota = error_details_pb2.QuotaFailure()
    if detail.Unpack(info):
        failed.reason = info.reason
    elif detail.Unpack(bad) and bad.field_violations:
        failed.field = bad.field_violations[0].field
    elif detail.Unpack(quota) and quota.violations:
        failed.quota_subject = quota.violations[0].subject
    elif detail.Unpack(retry):
        failed.retry_after = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
