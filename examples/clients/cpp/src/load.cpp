#include <algorithm>
#include <atomic>
#include <chrono>
#include <iomanip>
#include <iostream>
#include <thread>
#include <vector>

#include "client.h"
#include "errors.h"

namespace client {

namespace {

using Clock = std::chrono::steady_clock;

// Makes calls from several threads, and counts them.
class Load {
 public:
  explicit Load(const Client& client) : client_(client), calls_(client.options.calls.value_or(client.options.at_once)) {}

  int run() {
    const auto& options = client_.options;
    {
      std::vector<std::jthread> threads;
      for (int64_t i = 0; i < (options.duration ? options.at_once : std::min(options.at_once, calls_)); ++i) {
        threads.emplace_back([this] { call_again_and_again(); });
      }
    }
    const std::chrono::duration<double> seconds = Clock::now() - start_;
    std::cout << "calls: " << ended_ << ", failed: " << failed_ << ", messages: " << messages_ << ", seconds: " << std::fixed
              << std::setprecision(1) << seconds.count() << std::endl;
    if (client_.stop.stop_requested()) return kExitInterrupted;
    return failed_ == 0 ? 0 : kExitFailed;
  }

 private:
  bool more() {
    if (client_.stop.stop_requested()) return false;
    if (client_.options.duration) return Clock::now() - start_ < *client_.options.duration;
    return begun_++ < calls_;
  }

  void call_again_and_again() {
    while (more()) {
      const grpc::Status status = call_once();
      if (!status.ok() && client_.stop.stop_requested()) return;  // a cancelled call is not counted
      ++ended_;
      if (status.ok()) continue;
      ++failed_;
      std::cerr << describe(status);
    }
  }

  grpc::Status call_once() {
    Call call(client_);
    auto reader = client_.stub->Generate(call.context(), client_.generate_request(client_.options.texts[0]));
    penstock::inference::v1::GenerateResponse response;
    while (reader->Read(&response)) ++messages_;
    return reader->Finish();
  }

  const Client& client_;
  const int64_t calls_;
  const Clock::time_point start_ = Clock::now();
  std::atomic<int64_t> begun_ = 0, ended_ = 0, failed_ = 0, messages_ = 0;
};

}  // namespace

// Makes many Generate calls over one channel, several at the same time, and counts them.
int load(const Client& client) { return Load(client).run(); }

}  // namespace client
