package penstock.example;

import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import io.grpc.ChannelCredentials;
import io.grpc.Context;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.StatusRuntimeException;
import io.grpc.TlsChannelCredentials;
import io.grpc.protobuf.StatusProto;
import io.grpc.stub.MetadataUtils;
import java.io.File;
import java.io.IOException;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import penstock.common.v1.Sampling.SamplingParams;
import penstock.inference.v1.InferenceServiceGrpc;
import penstock.inference.v1.InferenceServiceGrpc.InferenceServiceBlockingStub;
import penstock.inference.v1.Messages.GenerateRequest;
import penstock.inference.v1.Messages.GenerateResponse;

/** Streams the continuation of a prompt from a Penstock server. */
public final class Generate {
  private static final String USAGE =
      "usage: generate [options] PROMPT\n"
          + "  --address HOST:PORT  server (localhost:50051)\n"
          + "  --model NAME         name of the model; by default the one that is served\n"
          + "  --max-tokens N       longest output in tokens\n"
          + "  --temperature T      0 is greedy\n"
          + "  --seed N             makes the output reproducible\n"
          + "  --stop TEXT          a string that ends the output; repeatable\n"
          + "  --timeout SECONDS    deadline of the call\n"
          + "  --tls                encrypt the connection\n"
          + "  --ca FILE            certificates to trust; with it, --tls is not needed";
  private static final int MAX_MESSAGE_BYTES = 64 << 20; // 4 MiB are too few for long log-probabilities
  /** A call that failed before anything of its answer came is tried again, on the next address. Numbers are doubles. */
  private static final Map<String, Object> RETRY_POLICY =
      Map.of(
          "maxAttempts", 4.0,
          "initialBackoff", "0.1s",
          "maxBackoff", "2s",
          "backoffMultiplier", 2.0,
          "retryableStatusCodes", List.of("UNAVAILABLE"));
  private static final Map<String, Object> SERVICE_CONFIG =
      Map.of(
          "methodConfig",
          List.of(
              Map.of(
                  "name", List.of(Map.of("service", InferenceServiceGrpc.SERVICE_NAME)),
                  "retryPolicy", RETRY_POLICY)));
  private static final int EXIT_FAILED = 1;
  private static final int EXIT_USAGE = 2;

  private String address = "localhost:50051";
  private boolean tls = false;
  private String ca = "";
  private double timeout = 0;
  private GenerateRequest request = GenerateRequest.getDefaultInstance();

  private Generate() {}

  public static void main(String[] args) throws Exception {
    Generate command = new Generate();
    try {
      command.parse(args);
    } catch (IllegalArgumentException error) {
      System.err.println(error.getMessage() + "\n" + USAGE);
      System.exit(EXIT_USAGE);
    }
    System.exit(command.run());
  }

  /** Reads the command line. A field left out takes the model's default, so only what was asked for is set. */
  private void parse(String[] args) {
    GenerateRequest.Builder builder = GenerateRequest.newBuilder();
    SamplingParams.Builder params = builder.getSamplingParamsBuilder();
    for (int i = 0; i < args.length; i++) {
      if (!args[i].startsWith("--")) {
        builder.setText(args[i]);
        continue;
      }
      if (args[i].equals("--tls")) {
        tls = true;
        continue;
      }
      if (i + 1 == args.length) {
        throw new IllegalArgumentException(args[i] + " needs a value");
      }
      String value = args[i + 1];
      switch (args[i]) {
        case "--address" -> address = value;
        case "--model" -> builder.setModel(value);
        case "--max-tokens" -> params.setMaxTokens(Integer.parseUnsignedInt(value));
        case "--temperature" -> params.setTemperature(Float.parseFloat(value));
        case "--seed" -> params.setSeed(Long.parseLong(value));
        case "--stop" -> params.addStop(value);
        case "--timeout" -> timeout = Double.parseDouble(value);
        case "--ca" -> ca = value;
        default -> throw new IllegalArgumentException(args[i] + " is not known");
      }
      i++;
    }
    if (!builder.hasText()) {
      throw new IllegalArgumentException("a prompt is needed");
    }
    request = builder.build();
  }

