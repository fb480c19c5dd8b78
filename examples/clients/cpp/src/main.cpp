// Calls a Penstock server: continues prompts, answers messages, and makes many calls at once.
#include <csignal>
#include <cstdlib>
#include <iostream>
#include <map>
#include <stop_token>
#include <thread>

#include "channel.h"
#include "client.h"

namespace {

using penstock::inference::v1::InferenceService;

const std::map<std::string, int (*)(const client::Client&)> kCommands = {
    {"generate", client::generate}, {"chat", client::chat}, {"session", client::session}, {"load", client::load}};

// Returns a token on which SIGINT requests a stop. Call this before the first thread starts: threads inherit blocked signals.
std::stop_token interrupt() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  std::stop_source source;
  std::thread([source, signals]() mutable {
    int received = 0;
    sigwait(&signals, &received);
    source.request_stop();
  }).detach();
  return source.get_token();
}

int run(const std::vector<std::string>& arguments) {
  if (arguments.empty()) throw client::UsageError("a command is missing");
  const auto command = kCommands.find(arguments[0]);
  if (command == kCommands.end()) throw client::UsageError("unknown command " + arguments[0]);
  client::Options options = client::parse_options(arguments);
  const char* key = std::getenv("PENSTOCK_API_KEY");
  const std::stop_token stop = interrupt();
  auto stub = InferenceService::NewStub(client::connect(options.address, options.tls, options.ca));
  return command->second({std::move(options), key ? key : "", stop, std::move(stub)});
}

}  // namespace

int main(int count, char* arguments[]) {
  try {
    return run({arguments + 1, arguments + count});
  } catch (const client::UsageError& error) {
    std::cerr << "client: " << error.what() << "\n" << client::kUsage;
    return client::kExitUsage;
  } catch (const std::exception& error) {
    std::cerr << "client: " << error.what() << "\n";
    return client::kExitFailed;
  }
}
