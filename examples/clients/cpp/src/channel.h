// The channel to a Penstock server.
#pragma once

#include <grpcpp/channel.h>

#include <memory>
#include <string>

namespace client {

// Opens a channel with load balancing, health checks, retries and keepalive. The channel uses TLS if `tls` is true, or if `ca`
// names a file with the certificates to trust. Throws std::runtime_error if this file cannot be read.
std::shared_ptr<grpc::Channel> connect(const std::string& address, bool tls, const std::string& ca);

}  // namespace client
