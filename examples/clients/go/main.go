// Command client calls a Penstock server: it continues prompts, answers messages, and makes many calls at once.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"

	inferencev1 "penstock.io/protos/inference/v1"
)

const (
	exitFailed      = 1
	exitUsage       = 2
	exitInterrupted = 130
)

// errReported is the error of a command that has already printed what failed.
var errReported = errors.New("already reported")

// client has the stub and the options that every command uses.
type client struct {
	inferencev1.InferenceServiceClient
	options
}

func main() {
	opts := parseOptions(os.Args[1:])
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	err := run(ctx, opts)
	switch {
	case ctx.Err() != nil:
		os.Exit(exitInterrupted)
	case errors.Is(err, errReported):
		os.Exit(exitFailed)
	case err != nil:
		fmt.Fprint(os.Stderr, describe(err))
		os.Exit(exitFailed)
	}
}

// run runs a command, with one channel for all its calls. If ctx is cancelled, the engine stops the work of these calls.
func run(ctx context.Context, opts options) error {
	connection, err := connect(opts.address, opts.tls, opts.ca)
	if err != nil {
		fmt.Fprintf(os.Stderr, "client: %v\n", err)
		return errReported
	}
	defer connection.Close()
	ctx = withKey(ctx, os.Getenv("PENSTOCK_API_KEY"))
	return commands[opts.command](ctx, client{inferencev1.NewInferenceServiceClient(connection), opts})
}
