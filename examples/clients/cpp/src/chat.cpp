#include <iostream>

#include "client.h"

namespace client {

namespace {

penstock::inference::v1::ChatRequest chat_request(const Options& options) {
  penstock::inference::v1::ChatRequest request;
  request.set_model(options.model);
  *request.mutable_sampling_params() = options.params;
  if (!options.system.empty()) {
    auto* message = request.add_messages();
    message->set_role("system");
    message->set_content(options.system);
  }
  auto* message = request.add_messages();
  message->set_role("user");
  message->set_content(options.texts[0]);
  return request;
}

}  // namespace

// Prints the answer as it arrives.
int chat(const Client& client) {
  Call call(client);
  auto reader = client.stub->Chat(call.context(), chat_request(client.options));
  penstock::inference::v1::ChatResponse response;
  while (reader->Read(&response)) std::cout << response.content() << std::flush;
  const grpc::Status status = reader->Finish();
  std::cout << std::endl;
  return finish(client, status);
}

}  // namespace client
