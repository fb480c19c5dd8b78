#include "options.h"

#include <charconv>
#include <functional>
#include <limits>
#include <map>

namespace client {

const char kUsage[] = R"(usage: client generate [options] PROMPT       continue a prompt
       client chat     [options] MESSAGE      answer a message
       client session  [options] PROMPT...    continue all prompts over one stream
       client load     [options] PROMPT       make many calls at once

options:
  --address HOST:PORT  the server (localhost:50051); dns:///NAME:PORT uses all addresses in turn
  --tls                encrypt the connection
  --ca FILE            file with the certificates to trust; implies --tls
  --timeout SECONDS    deadline of each call
  --model NAME         default: the served model
  --max-tokens N       maximum number of output tokens
  --temperature T      sampling temperature; 0: greedy
  --seed N             seed for sampling, which makes the output reproducible
  --stop TEXT          text that ends the output; the option can be repeated
chat:
  --system TEXT        system message of the conversation
session:
  --abort-after N      abort the first request after N of its messages
load:
  --at-once N          number of calls that run at the same time (1)
  --calls N            total number of calls (default: the value of --at-once)
  --for SECONDS        start new calls for this time, instead of --calls

The environment variable PENSTOCK_API_KEY has the API key that the client sends.
)";

namespace {

constexpr int64_t kMostCalls = std::numeric_limits<int32_t>::max();
constexpr double kMostSeconds = 1e9;

// Function that processes the value of an option.
using Set = std::function<void(const std::string& name, const std::string& text)>;

template <typename T>
std::optional<T> number(const std::string& text) {
  T value{};
  const char* end = text.data() + text.size();
  auto [rest, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || rest != end) return std::nullopt;
  return value;
}

template <typename T>
T whole(const std::string& name, const std::string& text, T least = std::numeric_limits<T>::min(),
        T most = std::numeric_limits<T>::max()) {
  auto value = number<T>(text);
  if (!value || *value < least || *value > most) {
    throw UsageError(name + " is '" + text + "'; it must be a whole number from " + std::to_string(least) + " to " +
                     std::to_string(most));
  }
  return *value;
}

std::chrono::nanoseconds seconds(const std::string& name, const std::string& text) {
  auto value = number<double>(text);
  if (!value || !(*value > 0 && *value <= kMostSeconds)) {
    throw UsageError(name + " is '" + text + "'; it must be a number of seconds above 0 and at most 1000000000");
  }
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(*value));
}

float real(const std::string& name, const std::string& text) {
  auto value = number<float>(text);
  if (!value) throw UsageError(name + " is '" + text + "'; it must be a number");
  return *value;
}

Set text_of(std::string& value) {
  return [&value](const std::string&, const std::string& text) { value = text; };
}

template <typename Value>
Set count_of(Value& value) {
  return [&value](const std::string& name, const std::string& text) { value = whole<int64_t>(name, text, 1, kMostCalls); };
}

Set time_of(std::optional<std::chrono::nanoseconds>& value) {
  return [&value](const std::string& name, const std::string& text) { value = seconds(name, text); };
}

// Returns the options of the command that have a value.
std::map<std::string, Set> settings(Options& options) {
  auto* params = &options.params;
  std::map<std::string, Set> known = {
      {"--address", text_of(options.address)},
      {"--ca", text_of(options.ca)},
      {"--timeout", time_of(options.timeout)},
      {"--model", text_of(options.model)},
      {"--max-tokens", [=](auto& name, auto& text) { params->set_max_tokens(whole<uint32_t>(name, text)); }},
      {"--temperature", [=](auto& name, auto& text) { params->set_temperature(real(name, text)); }},
      {"--seed", [=](auto& name, auto& text) { params->set_seed(whole<int64_t>(name, text)); }},
      {"--stop", [=](auto&, auto& text) { params->add_stop(text); }},
  };
  if (options.command == "chat") {
    known["--system"] = text_of(options.system);
  } else if (options.command == "session") {
    known["--abort-after"] = count_of(options.abort_after);
  } else if (options.command == "load") {
    known["--at-once"] = count_of(options.at_once);
    known["--calls"] = count_of(options.calls);
    known["--for"] = time_of(options.duration);
  }
  return known;
}

void check(const Options& options) {
  if (options.texts.empty() || (options.texts.size() > 1 && options.command != "session")) {
    throw UsageError(options.command + " takes one text, not " + std::to_string(options.texts.size()));
  }
  if (options.calls && options.duration) throw UsageError("--calls and --for exclude each other");
}

}  // namespace

Options parse_options(const std::vector<std::string>& arguments) {
  Options options;
  options.command = arguments.at(0);
  const auto known = settings(options);
  size_t at = 1;
  for (; at < arguments.size() && arguments[at].starts_with("--") && arguments[at] != "--"; ++at) {
    const std::string& argument = arguments[at];
    if (argument == "--tls") {
      options.tls = true;
      continue;
    }
    const size_t equals = argument.find('=');
    const std::string name = argument.substr(0, equals);
    const auto option = known.find(name);
    if (option == known.end()) throw UsageError(options.command + " has no option " + name);
    if (equals == std::string::npos && ++at == arguments.size()) throw UsageError(name + " needs a value");
    option->second(name, equals == std::string::npos ? arguments[at] : argument.substr(equals + 1));
  }
  if (at < arguments.size() && arguments[at] == "--") ++at;
  options.texts.assign(arguments.begin() + static_cast<std::ptrdiff_t>(at), arguments.end());
  check(options);
  return options;
}

}  // namespace client
