package main

import (
	"context"
	"crypto/tls"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	_ "google.golang.org/grpc/health" // enables healthCheckConfig of the service config
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/resolver/dns"

	"penstock.io/protos"
)

const maxMessageBytes = 64 << 20 // 4 MiB are too few for long log-probabilities

func init() {
	// Resolve the name again when a connection ends, but wait at least 5 s between two resolutions (default: 30 s).
	dns.SetMinResolutionInterval(5 * time.Second)
}

// connect opens a channel with load balancing, health checks, retries and keepalive. The channel uses TLS if encrypted is
// true, or if ca names a file with the certificates to trust.
func connect(address string, encrypted bool, ca string) (*grpc.ClientConn, error) {
	transport := insecure.NewCredentials()
	if ca != "" {
		trusted, err := credentials.NewClientTLSFromFile(ca, "")
		if err != nil {
			return nil, err
		}
		transport = trusted
	} else if encrypted {
		transport = credentials.NewTLS(&tls.Config{MinVersion: tls.VersionTLS12})
	}
	return grpc.NewClient(
		address,
		grpc.WithTransportCredentials(transport),
		grpc.WithDefaultServiceConfig(protos.ServiceConfig),
		// Detect a broken connection after 40 s, even in a stream without messages.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 30 * time.Second, Timeout: 10 * time.Second}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessageBytes)),
	)
}

// withKey returns a context whose calls have the API key in their metadata.
func withKey(ctx context.Context, key string) context.Context {
	if key == "" {
		return ctx
	}
	return metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+key)
}

// withDeadline returns a context for one call that ends after timeout. 0: no limit. The returned function cancels the call.
func withDeadline(ctx context.Context, timeout time.Duration) (context.Context, context.CancelFunc) {
	if timeout == 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, timeout)
}
