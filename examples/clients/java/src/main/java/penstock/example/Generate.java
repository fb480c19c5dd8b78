package penstock.example;

import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import io.grpc.Context;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import java.util.Iterator;
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
          + "  --timeout SECONDS    deadline of the call";
  private static final int EXIT_FAILED = 1;
  private static final int EXIT_USAGE = 2;

  private String address = "localhost:50051";
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
  private int run() throws InterruptedException {
    ManagedChannel channel = Grpc.newChannelBuilder(address, InsecureChannelCredentials.create()).build();
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

  private InferenceServiceBlockingStub stub(ManagedChannel channel) {
    InferenceServiceBlockingStub stub = InferenceServiceGrpc.newBlockingStub(channel);
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
