// Parsing of the command line.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "penstock/common/v1/sampling.pb.h"

namespace client {

extern const char kUsage[];

// The values of the command line. If a field of `params` is not set, the model's default applies.
struct Options {
  std::string command;
  std::string address = "localhost:50051";
  bool tls = false;
  std::string ca;
  std::optional<std::chrono::nanoseconds> timeout;
  std::string model;
  penstock::common::v1::SamplingParams params;
  std::string system;
  std::optional<int64_t> abort_after;
  int64_t at_once = 1;
  std::optional<int64_t> calls;
  std::optional<std::chrono::nanoseconds> duration;
  std::vector<std::string> texts;
};

// Error in a command line.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Parses the command, its options and its texts. Throws UsageError.
Options parse_options(const std::vector<std::string>& arguments);

}  // namespace client
