// Package protos contains the service config of Penstock's public API. The messages and stubs are in the packages below it.
package protos

import _ "embed"

// ServiceConfig is a gRPC service config for grpc.WithDefaultServiceConfig. Calls are distributed round-robin over all addresses of
// the name. A call that fails before any part of its answer arrives is retried. A frontend whose health check fails gets no new
// calls; this requires a blank import of google.golang.org/grpc/health in the program.
//
//go:embed service_config.json
var ServiceConfig string
