#include "client.h"

#include <chrono>
#include <iostream>

#include "errors.h"

namespace client {

penstock::inference::v1::GenerateRequest Client::generate_request(const std::string& text) const {
  penstock::inference::v1::GenerateRequest request;
  request.set_model(options.model);
  request.set_text(text);
  *request.mutable_sampling_params() = options.params;
  return request;
}

Call::Call(const Client& client) : cancel_(client.stop, [this] { context_.TryCancel(); }) {
  if (client.options.timeout) context_.set_deadline(std::chrono::system_clock::now() + *client.options.timeout);
  if (!client.key.empty()) context_.AddMetadata("authorization", "Bearer " + client.key);
}

int finish(const Client& client, const grpc::Status& status) {
  if (client.stop.stop_requested()) return kExitInterrupted;
  if (status.ok()) return 0;
  std::cerr << describe(status);
  return kExitFailed;
}

}  // namespace client
