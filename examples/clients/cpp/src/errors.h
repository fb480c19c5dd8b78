// What a failed call tells, in lines for people.
#pragma once

#include <grpcpp/support/status.h>

#include <string>

#include "penstock/inference/v1/messages.pb.h"

namespace client {

// The code and the message of a failed call, and its google.rpc details.
std::string describe(const grpc::Status& failed);

// The same of one request of a session, where the others go on.
std::string describe(const penstock::inference::v1::SessionError& failed);

}  // namespace client
