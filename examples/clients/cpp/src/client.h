// The stub and the options that every command uses.
#pragma once

#include <grpcpp/client_context.h>

#include <functional>
#include <memory>
#include <stop_token>
#include <string>

#include "options.h"
#include "penstock/inference/v1/service.grpc.pb.h"

namespace client {

inline constexpr int kExitFailed = 1;
inline constexpr int kExitUsage = 2;
inline constexpr int kExitInterrupted = 130;

struct Client {
  Options options;
  std::string key;
  std::stop_token stop;
  std::unique_ptr<penstock::inference::v1::InferenceService::Stub> stub;

  // Returns a request to continue the text.
  penstock::inference::v1::GenerateRequest generate_request(const std::string& text) const;
};

// The context of one call: its deadline and its API key. If the program stops, the call is cancelled, and the engine stops its
// work.
class Call {
 public:
  explicit Call(const Client& client);
  grpc::ClientContext* context() { return &context_; }

 private:
  grpc::ClientContext context_;
  std::stop_callback<std::function<void()>> cancel_;
};

// The commands. Each makes its calls, and returns the exit code.
int generate(const Client& client);
int chat(const Client& client);
int session(const Client& client);
int load(const Client& client);

// Prints why a call failed. Returns the exit code.
int finish(const Client& client, const grpc::Status& status);

}  // namespace client
