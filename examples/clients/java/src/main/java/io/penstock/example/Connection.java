package io.penstock.example;

import com.google.gson.Gson;
import com.google.gson.reflect.TypeToken;
import io.grpc.ChannelCredentials;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelRegistry.ProviderNotFoundException;
import io.grpc.Metadata;
import io.grpc.TlsChannelCredentials;
import io.grpc.stub.AbstractStub;
import io.grpc.stub.MetadataUtils;
import io.penstock.inference.v1.InferenceServiceGrpc;
import java.io.FileInputStream;
import java.io.IOException;
import java.io.InputStream;
import java.io.InputStreamReader;
import java.io.Reader;
import java.nio.charset.StandardCharsets;
import java.security.Security;
import java.util.Map;
import java.util.concurrent.TimeUnit;

/** The channel to the server. A program needs only one channel, which many concurrent calls can share. */
final class Connection {
  private static final int MAX_MESSAGE_BYTES = 64 << 20; // 4 MiB are too few for long log-probabilities

  static {
    // Java and gRPC each cache the addresses of a name for 30 s. During this time, a new server would not be found.
    Security.setProperty("networkaddress.cache.ttl", "1");
    System.setProperty("networkaddress.cache.ttl", "1");
  }

  private Connection() {}

  /** Returns a channel to host:port or {@code dns:///name:port}. The channel connects when the first call starts. */
  static ManagedChannel open(CommandLine line) throws IOException {
    try {
      return Grpc.newChannelBuilder(line.address, credentials(line))
          .defaultServiceConfig(serviceConfig())
          .keepAliveTime(30, TimeUnit.SECONDS) // detects a broken connection after 40 s, also in silent streams
          .keepAliveTimeout(10, TimeUnit.SECONDS)
          .maxInboundMessageSize(MAX_MESSAGE_BYTES)
          .intercept(MetadataUtils.newAttachHeadersInterceptor(authorization()))
          .build();
    } catch (IllegalArgumentException | ProviderNotFoundException error) {
      throw new IOException("no channel to " + line.address + ": " + error.getMessage(), error);
    }
  }

  /** Returns the settings for balancing, health checks and retries from the package of the stubs. */
  private static Map<String, ?> serviceConfig() throws IOException {
    InputStream json = InferenceServiceGrpc.class.getResourceAsStream("/io/penstock/service_config.json");
    try (Reader reader = new InputStreamReader(json, StandardCharsets.UTF_8)) {
      return new Gson().fromJson(reader, new TypeToken<Map<String, ?>>() {});
    }
  }

  private static ChannelCredentials credentials(CommandLine line) throws IOException {
    if (line.ca.isEmpty()) {
      return line.tls ? TlsChannelCredentials.create() : InsecureChannelCredentials.create();
    }
    try (InputStream certificates = new FileInputStream(line.ca)) {
      return TlsChannelCredentials.newBuilder().trustManager(certificates).build();
    }
  }

  /** Returns the metadata of each call, with the API key from the environment, if there is one. */
  private static Metadata authorization() {
    Metadata headers = new Metadata();
    String key = System.getenv("PENSTOCK_API_KEY");
    if (key != null && !key.isEmpty()) {
      headers.put(Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER), "Bearer " + key);
    }
    return headers;
  }

  /** Returns a stub for one call. The time until the call's deadline begins now. */
  static <S extends AbstractStub<S>> S withDeadline(S stub, CommandLine line) {
    return line.timeout > 0 ? stub.withDeadlineAfter((long) (line.timeout * 1e9), TimeUnit.NANOSECONDS) : stub;
  }
}
