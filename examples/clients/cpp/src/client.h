// What every command works with.
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

  // Asks to continue the text.
  penstock::inference::v1::GenerateRequest generate_request(const std::string& text) const;
};

// The context of one call: its deadline, its key, and its end when the program is to stop. Its end ends the work in the engine.
class Call {
 public:
  explicit Call(const Client& client);
  grpc::ClientContext* context() { return &context_; }

 private:
  grpc::ClientContext context_;
  std::stop_callback<std::function<void()>> cancel_;
};

// The commands: each makes its calls and returns the exit code.
int generate(const Client& client);
int chat(const Client& client);
int session(const Client& client);
int load(const Client& client);

// Tells why a call failed. Returns the exit code.
int finish(const Client& client, const grpc::Status& status);

}  // namespace client
