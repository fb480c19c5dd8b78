package io.penstock.example;

import com.google.protobuf.Any;
import com.google.protobuf.Duration;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import io.grpc.Context;
import io.grpc.Status;
import io.grpc.protobuf.StatusProto;
import io.penstock.common.v1.RequestError;
import io.penstock.inference.v1.SessionError;
import java.math.BigDecimal;

/** Reports failures on standard error. */
final class Failure {
  private Failure() {}

  /** Reports the error of a call. Reports nothing if this program has cancelled the call. */
  static void report(Throwable error) {
    Status status = Status.fromThrowable(error);
    if (Context.current().isCancelled()) {
      return;
    }
    StringBuilder text = new StringBuilder(status.getCode() + ": " + message(status) + "\n");
    com.google.rpc.Status details = StatusProto.fromThrowable(error);
    if (details != null) {
      for (Any detail : details.getDetailsList()) {
        text.append(describe(detail));
      }
    }
    System.err.print(text);
  }

  /** Reports the error of a request of a session. */
  static void report(SessionError failed) {
    RequestError error = failed.getError();
    StringBuilder text = new StringBuilder();
    text.append("[%s] %s: %s\n".formatted(failed.getRequestId(), error.getCode(), error.getMessage()));
    text.append("  reason: " + error.getReason() + "\n");
    if (!error.getField().isEmpty()) {
      text.append("  field: " + error.getField() + "\n");
    }
    if (error.hasRetryAfter()) {
      text.append(retryAfter(BigDecimal.valueOf(error.getRetryAfter())));
    }
    System.err.print(text);
  }

  /** Returns the message of the server, or the message of the transport with its cause. */
  private static String message(Status status) {
    String description = status.getDescription() == null ? "" : status.getDescription();
    return status.getCause() == null ? description : description + ": " + status.getCause().getMessage();
  }

  private static String describe(Any detail) {
    try {
      if (detail.is(ErrorInfo.class)) {
        return "  reason: " + detail.unpack(ErrorInfo.class).getReason() + "\n";
      }
      if (detail.is(BadRequest.class)) {
        StringBuilder lines = new StringBuilder();
        for (BadRequest.FieldViolation violation : detail.unpack(BadRequest.class).getFieldViolationsList()) {
          lines.append("  field: " + violation.getField() + "\n");
        }
        return lines.toString();
      }
      if (detail.is(RetryInfo.class)) {
        Duration delay = detail.unpack(RetryInfo.class).getRetryDelay();
        return retryAfter(BigDecimal.valueOf(delay.getSeconds()).add(BigDecimal.valueOf(delay.getNanos(), 9)));
      }
      return ""; // a type of detail that this program does not know
    } catch (InvalidProtocolBufferException broken) {
      return "  " + detail.getTypeUrl() + " cannot be read: " + broken.getMessage() + "\n";
    }
  }

  private static String retryAfter(BigDecimal seconds) {
    return "  retry after: " + seconds.stripTrailingZeros().toPlainString() + " s\n";
  }
}
