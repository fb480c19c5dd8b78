package io.penstock.example

import com.google.protobuf.Any
import com.google.protobuf.InvalidProtocolBufferException
import com.google.rpc.BadRequest
import com.google.rpc.ErrorInfo
import com.google.rpc.RetryInfo
import io.grpc.Status
import io.grpc.StatusException
import io.grpc.protobuf.StatusProto
import io.penstock.inference.v1.SessionError
import java.math.BigDecimal

/** Reports the error of a call on standard error. */
internal fun report(error: StatusException) {
    val details = StatusProto.fromThrowable(error)?.detailsList.orEmpty()
    tell(listOf("${error.status.code}: ${message(error.status)}") + details.flatMap(::describe))
}

/** Reports the error of a request of a session. */
internal fun report(failed: SessionError) {
    val error = failed.error
    tell(
        buildList {
            add("[${failed.requestId}] ${error.code}: ${error.message}")
            add("  reason: ${error.reason}")
            if (error.field.isNotEmpty()) add("  field: ${error.field}")
            if (error.hasRetryAfter()) add(retryAfter(BigDecimal.valueOf(error.retryAfter)))
        }
    )
}

/** Returns the message of the server, or the message of the transport with its cause. */
private fun message(status: Status): String = listOfNotNull(status.description, status.cause?.message).joinToString(": ")

private fun describe(detail: Any): List<String> =
    try {
        when {
            detail.`is`(ErrorInfo::class.java) -> listOf("  reason: ${detail.unpack(ErrorInfo::class.java).reason}")
            detail.`is`(BadRequest::class.java) ->
                detail.unpack(BadRequest::class.java).fieldViolationsList.map { "  field: ${it.field}" }
            detail.`is`(RetryInfo::class.java) -> {
                val delay = detail.unpack(RetryInfo::class.java).retryDelay
                listOf(retryAfter(BigDecimal.valueOf(delay.seconds) + BigDecimal.valueOf(delay.nanos.toLong(), 9)))
            }
            else -> emptyList() // a type of detail that this program does not know
        }
    } catch (broken: InvalidProtocolBufferException) {
        listOf("  ${detail.typeUrl} cannot be read: ${broken.message}")
    }

private fun retryAfter(seconds: BigDecimal) = "  retry after: ${seconds.stripTrailingZeros().toPlainString()} s"

private fun tell(lines: List<String>) = System.err.print(lines.joinToString("") { "$it\n" })
