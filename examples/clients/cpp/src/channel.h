// A channel to a Penstock server.
#pragma once

#include <grpcpp/channel.h>

#include <memory>
#include <string>

namespace client {

// Opens a channel: balancing, health, retries, keepalive, and TLS where it is asked for or a file of certificates to trust is
// named. Throws std::runtime_error if that file cannot be read.
std::shared_ptr<grpc::Channel> connect(const std::string& address, bool tls, const std::string& ca);

}  // namespace client
