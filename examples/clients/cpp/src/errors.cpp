#include "errors.h"

#include <array>
#include <charconv>

#include "error_details.pb.h"

namespace client {

namespace {

std::string name_of(grpc::StatusCode code) {
  static constexpr std::array kNames = {
      "OK",             "CANCELLED",         "UNKNOWN",            "INVALID_ARGUMENT",    "DEADLINE_EXCEEDED", "NOT_FOUND",
      "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED",           "OUT_OF_RANGE",
      "UNIMPLEMENTED",  "INTERNAL",          "UNAVAILABLE",        "DATA_LOSS",           "UNAUTHENTICATED"};
  const auto number = static_cast<size_t>(code);
  return number < kNames.size() ? kNames[number] : std::to_string(code);
}

// Returns the shortest decimal text for the number.
std::string decimal(double number) {
  std::array<char, 32> digits;
  const auto [end, error] = std::to_chars(digits.data(), digits.data() + digits.size(), number);
  return std::string(digits.data(), end);
}

std::string describe(const google::protobuf::Any& detail) {
  google::rpc::ErrorInfo info;
  google::rpc::BadRequest bad;
  google::rpc::RetryInfo retry;
  std::string lines;
  if (detail.UnpackTo(&info)) {
    lines = "  reason: " + info.reason() + "\n";
  } else if (detail.UnpackTo(&bad)) {
    for (const auto& violation : bad.field_violations()) {
      lines += "  field: " + violation.field() + "\n";
    }
  } else if (detail.UnpackTo(&retry)) {
    const auto& delay = retry.retry_delay();
    lines = "  retry after: " + decimal(static_cast<double>(delay.seconds()) + delay.nanos() / 1e9) + " s\n";
  }
  return lines;
}

}  // namespace

std::string describe(const grpc::Status& failed) {
  std::string lines = name_of(failed.error_code()) + ": " + failed.error_message() + "\n";
  google::rpc::Status status;  // from grpc-status-details-bin; empty if no Penstock server created the error
  status.ParseFromString(failed.error_details());
  for (const auto& detail : status.details()) lines += describe(detail);
  return lines;
}

std::string describe(const penstock::inference::v1::SessionError& failed) {
  const auto& error = failed.error();
  std::string lines = "[" + failed.request_id() + "] " + error.code() + ": " + error.message() + "\n";
  lines += "  reason: " + error.reason() + "\n";
  if (!error.field().empty()) lines += "  field: " + error.field() + "\n";
  if (error.has_retry_after()) lines += "  retry after: " + decimal(error.retry_after()) + " s\n";
  return lines;
}

}  // namespace client
