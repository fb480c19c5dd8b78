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

// errReported is the error of a command that has told itself what failed.
var errReported = errors.New("already reported")

// client is what every command works with.
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

// run makes the calls of a command, all over one channel. Ending ctx ends them, and their work in the engine.
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
