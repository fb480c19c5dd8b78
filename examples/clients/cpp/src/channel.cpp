#include "channel.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>

#include <cerrno>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <system_error>

#include "penstock/service_config.h"

namespace client {

namespace {

constexpr int kMaxMessageBytes = 64 << 20;  // 4 MiB are too few for long log-probabilities

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string content(std::istreambuf_iterator<char>(file), {});
  if (!file) throw std::system_error(errno, std::generic_category(), path);
  return content;
}

std::shared_ptr<grpc::ChannelCredentials> credentials(bool tls, const std::string& ca) {
  if (!tls && ca.empty()) return grpc::InsecureChannelCredentials();
  grpc::SslCredentialsOptions options;
  if (!ca.empty()) options.pem_root_certs = read_file(ca);
  return grpc::SslCredentials(options);
}

}  // namespace

std::shared_ptr<grpc::Channel> connect(const std::string& address, bool tls, const std::string& ca) {
  grpc::ChannelArguments arguments;
  arguments.SetServiceConfigJSON(penstock::kServiceConfig);
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  // Detect a broken connection after 40 s, even in a stream without messages.
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 30'000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
  arguments.SetInt("grpc.http2.ping_timeout_ms", 10'000);  // the same for a server that hangs; default: 60 s
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  // Resolve the name again when a connection ends, but wait at least 5 s between two resolutions (default: 30 s).
  arguments.SetInt(GRPC_ARG_DNS_MIN_TIME_BETWEEN_RESOLUTIONS_MS, 5'000);
  return grpc::CreateCustomChannel(address, credentials(tls, ca), arguments);
}

}  // namespace client