  /** Prints the text as it arrives. Returns the exit code. */
  private int run() throws IOException {
    ManagedChannel channel = connect();
    Context.CancellableContext context = Context.current().withCancellation();
    // On Ctrl-C: cancel the call, which ends the work in the engine, and let the channel tell the server so.
    Thread onInterrupt = new Thread(() -> close(channel, context));
    Runtime.getRuntime().addShutdownHook(onInterrupt);
    Context previous = context.attach();
    try {
      Iterator<GenerateResponse> responses = stub(channel).generate(request);
      while (responses.hasNext()) {
        System.out.print(responses.next().getText());
        System.out.flush();
      }
      return 0;
    } catch (StatusRuntimeException error) {
      if (!context.isCancelled()) {
        describe(error);
      }
      return EXIT_FAILED;
    } finally {
      System.out.println();
      context.detach(previous);
    }
  }

  /** A channel: one connection to each address that the name has, calls in turn; retries, keepalive, TLS if asked for. */
  private ManagedChannel connect() throws IOException {
    return Grpc.newChannelBuilder(address, credentials())
        .defaultLoadBalancingPolicy("round_robin")
        .defaultServiceConfig(SERVICE_CONFIG)
        .keepAliveTime(30, TimeUnit.SECONDS) // a server that vanished is noticed after 40 s, also in a silent stream
        .keepAliveTimeout(10, TimeUnit.SECONDS)
        .maxInboundMessageSize(MAX_MESSAGE_BYTES)
        .build();
  }

  private ChannelCredentials credentials() throws IOException {
    if (!ca.isEmpty()) {
      return TlsChannelCredentials.newBuilder().trustManager(new File(ca)).build();
    }
    return tls ? TlsChannelCredentials.create() : InsecureChannelCredentials.create();
  }

  /** The stub, with the API key of the environment in the metadata of its calls. */
  private InferenceServiceBlockingStub stub(ManagedChannel channel) {
    InferenceServiceBlockingStub stub = InferenceServiceGrpc.newBlockingStub(channel);
    String key = System.getenv("PENSTOCK_API_KEY");
    if (key != null) {
      Metadata headers = new Metadata();
      headers.put(Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER), "Bearer " + key);
      stub = stub.withInterceptors(MetadataUtils.newAttachHeadersInterceptor(headers));
    }
    return timeout > 0 ? stub.withDeadlineAfter((long) (timeout * 1e9), TimeUnit.NANOSECONDS) : stub;
  }

  private static void close(ManagedChannel channel, Context.CancellableContext context) {
    context.cancel(null);
    channel.shutdown();
    try {
      channel.awaitTermination(1, TimeUnit.SECONDS);
    } catch (InterruptedException interrupted) {
      Thread.currentThread().interrupt();
    }
  }

  /** Prints the code and the message of a failed call, and its google.rpc details. */
  private static void describe(StatusRuntimeException error) {
    System.err.println(error.getStatus().getCode() + ": " + error.getStatus().getDescription());
    com.google.rpc.Status status = StatusProto.fromThrowable(error);
    if (status == null) {
      return;
    }
    try {
      for (Any detail : status.getDetailsList()) {
        if (detail.is(ErrorInfo.class)) {
          System.err.println("  reason: " + detail.unpack(ErrorInfo.class).getReason());
        } else if (detail.is(BadRequest.class)) {
          for (BadRequest.FieldViolation violation : detail.unpack(BadRequest.class).getFieldViolationsList()) {
            System.err.println("  field: " + violation.getField() + ": " + violation.getDescription());
          }
        } else if (detail.is(RetryInfo.class)) {
          var delay = detail.unpack(RetryInfo.class).getRetryDelay();
          System.err.println("  retry after: " + (delay.getSeconds() + delay.getNanos() / 1e9) + " s");
        }
      }
    } catch (InvalidProtocolBufferException broken) {
      System.err.println("  details that cannot be read: " + broken.getMessage());
    }
  }
}
