// Command generate streams the continuation of a prompt from a Penstock server.
package main

import (
	"context"
	"crypto/tls"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"time"

	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	commonv1 "example.com/penstock-client/gen/penstock/common/v1"
	inferencev1 "example.com/penstock-client/gen/penstock/inference/v1"
)

const (
	exitFailed      = 1
	exitUsage       = 2
	exitInterrupted = 130
)

// serviceConfig: one connection to each address that the name has, calls in turn. A call that failed before anything of
// its answer came is tried again, on the next address.
const serviceConfig = `{
  "loadBalancingConfig": [{"round_robin": {}}],
  "methodConfig": [{
    "name": [{"service": "penstock.inference.v1.InferenceService"}],
    "retryPolicy": {
      "maxAttempts": 4,
      "initialBackoff": "0.1s",
      "maxBackoff": "2s",
      "backoffMultiplier": 2,
      "retryableStatusCodes": ["UNAVAILABLE"]
    }
  }]
}`

const maxMessageBytes = 64 << 20 // 4 MiB are too few for long log-probabilities

// options is the command line.
type options struct {
	address string
	tls     bool
	ca      string
	timeout time.Duration
	request *inferencev1.GenerateRequest
}

// stringList collects a flag that may be repeated.
type stringList []string

func (l *stringList) String() string         { return fmt.Sprint(*l) }
func (l *stringList) Set(value string) error { *l = append(*l, value); return nil }

func main() {
	opts := parseFlags()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	err := generate(ctx, opts, os.Stdout)
	fmt.Println()
	switch {
	case ctx.Err() != nil:
		os.Exit(exitInterrupted)
	case err != nil:
		printError(os.Stderr, err)
		os.Exit(exitFailed)
	}
}

// parseFlags reads the command line. A field left out takes the model's default, so only what was asked for is set.
func parseFlags() options {
	address := flag.String("address", "localhost:50051", "host:port of the server")
	model := flag.String("model", "", "name of the model; by default the one that is served")
	maxTokens := flag.Uint("max-tokens", 0, "longest output in tokens")
	temperature := flag.Float64("temperature", 0, "0 is greedy")
	seed := flag.Int64("seed", 0, "makes the output reproducible")
	timeout := flag.Float64("timeout", 0, "deadline of the call in seconds; 0 is none")
	encrypted := flag.Bool("tls", false, "encrypt the connection")
	ca := flag.String("ca", "", "file of the certificates to trust; with it, --tls is not needed")
	var stops stringList
	flag.Var(&stops, "stop", "a string that ends the output; repeatable")
	flag.Parse()
	if flag.NArg() != 1 {
		fmt.Fprintln(os.Stderr, "usage: generate [flags] PROMPT")
		flag.PrintDefaults()
		os.Exit(exitUsage)
	}

	params := &commonv1.SamplingParams{Stop: stops}
	flag.Visit(func(f *flag.Flag) {
		switch f.Name {
		case "max-tokens":
			value := uint32(*maxTokens)
			params.MaxTokens = &value
		case "temperature":
			value := float32(*temperature)
			params.Temperature = &value
		case "seed":
			params.Seed = seed
		}
	})
	return options{
		address: *address,
		tls:     *encrypted,
		ca:      *ca,
		timeout: time.Duration(*timeout * float64(time.Second)),
		request: &inferencev1.GenerateRequest{
			Model:          *model,
			Prompt:         &inferencev1.GenerateRequest_Text{Text: flag.Arg(0)},
			SamplingParams: params,
		},
	}
}

// connect opens a channel: balancing, retries, keepalive, and TLS where it is asked for.
func connect(opts options) (*grpc.ClientConn, error) {
	transport := insecure.NewCredentials()
	if opts.ca != "" {
		trusted, err := credentials.NewClientTLSFromFile(opts.ca, "")
		if err != nil {
			return nil, err
		}
		transport = trusted
	} else if opts.tls {
		transport = credentials.NewTLS(&tls.Config{MinVersion: tls.VersionTLS12})
	}
	return grpc.NewClient(
		opts.address,
		grpc.WithTransportCredentials(transport),
		grpc.WithDefaultServiceConfig(serviceConfig),
		// A server that vanished is noticed after 40 s, also in a silent stream.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 30 * time.Second, Timeout: 10 * time.Second}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessageBytes)),
	)
}

// withKey puts an API key into the metadata of the calls made with the context.
func withKey(ctx context.Context, key string) context.Context {
	if key == "" {
		return ctx
	}
	return metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+key)
}

// generate writes the text as it arrives. Ending ctx ends the work in the engine.
func generate(ctx context.Context, opts options, out io.Writer) error {
	if opts.timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, opts.timeout)
		defer cancel()
	}
	connection, err := connect(opts)
	if err != nil {
		return err
	}
	defer connection.Close()
	ctx = withKey(ctx, os.Getenv("PENSTOCK_API_KEY"))
	stream, err := inferencev1.NewInferenceServiceClient(connection).Generate(ctx, opts.request)
	if err != nil {
		return err
	}
	for {
		response, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if _, err := io.WriteString(out, response.GetText()); err != nil {
			return err
		}
	}
}

// printError tells the code and the message of a failed call, and its google.rpc details.
func printError(out io.Writer, err error) {
	failed := status.Convert(err)
	fmt.Fprintf(out, "%s: %s\n", code.Code(failed.Code()), failed.Message())
	for _, detail := range failed.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			fmt.Fprintf(out, "  reason: %s\n", detail.GetReason())
		case *errdetails.BadRequest:
			for _, violation := range detail.GetFieldViolations() {
				fmt.Fprintf(out, "  field: %s: %s\n", violation.GetField(), violation.GetDescription())
			}
		case *errdetails.RetryInfo:
			fmt.Fprintf(out, "  retry after: %g s\n", detail.GetRetryDelay().AsDuration().Seconds())
		}
	}
}
