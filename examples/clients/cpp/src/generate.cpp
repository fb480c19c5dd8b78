#include <iostream>

#include "client.h"

namespace client {

// Prints the continuation of the prompt as it arrives.
int generate(const Client& client) {
  Call call(client);
  auto reader = client.stub->Generate(call.context(), client.generate_request(client.options.texts[0]));
  penstock::inference::v1::GenerateResponse response;
  while (reader->Read(&response)) std::cout << response.text() << std::flush;
  const grpc::Status status = reader->Finish();
  std::cout << std::endl;
  return finish(client, status);
}

}  // namespace client
