// Package protos has the service config of Penstock's public API. The messages and stubs are in the packages below it.
package protos

import _ "embed"

// ServiceConfig is for grpc.WithDefaultServiceConfig: calls go in turn to all addresses that a name has, a call that failed
// before anything of its answer came is tried again, and a frontend that says it does not serve gets no new ones. The last
// needs a blank import of google.golang.org/grpc/health in the program.
//
//go:embed service_config.json
var ServiceConfig string
