package main

import (
	"fmt"
	"strings"

	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/status"

	inferencev1 "penstock.io/protos/inference/v1"
)

// describe returns the code, the message and the google.rpc details of a failed call, as text.
func describe(err error) string {
	var out strings.Builder
	failed := status.Convert(err)
	fmt.Fprintf(&out, "%s: %s\n", code.Code(failed.Code()), failed.Message())
	for _, detail := range failed.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			fmt.Fprintf(&out, "  reason: %s\n", detail.GetReason())
		case *errdetails.BadRequest:
			for _, violation := range detail.GetFieldViolations() {
				fmt.Fprintf(&out, "  field: %s\n", violation.GetField())
			}
		case *errdetails.RetryInfo:
			fmt.Fprintf(&out, "  retry after: %g s\n", detail.GetRetryDelay().AsDuration().Seconds())
		}
	}
	return out.String()
}

// describeOne does the same for a failed request of a session. The other requests of the session continue.
func describeOne(failed *inferencev1.SessionError) string {
	var out strings.Builder
	err := failed.GetError()
	fmt.Fprintf(&out, "[%s] %s: %s\n", failed.GetRequestId(), err.GetCode(), err.GetMessage())
	fmt.Fprintf(&out, "  reason: %s\n", err.GetReason())
	if err.GetField() != "" {
		fmt.Fprintf(&out, "  field: %s\n", err.GetField())
	}
	if err.RetryAfter != nil {
		fmt.Fprintf(&out, "  retry after: %g s\n", err.GetRetryAfter())
	}
	return out.String()
}
