// Readable descriptions of failed calls.
#pragma once

#include <grpcpp/support/status.h>

#include <string>

#include "penstock/inference/v1/messages.pb.h"

namespace client {

// Returns the code, the message and the google.rpc details of a failed call, as text.
std::string describe(const grpc::Status& failed);

// Does the same for a failed request of a session. The other requests of the session continue.
std::string describe(const penstock::inference::v1::SessionError& failed);

}  // namespace client
